"""Whatever times a machine takes and whatever words come true: no path leads past the ledgers' bound.

A path is a list of moves, each what the world does to one cycle; the controller does what its ledgers let it. Checked
after every step, for the engine and each class, reckoned anew from what was spent:

    debt  <=  ALLOWED * plain + cycle + surplus

within a window, and, over all windows, time <= (1 + ALLOWED) * plain + one cycle and one surplus for each window.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from understudy.control.breaker import Tally
from understudy.control.classes import Line
from understudy.control.controller import ENGINE, Controller
from understudy.control.cost import CostModel, Load
from understudy.control.ledger import ALLOWED, WINDOW_S
from understudy.control.planning import AnswerLengths
from understudy.control.stats import AcceptanceStats

PLAIN_S = 0.5
"""Long steps, so that windows of a minute are over soon."""
ROW_S = 0.1
ROUNDING = 1e-9


@dataclass(frozen=True)
class Move:
    """What the world does to a cycle."""

    rows: tuple[int, int]
    """That the texts of two classes would draft."""
    right: tuple[int, int]
    """How many of them come true."""
    slowness: float
    """Time of the pass: 0 is as predicted, 1 the worst case that was reckoned with, more an overrun."""
    asking: float
    """What asking takes, in plain steps."""
    is_priced: bool
    """Whether asking was planned, and so asked leave for."""


@dataclass
class _Account:
    plain_s: float = 0.0
    debt_s: float = 0.0
    cycle_s: float = 0.0
    surplus_s: float = 0.0
    total_plain_s: float = 0.0
    total_spent_s: float = 0.0
    given_s: float = 0.0

    def add(self, *, plain_s: float, debt_s: float, cycle_s: float, surplus_s: float) -> None:
        self.cycle_s = max(self.cycle_s, cycle_s, 0.0 if self.plain_s else PLAIN_S)
        self.surplus_s = max(self.surplus_s, surplus_s)
        self.plain_s += plain_s
        self.debt_s += debt_s
        self.total_plain_s += plain_s
        self.total_spent_s += plain_s + debt_s
        allowed_s = ALLOWED * self.plain_s + self.cycle_s + self.surplus_s
        assert self.debt_s <= allowed_s + ROUNDING, "a window owes more than is allowed"
        given_s = self.given_s + self.cycle_s + self.surplus_s
        assert self.total_spent_s <= (1 + ALLOWED) * self.total_plain_s + given_s + ROUNDING, "too slow over all"
        if self.plain_s >= WINDOW_S:
            self.given_s = given_s
            self.plain_s = self.cycle_s = self.surplus_s = 0.0
            self.debt_s = min(0.0, max(self.debt_s, -ALLOWED * WINDOW_S))


@dataclass
class Path:
    """A controller, and somebody who reckons along."""

    controller: Controller = field(
        default_factory=lambda: Controller(
            CostModel({1: PLAIN_S, 101: PLAIN_S + 100 * ROW_S}),
            AcceptanceStats(),
            AnswerLengths(),
            policy=None,
            control_share=0.0,
            exempt=frozenset({"ngram"}),  # no breaker: the ledgers alone stand in the way
            emit=lambda event: None,
        )
    )
    accounts: dict[str, _Account] = field(default_factory=dict)
    num_bought: int = 0
    num_refused: int = 0

    def play(self, move: Move) -> None:
        """One cycle of two texts, one of each class."""
        controller, names = self.controller, ("code", "chat")
        base = Load(2, 0, 0)
        plain_s = controller._cost.step_s(base)
        asked = [name for name in names if controller.asks(Line(name, 0), "ngram")]
        if move.is_priced and asked:
            texts = dict.fromkeys(asked, 1)
            asked = asked if controller.permits_asking(texts, move.asking * PLAIN_S) else []
        asking_s = move.asking * PLAIN_S if asked else 0.0
        asked_s = {name: asking_s / len(asked) for name in asked}
        rows = {name: count for name, count in zip(names, move.rows, strict=True) if name in asked and count}
        while rows:
            load = Load(2 + sum(rows.values()), 0, 0)
            refused = controller.refused(rows, base, load, asked_s)
            if not refused:
                break
            self.num_refused += 1
            rows = {name: count for name, count in rows.items() if name not in refused}
        total = sum(rows.values())
        self.num_bought += bool(total)
        load = Load(2 + total, 0, 0)
        predicted_s = controller._cost.step_s(load, base)
        worst_s = controller._worst.of(total, predicted_s)
        forward_s = max(0.1 * plain_s, predicted_s + move.slowness * (worst_s - predicted_s)) if total else plain_s
        right = {name: min(count, rows.get(name, 0)) for name, count in zip(names, move.right, strict=True)}
        for name, count in rows.items():
            controller.count(Line(name, 0), "ngram", Tally(count, right[name], count, right[name]))
        cycles_s = {name: controller._class(name).ledger.cycle_s for name in names}
        cycles_s[ENGINE] = controller._engine.ledger.cycle_s
        controller.settle(
            {Line(name, 0): 1 for name in names},
            base=base,
            load=load,
            forward_s=forward_s,
            drafting_s={"ngram": {Line(name, 0): seconds for name, seconds in asked_s.items()}},
        )
        for name in (*names, ENGINE):
            share = 1.0 if name == ENGINE else rows.get(name, 0) / total if total else 0.0
            asking = asking_s if name == ENGINE else asked_s.get(name, 0.0)
            saved_s = plain_s * (sum(right.values()) if name == ENGINE else right[name]) / 2
            excess_s = (forward_s - plain_s) * share if total else 0.0
            over_s = max(0.0, forward_s - worst_s) * share
            self.accounts.setdefault(name, _Account()).add(
                plain_s=plain_s * (1.0 if name == ENGINE else 0.5) + saved_s,
                debt_s=excess_s + asking - saved_s,
                cycle_s=cycles_s[name],
                surplus_s=over_s if total and share else asking,
            )


def long_path(seed: int, num_cycles: int = 600) -> Path:
    """A path drawn by lot that loses whenever it may: several windows long."""
    rng = random.Random(seed)
    path = Path()
    for _ in range(num_cycles):
        luck = rng.random() < 0.3
        rows = (rng.randint(0, 4), rng.randint(0, 4))
        path.play(
            Move(
                rows=rows,
                right=rows if luck else (0, 0),
                slowness=rng.choice((-0.8, 0.0, 1.0)) if rng.random() < 0.97 else 3.0,
                asking=rng.choice((0.0, 0.0, 0.01, 0.5)),
                is_priced=rng.random() < 0.5,
            )
        )
    return path


def path_that_turns(num_cycles: int = 400) -> Path:
    """Everything comes true for more than a window, then nothing ever again."""
    path = Path()
    for number in range(num_cycles):
        rows = (4, 4)
        is_good = number < num_cycles // 2
        path.play(Move(rows=rows, right=rows if is_good else (0, 0), slowness=0.0, asking=0.01, is_priced=False))
    return path

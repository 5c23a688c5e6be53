"""The arms take turns: every unit is served by one arm right after the other, so a disturbance hits them all.

Who begins changes from round to round, and from unit to unit within one. A round is begun only if it will probably
end within the budget; the first one always runs, and no round is left half done, but for an interruption. What was
measured until then is kept: only units that all arms have served count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from understudy.bench.served import Served
from understudy.bench.workloads import Plan, Unit


class Arm(Protocol):
    """One way of answering; the first of a run is the one that the others are compared with."""

    @property
    def name(self) -> str:
        """What a row calls it."""

    def warm_up(self, unit: Unit) -> None:
        """Pay for what only a first request costs; what cannot work at all fails here."""

    def serve(self, unit: Unit) -> Served:
        """Answer all questions of a unit."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A unit, and what each arm made of it."""

    unit: Unit
    served: Mapping[str, Served]
    """By the arm's name."""

    @property
    def errors(self) -> list[str]:
        """What went wrong under any arm."""
        return [f"{name}: {error}" for name, served in self.served.items() for error in served.errors]


@dataclass(slots=True)
class Measured:
    """All that was measured."""

    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Of requests that failed. A turn with one is left out under every arm: the arms did not do the same work."""
    num_requests: int = 0
    num_rounds: int = 0
    interrupted: bool = False
    seconds: float = 0.0


class Watcher(Protocol):
    """Who wants to see a run."""

    def at(self, what: str, *, elapsed_s: float, expected_s: float) -> None:
        """See what is being done, for how long it has run and how long it will probably take in all."""

    def finished(self, round_number: int, measured: Measured) -> None:
        """See that a round is done."""


def alternate(arms: Sequence[Arm], plan: Plan, *, budget_s: float, watcher: Watcher) -> Measured:
    """Run rounds until the budget is used."""
    measured = Measured()
    started = time.perf_counter()
    try:
        for unit in plan.round(0):
            if unit.place % len(plan.questions) == 0:
                for arm in arms:
                    watcher.at(f"{arm.name}: warming up", elapsed_s=0.0, expected_s=budget_s)
                    arm.warm_up(unit)
        started = time.perf_counter()
        while _another_fits(measured.num_rounds, time.perf_counter() - started, budget_s):
            for unit in plan.round(measured.num_rounds):
                done = measured.num_rounds * plan.units_per_round + unit.place
                elapsed_s = time.perf_counter() - started
                expected_s = max(budget_s, elapsed_s * plan.units_per_round / done if done else 0.0)
                _take_turns(arms, unit, measured, watcher, (started, expected_s))
            measured.num_rounds += 1
            watcher.finished(measured.num_rounds, measured)
    except KeyboardInterrupt:
        measured.interrupted = True
    measured.seconds = time.perf_counter() - started
    return measured


def turn_order(arms: Sequence[Arm], unit: Unit) -> list[Arm]:
    """Who begins: each arm in turn, from unit to unit of a round and from round to round of a unit."""
    first = (unit.place + unit.round_number) % len(arms)
    return [*arms[first:], *arms[:first]]


def _take_turns(
    arms: Sequence[Arm], unit: Unit, measured: Measured, watcher: Watcher, clock: tuple[float, float]
) -> None:
    started, expected_s = clock
    served: dict[str, Served] = {}
    for arm in turn_order(arms, unit):
        at_once = "open loop" if unit.concurrency is None else f"{unit.concurrency} at once"
        what = f"{unit.prompt_class}, temperature {unit.temperature:g}, {at_once}: {arm.name}"
        watcher.at(what, elapsed_s=time.perf_counter() - started, expected_s=expected_s)
        served[arm.name] = arm.serve(unit)
    turn = Turn(unit, served)
    measured.num_requests += len(unit.questions) * len(arms)
    measured.errors.extend(turn.errors)
    if not turn.errors:
        measured.turns.append(turn)


def _another_fits(num_rounds: int, elapsed_s: float, budget_s: float) -> bool:
    return num_rounds == 0 or elapsed_s * (1 + 1 / num_rounds) <= budget_s

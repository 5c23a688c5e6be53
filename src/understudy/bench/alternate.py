"""The arms take turns, so that a disturbance hits them all.

Engines that leave nothing under way between two steps do so step by step within every unit (`run.in_step`); others
serve it one right after the other (`in_turn`).

Who begins changes from round to round, and from unit to unit within one. A round is begun only if it will probably
end within the budget; the first one always runs, and no round is left half done, but for an interruption. What was
measured until then is kept: only units that all arms have served count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

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


A = TypeVar("A", bound=Arm)
Serve = Callable[[Sequence[A], Unit], Mapping[str, Served]]
"""How arms answer a unit, the one that begins first; by their names."""


def in_turn(arms: Sequence[Arm], unit: Unit) -> Mapping[str, Served]:
    """One right after the other."""
    return {arm.name: arm.serve(unit) for arm in arms}


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

    def count(self, turn: Turn) -> None:
        """Add a turn."""
        self.num_requests += len(turn.unit.questions) * len(turn.served)
        self.errors.extend(turn.errors)
        if not turn.errors:
            self.turns.append(turn)


class Watcher(Protocol):
    """Who wants to see a run."""

    def at(self, what: str, *, elapsed_s: float, expected_s: float) -> None:
        """See what is being done, for how long it has run and how long it will probably take in all."""

    def finished(self, round_number: int, measured: Measured) -> None:
        """See that a round is done."""


def alternate(arms: Sequence[A], plan: Plan, *, serve: Serve[A], budget_s: float, watcher: Watcher) -> Measured:
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
                elapsed_s = time.perf_counter() - started
                done = measured.num_rounds * plan.units_per_round + unit.place
                expected_s = max(budget_s, elapsed_s * plan.units_per_round / done if done else 0.0)
                watcher.at(_described(unit), elapsed_s=elapsed_s, expected_s=expected_s)
                measured.count(Turn(unit, serve(turn_order(arms, unit), unit)))
            measured.num_rounds += 1
            watcher.finished(measured.num_rounds, measured)
    except KeyboardInterrupt:
        measured.interrupted = True
    measured.seconds = time.perf_counter() - started
    return measured


def turn_order(arms: Sequence[A], unit: Unit) -> list[A]:
    """Who begins: each arm in turn, from unit to unit of a round and from round to round of a unit."""
    first = (unit.place + unit.round_number) % len(arms)
    return [*arms[first:], *arms[:first]]


def _described(unit: Unit) -> str:
    at_once = "open loop" if unit.concurrency is None else f"{unit.concurrency} at once"
    return f"{unit.prompt_class}, temperature {unit.temperature:g}, {at_once}"


def _another_fits(num_rounds: int, elapsed_s: float, budget_s: float) -> bool:
    return num_rounds == 0 or elapsed_s * (1 + 1 / num_rounds) <= budget_s

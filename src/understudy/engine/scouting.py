"""Rows that are computed to learn from, not to be said: bought where what they teach pays for them.

A scouting drafter (lookahead) lets the target run ahead of the text in rows beside the draft. The rows are dear in the
step that computes them and pay off in later ones, so they cannot be weighed like drafted rows. What is weighed is the
words per cycle that the drafter's proposals have added while it was scouting, against the time that its rows take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, cast

from understudy.control.cost import CostModel, Load
from understudy.control.planning import Allowance
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.base import Drafter, ScoutingDrafter
from understudy.engine.sequence import Sequence

_FIRST_YIELD = 0.5
"""Words per cycle expected of a class that nothing is known of: enough to be tried where rows are cheap."""
_WEIGHT = 0.05


class Scouting:
    """Decides for whom the scouting drafter of an engine, if it has one, may have its rows."""

    def __init__(
        self,
        drafters: Items[Drafter],
        cost: CostModel,
        allowance: Allowance,
        guard: Callable[[Drafter, Callable[[], Any]], Any],
    ) -> None:
        self._drafters = drafters  # shared with whoever switches failing ones off
        self._cost = cost
        self._allowance = allowance
        self._guard = guard
        self._yields: dict[str, float] = {}  # words per cycle, by class
        self._learning_s = 0.0  # what drawing the words after one sequence's rows takes
        self._active: set[int] = set()

    def choose(
        self, sequences: Items[Sequence], bought: Items[Draft], base: Load, *, max_rows: int, num_emitting: int
    ) -> list[Draft]:
        """The rows that each sequence's drafter learns from in this step."""
        scouts = [EMPTY] * len(sequences)
        self._active.clear()
        drafter = self._drafter
        if drafter is None:
            return scouts
        load = Load(base.rows + sum(len(draft) for draft in bought), base.keys, base.reads)
        room = max_rows - (load.rows - base.rows)
        rate = num_emitting / self._cost.step_s(base)
        for index, sequence in enumerate(sequences):
            count = drafter.num_scouts
            if count > room or not _allows(sequence, drafter.name):
                continue
            more = Load(load.rows + count, load.keys, load.reads + count * len(sequence.tokens))
            extra_s = self._cost.step_s(more) - self._cost.step_s(load) + self._learning_s
            if not self._pays(sequence, extra_s, rate, drafter.name):
                continue
            draft = self._guard(drafter, partial(drafter.scout, sequence.context))
            if draft is not None and 0 < len(draft) <= count:
                scouts[index], load, room = draft, more, room - len(draft)
                self._active.add(sequence.sequence_id)
        return scouts

    def observe(self, sequence: Sequence, bought: Draft, words: Items[int]) -> None:
        """Count the words that the drafter's proposals added while it was scouting."""
        drafter = self._drafter
        if drafter is None or sequence.sequence_id not in self._active or not words:
            return
        added, at = 0, ROOT
        for word in words:
            child = bought.child(at, word)
            if child is None:
                break
            added, at = added + (bought.sources[child] == drafter.name), child
        workload_class = sequence.request.workload_class
        known = self._yields.get(workload_class, _FIRST_YIELD)
        self._yields[workload_class] = known + _WEIGHT * (added - known)

    def learn(self, sequence: Sequence, words: Callable[[], list[int]]) -> None:
        """Give the drafter the target's words after its rows."""
        drafter = self._drafter
        if drafter is None:
            return
        started = time.perf_counter()
        self._guard(drafter, lambda: drafter.learn(sequence.context, words()))
        self._learning_s += _WEIGHT * (time.perf_counter() - started - self._learning_s)

    @property
    def _drafter(self) -> ScoutingDrafter | None:
        """The one that scouts, unless it was switched off."""
        return next((cast(ScoutingDrafter, drafter) for drafter in self._drafters if hasattr(drafter, "scout")), None)

    def _pays(self, sequence: Sequence, extra_s: float, rate: float, name: str) -> bool:
        if sequence.request.speculation.forced:
            return True
        if self._yields.get(sequence.request.workload_class, _FIRST_YIELD) > rate * extra_s:
            return True
        self._allowance.save(name, 1.0 / rate)
        return self._allowance.spend(name, extra_s)


def _allows(sequence: Sequence, name: str) -> bool:
    wanted = sequence.request.speculation
    return wanted.enabled and wanted.drafter in (None, name) and wanted.max_rows > 0 and sequence.num_left > 1

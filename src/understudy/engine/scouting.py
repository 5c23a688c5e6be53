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

from understudy.control.classes import ClassNames
from understudy.control.cost import CostModel, Load
from understudy.control.planning import Allowance
from understudy.core.draft import EMPTY, ROOT, Draft, is_tree, is_well_typed
from understudy.core.switches import Switches
from understudy.drafters.base import Drafter, ScoutingDrafter
from understudy.engine.scheduler import Share
from understudy.engine.sequence import Sequence
from understudy.runtime.runner import Answer

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
        *,
        vocab_size: int,
    ) -> None:
        self._active = drafters  # shared with whoever switches failing ones off
        self._scout = next((cast(ScoutingDrafter, drafter) for drafter in drafters if hasattr(drafter, "scout")), None)
        self._cost = cost
        self._allowance = allowance
        self._guard = guard
        self._vocab_size = vocab_size
        self._yields: dict[str, float] = {}  # words per cycle, by class
        self._classes = ClassNames()
        self._learning_s = 0.0  # what drawing the words after one sequence's rows takes

    def choose(
        self,
        sequences: Items[Sequence],
        bought: Items[Draft],
        base: Load,
        *,
        switches: Switches,
        max_rows: int,
        num_emitting: int,
        permits: Callable[[str, float], bool],
    ) -> list[Draft]:
        """The rows that each sequence's drafter learns from in this step.

        `permits`: whether the ledgers have room for so many seconds, by class.
        """
        scouts = [EMPTY] * len(sequences)
        drafter = self._drafter
        if drafter is not None and not switches.allows(drafter.name):
            return scouts
        count = None if drafter is None else self._guard(drafter, partial(_num_scouts, drafter))
        if drafter is None or count is None:
            return scouts
        load = Load(base.rows + sum(len(draft) for draft in bought), base.keys, base.reads)
        room = max_rows - (load.rows - base.rows)
        bare_s = self._cost.step_s(base)
        rate = num_emitting / self._cost.step_s(base)
        for index, sequence in enumerate(sequences):
            if count > room or not _allows(sequence, switches, drafter.name, count):
                continue
            more = Load(load.rows + count, load.keys, load.reads + count * len(sequence.tokens))
            extra_s = self._cost.step_s(more) - self._cost.step_s(load) + self._learning_s
            if not self._pays(sequence, extra_s, rate, drafter.name):
                continue
            whole_s = self._cost.step_s(more) - bare_s
            if not sequence.request.speculation.forced and not permits(sequence.request.workload_class, whole_s):
                continue
            draft = self._guard(drafter, partial(self._window, drafter, sequence, count))
            if draft is None:  # it failed: it has no more say in this step
                break
            if 0 < draft.depth <= sequence.num_left:  # no row stands where no word may: beyond the context is nothing
                scouts[index], load, room = draft, more, room - len(draft)
        return scouts

    @property
    def is_possible(self) -> bool:
        """Whether there is a drafter that learns from rows of its own."""
        return self._drafter is not None

    def observe(self, sequence: Sequence, bought: Draft, words: Items[int]) -> None:
        """Count the words that the drafter's proposals added in a step in which it was scouting."""
        drafter = self._drafter
        if drafter is None or not words:
            return
        added, at = 0, ROOT
        for word in words:
            child = bought.child(at, word)
            if child is None:
                break
            added, at = added + (bought.sources[child] == drafter.name), child
        workload_class = self._classes.known(sequence.request.workload_class)
        known = self._yields.get(workload_class, _FIRST_YIELD)
        self._yields[workload_class] = known + _WEIGHT * (added - known)

    def learn(self, share: Share, bought: Draft, scouts: Draft, answer: Answer) -> None:
        """Let the drafter see what the target would say after its rows, which stand behind what was bought."""
        drafter, sequence = self._drafter, share.sequence
        if drafter is None or not len(scouts) or sequence.finish_reason is not None:
            return
        depths = scouts.depths()
        first = sequence.cache.length + share.num_known  # the position of a node of depth 1
        first_row = 1 + len(bought)

        def words() -> list[int]:
            return [
                sequence.foresee(answer, first_row + index, first + depths[leaf])
                for index, leaf in enumerate(scouts.leaves())
            ]

        started = time.perf_counter()
        self._guard(drafter, lambda: drafter.learn(sequence.context, words()))
        self._learning_s += _WEIGHT * (time.perf_counter() - started - self._learning_s)

    @property
    def _drafter(self) -> ScoutingDrafter | None:
        """The one that scouts, unless it was switched off."""
        return self._scout if self._scout in self._active else None

    def _pays(self, sequence: Sequence, extra_s: float, rate: float, name: str) -> bool:
        if sequence.request.speculation.forced:
            return True
        if self._yields.get(self._classes.known(sequence.request.workload_class), _FIRST_YIELD) > rate * extra_s:
            return True
        self._allowance.save(name, 1.0 / rate)
        return self._allowance.spend(name, extra_s)

    def _window(self, drafter: ScoutingDrafter, sequence: Sequence, count: int) -> Draft:
        """Ask for the rows, and refuse what the target could not compute."""
        draft = drafter.scout(sequence.context)
        if not isinstance(draft, Draft) or not is_tree(draft) or not is_well_typed(draft):
            raise TypeError("scout() must return a tree of tokens")
        if len(draft) > count or not all(0 <= token < self._vocab_size for token in draft.tokens):
            raise ValueError(f"scout() must return at most {count} tokens below {self._vocab_size}")
        return draft


def _num_scouts(drafter: ScoutingDrafter) -> int:
    return max(1, int(drafter.num_scouts))


def _allows(sequence: Sequence, switches: Switches, name: str, count: int) -> bool:
    wanted = sequence.request.speculation
    depth = switches.depth_of(wanted, sequence.request.workload_class)
    return depth > 0 and wanted.drafter in (None, name) and wanted.max_rows >= count and sequence.num_left > 1

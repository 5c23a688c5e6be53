"""Drafts that begin before they are asked for.

Between the words of one pass and the drafts of the next lies a good part of a millisecond of the host's work: what was
said is committed, the next rows are planned, and drafters that cost time are weighed. A drafter on a device can spend
it on the text that it would have to read in any case, and on guesses that it has made each time. So it begins as soon
as the words are known, with the texts for which it was asked in the last step because that was expected to pay; asking
it goes on from there.

Whether it is asked after all is decided as it would have been, by all that decides it. If it is not, then nothing was
drafted: some rows were computed in vain. The next pass is not held responsible for that time, and the ledgers are told,
as of what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from understudy.core.switches import Switches
from understudy.drafters.base import Drafter, EarlyDrafter
from understudy.engine.asking import Asking, budget_of, reaches
from understudy.engine.proposal import DraftingTime, Reading
from understudy.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a drafter began, for whom, and what that is expected to take."""

    drafter: EarlyDrafter
    sequences: list[Sequence]
    seconds: float


class Early:
    """Lets the drafters of an engine that can begin early do so, if there are any."""

    def __init__(self, asking: Asking, drafters: Items[Drafter], clock: Callable[[], float]) -> None:
        self._asking = asking
        self._drafters = [cast(EarlyDrafter, drafter) for drafter in drafters if hasattr(drafter, "begin")]
        self._clock = clock
        self._begun: list[_Begun] = []

    def begin(self, sequences: Items[Sequence], switches: Switches) -> None:
        """Begin to draft for those of the sequences that are likely to be asked about in the next step.

        Beside a prompt nothing is drafted, so nothing begins.
        """
        if not self._drafters or not all(sequence.num_generated for sequence in sequences):
            return
        for drafter in self._drafters:
            planned = self._asking.planned.get(drafter.name, ())
            if not planned or not switches.allows(drafter.name):
                continue
            chosen = [
                sequence
                for sequence in sequences
                if sequence.sequence_id in planned
                and sequence.finish_reason is None
                and self._asking.is_active(drafter, sequence)
                and reaches(budget_of(sequence, switches))
            ]
            if chosen:
                self._begin(drafter, chosen)

    def _begin(self, drafter: EarlyDrafter, sequences: list[Sequence]) -> None:
        started_s = self._clock()
        contexts = [sequence.context for sequence in sequences]
        is_underway = self._asking.guard(drafter, partial(drafter.begin, contexts))
        if is_underway is None:  # it failed, and is not asked in this step
            self._asking.left_out.add(drafter.name)
        elif is_underway:
            self._begun.append(_Begun(drafter, sequences, max(0.0, drafter.ready_s - started_s)))

    def settle(self, time: DraftingTime) -> DraftingTime:
        """What drafting took in a step, with what was begun in vain: that was reading, and is paid for as such."""
        planned, left_out = self._asking.planned, self._asking.left_out
        for drafter in self._drafters:
            if drafter.name not in time.asked_s and drafter.name not in left_out:
                planned.pop(drafter.name, None)
        for begun in self._begun:
            time = replace(time, ready_s=max(time.ready_s, begun.drafter.ready_s))
            if not planned.get(begun.drafter.name):
                time = replace(time, readings=(*time.readings, Reading(begun.sequences, begun.seconds)))
        self._begun = []
        left_out.clear()
        return time

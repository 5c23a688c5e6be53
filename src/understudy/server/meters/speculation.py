"""What speculation did, counted from every choice that ended: the sums of all per-request blocks, whatever ended them.

acceptance rate        accepted_tokens / drafted_tokens
tokens per cycle       1 + accepted_tokens / cycles
at a position          position_accepted / position_reached
a drafter's yield      accepted_by_drafter / rows
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

from prometheus_client import CollectorRegistry, Counter

from understudy.core.request import Facts

MOST_POSITIONS = 16
"""Positions that are told apart; deeper ones count as the last."""
_POSITIONS = (*(str(position) for position in range(1, MOST_POSITIONS)), f"{MOST_POSITIONS}+")
"""The first drafted token is at position 1."""
_ACCEPTED = (*(str(count) for count in range(MOST_POSITIONS)), f"{MOST_POSITIONS}+")


class SpeculationMeter:
    """Counters of drafts and of what became of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"understudy_{name}", meaning, ("workload_class", *labels), registry=registry)

        self.cycles = counter("spec_cycles", "Passes of the target that said something, one for each choice in them")
        self.drafts = counter("spec_drafts", "Cycles that verified a draft")
        self.drafted = counter("spec_drafted_tokens", "Positions on the longest path of each draft")
        self.accepted = counter("spec_accepted_tokens", "Drafted positions that held the target's word")
        self.rejected = counter("spec_rejected_tokens", "Drafted positions that did not; cut off ones count as neither")
        self.saved = counter("target_passes_saved", "Words less cycles: passes that plain decoding takes more")
        self.reached = counter("spec_position_reached", "Walks that came to a drafted position", "position")
        self.matched = counter("spec_position_accepted", "Of those, the ones that it held the word of", "position")
        self.by_accepted = counter("spec_drafts_by_accepted", "Drafts by how many tokens were accepted", "accepted")
        self.rows = counter("spec_rows", "Drafted tokens that were verified, by who proposed them", "drafter")
        self.by_drafter = counter("spec_accepted_by_drafter", "Of those, the ones that the target said", "drafter")
        self._classes: dict[str, _OneClass] = {}

    def add(self, workload_class: str, facts: Facts) -> None:
        """Count a choice that ended. The class is one of a limited number."""
        counted = self._classes.get(workload_class)
        if counted is None:
            counted = self._classes[workload_class] = _OneClass(self, workload_class)
        counted.add(facts)


class _OneClass:
    """The counters of one class, looked up once."""

    def __init__(self, meter: SpeculationMeter, workload_class: str) -> None:
        self._cycles = meter.cycles.labels(workload_class)
        self._drafts = meter.drafts.labels(workload_class)
        self._drafted = meter.drafted.labels(workload_class)
        self._accepted = meter.accepted.labels(workload_class)
        self._rejected = meter.rejected.labels(workload_class)
        self._saved = meter.saved.labels(workload_class)
        self._reached = [meter.reached.labels(workload_class, position) for position in _POSITIONS]
        self._matched = [meter.matched.labels(workload_class, position) for position in _POSITIONS]
        self._by_accepted = [meter.by_accepted.labels(workload_class, accepted) for accepted in _ACCEPTED]
        self._rows: dict[str, Counter] = {}
        self._by_drafter: dict[str, Counter] = {}
        self._meter, self._name = meter, workload_class

    def add(self, facts: Facts) -> None:
        counts = facts.counts
        self._cycles.inc(counts.cycles)
        self._saved.inc(facts.num_tokens - counts.cycles)
        if not counts.drafts:
            return
        self._drafts.inc(counts.drafts)
        self._drafted.inc(counts.drafted)
        self._accepted.inc(counts.accepted)
        self._rejected.inc(counts.rejected)
        _add_each(self._reached, counts.reached_by_position)
        _add_each(self._matched, counts.matched_by_position)
        _add_each(self._by_accepted, counts.accepted_histogram)
        for drafter, count in counts.rows_by_drafter.items():
            if drafter not in self._rows:
                self._rows[drafter] = self._meter.rows.labels(self._name, drafter)
                self._by_drafter[drafter] = self._meter.by_drafter.labels(self._name, drafter)
            self._rows[drafter].inc(count)
        for drafter, count in counts.accepted_by_drafter.items():
            self._by_drafter[drafter].inc(count)


def _add_each(counters: list[Counter], counts: Iterable[int]) -> None:
    """Add by place; what lies beyond the last counter is added to it."""
    for counter, count in zip(chain(counters, repeat(counters[-1])), counts, strict=False):
        if count:
            counter.inc(count)

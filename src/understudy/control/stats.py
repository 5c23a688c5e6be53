"""How often each drafter is right, measured on every word, bought or not.

A drafter states its confidence in each node; what that confidence is worth is learned here, per workload class,
drafter and band of confidence. Words do not depend on drafts, so a proposal can be scored against the emitted words
even where none of its rows were computed: nothing has to be explored at the user's expense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from understudy.core.draft import ROOT, Draft

_BANDS = 10
_MOST_CLASSES = 32
"""Classes with statistics of their own; the rest are counted together."""
_MEMORY = 0.99
"""Weight of the past: the last hundred or so observations of a band count."""
_PRIOR_WEIGHT = 6.0
_PRIOR_TRUST = 0.6
"""Before anything is known, a stated confidence is believed this far."""


@dataclass(slots=True)
class _Band:
    hits: float = 0.0
    trials: float = 0.0


class AcceptanceStats:
    """Maps stated confidence to measured acceptance."""

    def __init__(self) -> None:
        self._bands: dict[tuple[str, str, int], _Band] = {}
        self._classes: set[str] = set()

    def survival(self, workload_class: str, draft: Draft) -> list[float]:
        """The probability that the walk reaches each node: the product of acceptances along its path."""
        workload_class = self._known(workload_class)
        survival: list[float] = []
        for node, parent in enumerate(draft.parents):
            reached = 1.0 if parent == ROOT else survival[parent]
            survival.append(reached * self._acceptance(workload_class, draft, node))
        return survival

    def observe(self, workload_class: str, draft: Draft, words: Sequence[int]) -> None:
        """Score a whole proposal against the words that were emitted after it."""
        workload_class = self._known(workload_class)
        at = ROOT
        for word in words:
            matched = None
            for node in range(at + 1, len(draft)):
                if draft.parents[node] == at:
                    hit = draft.tokens[node] == word
                    self._count(workload_class, draft, node, hit=hit)
                    matched = node if hit else matched
            if matched is None:
                return
            at = matched

    def _known(self, workload_class: str) -> str:
        if workload_class not in self._classes:
            if len(self._classes) >= _MOST_CLASSES:
                return "other"
            self._classes.add(workload_class)
        return workload_class

    def _acceptance(self, workload_class: str, draft: Draft, node: int) -> float:
        confidence = min(1.0, max(0.0, draft.confidence[node]))
        band = self._bands.get(_key(workload_class, draft, node))
        hits, trials = (band.hits, band.trials) if band else (0.0, 0.0)
        return (hits + _PRIOR_WEIGHT * _PRIOR_TRUST * confidence) / (trials + _PRIOR_WEIGHT)

    def _count(self, workload_class: str, draft: Draft, node: int, *, hit: bool) -> None:
        band = self._bands.setdefault(_key(workload_class, draft, node), _Band())
        band.hits = band.hits * _MEMORY + hit
        band.trials = band.trials * _MEMORY + 1.0


def _key(workload_class: str, draft: Draft, node: int) -> tuple[str, str, int]:
    confidence = min(1.0, max(0.0, draft.confidence[node]))
    return workload_class, draft.sources[node], min(_BANDS - 1, int(confidence * _BANDS))

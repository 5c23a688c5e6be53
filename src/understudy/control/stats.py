"""How often each drafter is right, measured on every word, bought or not.

A drafter states its confidence in each node; what that confidence is worth is learned here, per workload class, band
of temperature, drafter and band of confidence. Words do not depend on drafts, so a proposal can be scored against the
emitted words even where none of its rows were computed: a drafter that costs nothing is never explored at the user's
expense. For drafters that do cost, acceptance by position says what asking them again would bring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from understudy.control.classes import ClassNames
from understudy.core.draft import ROOT, Draft

_BANDS = 10
_MOST_POSITIONS = 16
"""Positions of a draft that are told apart; deeper ones count as the last."""
_MEMORY = 0.99
"""Weight of the past: the last hundred or so observations of a band count."""
_PRIOR_WEIGHT = 6.0
_PRIOR_TRUST = 0.6
"""Before anything is known, a stated confidence is believed this far, and a position is accepted this often."""

Key = tuple[str, int, str, int]
"""Class, band of temperature, drafter, and band of confidence or position."""


@dataclass(slots=True)
class _Band:
    hits: float = 0.0
    trials: float = 0.0

    def count(self, *, hit: bool) -> None:
        self.hits = self.hits * _MEMORY + hit
        self.trials = self.trials * _MEMORY + 1.0

    def rate(self, prior: float) -> float:
        """The acceptance that was measured."""
        return (self.hits + _PRIOR_WEIGHT * prior) / (self.trials + _PRIOR_WEIGHT)

    def least_rate(self, prior: float) -> float:
        """One standard error less. Of many nodes the likeliest are bought, which are those most overrated by chance."""
        rate = self.rate(prior)
        return max(0.0, rate - math.sqrt(max(0.0, rate * (1.0 - rate)) / (self.trials + _PRIOR_WEIGHT)))


_UNKNOWN = _Band()


class AcceptanceStats:
    """Maps stated confidence to measured acceptance."""

    def __init__(self) -> None:
        self._bands: dict[Key, _Band] = {}
        self._positions: dict[Key, _Band] = {}
        self._classes = ClassNames()

    def calibrated(self, workload_class: str, draft: Draft, *, temperature: float = 0.0) -> Draft:
        """The draft with each node's stated confidence replaced by the acceptance that was measured for it."""
        group = self._classes.known(workload_class), _temperature_band(temperature)
        learned = []
        for stated, source in zip(draft.confidence, draft.sources, strict=True):
            confidence = min(1.0, max(0.0, stated))
            band = self._bands.get((*group, source, _confidence_band(stated)), _UNKNOWN)
            learned.append(band.least_rate(_PRIOR_TRUST * confidence))
        return replace(draft, confidence=tuple(learned))

    def survival(self, workload_class: str, draft: Draft, *, temperature: float = 0.0) -> list[float]:
        """The probability that the walk reaches each node of one drafter's draft."""
        return survival_of(self.calibrated(workload_class, draft, temperature=temperature))

    def acceptance_at(self, workload_class: str, source: str, position: int, *, temperature: float = 0.0) -> float:
        """How often a drafter's token at a position (1 is the first) is right, given that those before it were."""
        group = self._classes.known(workload_class), _temperature_band(temperature)
        position = min(position, _MOST_POSITIONS)
        prior = _PRIOR_TRUST if position == 1 else self._positions.get((*group, source, 1), _UNKNOWN).rate(_PRIOR_TRUST)
        return self._positions.get((*group, source, position), _UNKNOWN).rate(prior)

    def observe(self, workload_class: str, draft: Draft, words: Sequence[int], *, temperature: float = 0.0) -> None:
        """Score one drafter's whole proposal against the words that were emitted after it."""
        group = self._classes.known(workload_class), _temperature_band(temperature)
        at = ROOT
        for position, word in enumerate(words, start=1):
            matched = None
            asked: set[str] = set()
            for node in range(at + 1, len(draft)):
                if draft.parents[node] == at:
                    hit = draft.tokens[node] == word
                    key = (*group, draft.sources[node], _confidence_band(draft.confidence[node]))
                    self._bands.setdefault(key, _Band()).count(hit=hit)
                    asked.add(draft.sources[node])
                    matched = node if hit else matched
            for source in asked:
                key = (*group, source, min(position, _MOST_POSITIONS))
                hit = matched is not None and draft.sources[matched] == source
                self._positions.setdefault(key, _Band()).count(hit=hit)
            if matched is None:
                return
            at = matched


def survival_of(draft: Draft) -> list[float]:
    """The probability that the walk reaches each node of a calibrated draft: acceptances multiplied along its path.

    Only one child of a node can be right. Where drafters that know nothing of each other are sure of different
    children, all of them are believed less, so that no more than certainty is shared out.
    """
    claimed: dict[int, float] = {}
    for parent, acceptance in zip(draft.parents, draft.confidence, strict=True):
        claimed[parent] = claimed.get(parent, 0.0) + acceptance
    survival: list[float] = []
    for parent, acceptance in zip(draft.parents, draft.confidence, strict=True):
        reached = 1.0 if parent == ROOT else survival[parent]
        survival.append(reached * acceptance / max(1.0, claimed[parent]))
    return survival


def _confidence_band(stated: float) -> int:
    return min(_BANDS - 1, int(min(1.0, max(0.0, stated)) * _BANDS))


def _temperature_band(temperature: float) -> int:
    """Greedy, below one, and one or above: the higher, the less a drafter foresees."""
    return 0 if temperature == 0.0 else 1 if temperature < 1.0 else 2

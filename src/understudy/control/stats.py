"""How often each drafter is right, measured on every word, bought or not.

A drafter states its confidence in each node; what that confidence is worth is learned here, per workload class, band
of temperature, drafter and band of confidence. Words do not depend on drafts, so a proposal can be scored against the
emitted words even where none of its rows were computed: a drafter that costs nothing is never explored at the user's
expense. For drafters that do cost, acceptance by position says what asking them again would bring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from understudy.control.choosing import CERTAIN, HITS, PRIOR_TRUST, PRIOR_WEIGHT, TRIALS, calibrate, survive
from understudy.control.classes import MOST_CLASSES, TEMPERATURES, BoundedNames, ClassNames, Line, temperature_band
from understudy.core.control import LearnedRate
from understudy.core.draft import ROOT, Draft

_BANDS = 10
_TEMPERATURE_BANDS = len(TEMPERATURES)
_MOST_DRAFTERS = 32
_MOST_POSITIONS = 16
"""Positions of a draft that are told apart; deeper ones count as the last."""
_MEMORY = 0.995
"""Weight of the past: the last two hundred or so observations of a band count."""

_TOLD_TRIALS = 2.0
"""What one class says of another counts as so many trials: classes differ, however well each of them is known."""
_FORGOTTEN_WEIGHT = 2.0
"""Observations that are left of what was forgotten."""

NOBODY: Mapping[str, float] = MappingProxyType({})

Key = tuple[str, int, str, int]
"""Class, band of temperature, drafter, and position."""


class _Band(NamedTuple):
    hits: float = 0.0
    trials: float = 0.0

    def rate(self, prior: float) -> float:
        """The acceptance that was measured."""
        return (self.hits + PRIOR_WEIGHT * prior) / (self.trials + PRIOR_WEIGHT)

    def at_most(self, trials: float) -> _Band:
        """The same rate, known from no more than so many trials."""
        return self if self.trials <= trials else _Band(self.hits * trials / self.trials, trials)


_UNKNOWN = _Band()


class _Places(dict[str, int]):
    """Names and their places in a table, given out as names come; those beyond the limit share one."""

    def __init__(self, names: BoundedNames) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, name: str) -> int:
        known = self._names.known(name)
        return self[known] if known != name else self.setdefault(name, len(self))


class AcceptanceStats:
    """Maps stated confidence to measured acceptance. What drafters named in `certain` state is believed as it is.

    `trusted`: how far others are believed before anything is known of them, where that is not PRIOR_TRUST.
    """

    def __init__(self, certain: Iterable[str] = (), trusted: Mapping[str, float] = NOBODY) -> None:
        self._classes = ClassNames()
        self._class_places = _Places(self._classes)
        self._drafter_places = _Places(BoundedNames(_MOST_DRAFTERS))
        self.counts = np.zeros((MOST_CLASSES * _TEMPERATURE_BANDS, _MOST_DRAFTERS, _BANDS, 2))
        """Hits and trials, by group (see `group`), drafter and band of confidence."""
        self._flat_counts = self.counts.data.cast("B").cast("d")  # the same, to be counted in one by one
        self.trust = np.full(_MOST_DRAFTERS, PRIOR_TRUST)
        for name, trust in {**trusted, **dict.fromkeys(certain, CERTAIN)}.items():
            self.trust[self._drafter_places[name]] = trust
        self._positions: dict[Key, _Band] = {}
        # of the first position: what all classes at a temperature say together
        self._firsts: dict[tuple[int, str], _Band] = {}

    def group(self, workload_class: str, temperature: float) -> int:
        """The place of a class and band of temperature in the arrays."""
        return _TEMPERATURE_BANDS * self._class_places[workload_class] + temperature_band(temperature)

    def places(self, sources: Iterable[str]) -> list[int]:
        """The places of drafters in the arrays."""
        return [*map(self._drafter_places.__getitem__, sources)]

    def calibrated(self, workload_class: str, draft: Draft, *, temperature: float = 0.0) -> Draft:
        """The draft with each node's stated confidence replaced by the acceptance that was measured for it."""
        learned = np.empty(len(draft))
        group = self.group(workload_class, temperature)
        stated = np.array([min(1.0, max(0.0, confidence)) for confidence in draft.confidence], np.float64)
        sources = np.array(self.places(draft.sources), np.int64)
        calibrate(stated, sources, group, self.counts, self.trust, learned)
        return Draft(draft.tokens, draft.parents, tuple(learned.tolist()), draft.sources)

    def survival(self, workload_class: str, draft: Draft, *, temperature: float = 0.0) -> list[float]:
        """The probability that the walk reaches each node of one drafter's draft."""
        return survival_of(self.calibrated(workload_class, draft, temperature=temperature))

    def chain_survival(self, group: int, chain: Draft) -> float:
        """The probability that the walk reaches the end of a chain: the last of `survival`, which needs no arrays.

        Asked for every guess of a draft model; a call of what is compiled would take ten times as long.
        """
        survival = 1.0
        for source, stated in zip(chain.sources, chain.confidence, strict=True):
            survival *= self._calibrated(group, self._drafter_places[source], min(1.0, max(0.0, stated)))
        return survival

    def _calibrated(self, group: int, place: int, stated: float) -> float:
        """As choosing.calibrate, for one node."""
        trust = float(self.trust[place])
        if trust == CERTAIN:
            return stated
        counts = self._flat_counts
        band = 2 * ((group * _MOST_DRAFTERS + place) * _BANDS + min(_BANDS - 1, int(stated * _BANDS)))
        weight = counts[band + TRIALS] + PRIOR_WEIGHT
        rate = (counts[band + HITS] + PRIOR_WEIGHT * (trust * stated)) / weight
        return max(0.0, rate - math.sqrt(max(0.0, rate * (1.0 - rate)) / weight))

    def acceptance_at(self, workload_class: str, source: str, position: int, *, temperature: float = 0.0) -> float:
        """How often a drafter's token at a position (1 is the first) is right, given that those before it were.

        Of a class that little is known of, what is known of the others at its temperature is believed.
        """
        group = self._classes.known(workload_class), temperature_band(temperature)
        position = min(position, _MOST_POSITIONS)
        elsewhere = self._firsts.get((group[1], source), _UNKNOWN).rate(PRIOR_TRUST)
        first = self._positions.get((*group, source, 1), _UNKNOWN).rate(elsewhere)
        return first if position == 1 else self._positions.get((*group, source, position), _UNKNOWN).rate(first)

    def num_seen(self, workload_class: str, source: str, *, temperature: float = 0.0) -> float:
        """About how many proposals of a drafter were scored lately."""
        group = self._classes.known(workload_class), temperature_band(temperature)
        return self._positions.get((*group, source, 1), _UNKNOWN).trials

    def forget(self, line: Line, source: str) -> None:
        """Believe what was learned of a drafter no more than what nothing is known of."""
        known = self._classes.known(line.workload_class)
        for key, band in list(self._positions.items()):
            if key[:3] == (known, line.band, source) and band.trials > _FORGOTTEN_WEIGHT:
                self._put(key, _Band(band.hits * _FORGOTTEN_WEIGHT / band.trials, _FORGOTTEN_WEIGHT))
        group = _TEMPERATURE_BANDS * self._class_places[line.workload_class] + line.band
        counts = self.counts[group, self._drafter_places[source]]
        counts *= np.minimum(1.0, _FORGOTTEN_WEIGHT / np.maximum(counts[..., TRIALS:], 1e-9))

    def observe(self, workload_class: str, draft: Draft, words: Sequence[int], *, temperature: float = 0.0) -> int:
        """Score one drafter's whole proposal against the words that were emitted after it; return how many it had."""
        group = self.group(workload_class, temperature)
        key = self._classes.known(workload_class), temperature_band(temperature)
        at = ROOT
        for position, word in enumerate(words, start=1):
            matched = None
            asked: set[str] = set()
            for node in range(at + 1, len(draft)):
                if draft.parents[node] == at:
                    hit = draft.tokens[node] == word
                    self._count(group, draft.sources[node], draft.confidence[node], hit=hit)
                    asked.add(draft.sources[node])
                    matched = node if hit else matched
            for source in asked:
                hit = matched is not None and draft.sources[matched] == source
                place = (*key, source, min(position, _MOST_POSITIONS))
                band = self._positions.get(place, _UNKNOWN)
                self._put(place, _Band(band.hits * _MEMORY + hit, band.trials * _MEMORY + 1.0))
            if matched is None:
                return position - 1
            at = matched
        return len(words)

    def _put(self, key: Key, band: _Band) -> None:
        """Replace what is known of a position."""
        before, self._positions[key] = self._positions.get(key, _UNKNOWN), band
        _, temperature, source, position = key
        if position == 1:
            added = self._firsts.get((temperature, source), _UNKNOWN)
            told, untold = band.at_most(_TOLD_TRIALS), before.at_most(_TOLD_TRIALS)
            hits, trials = added.hits + told.hits - untold.hits, added.trials + told.trials - untold.trials
            self._firsts[temperature, source] = _Band(hits, trials)

    def _count(self, group: int, source: str, stated: float, *, hit: bool) -> None:
        counts = self._flat_counts
        band = (group * _MOST_DRAFTERS + self._drafter_places[source]) * _BANDS + _confidence_band(stated)
        counts[2 * band + HITS] = counts[2 * band + HITS] * _MEMORY + hit
        counts[2 * band + TRIALS] = counts[2 * band + TRIALS] * _MEMORY + 1.0

    def rates(self) -> Iterator[LearnedRate]:
        """All that is known, to be kept."""
        classes, drafters = list(self._class_places), list(self._drafter_places)
        for group, drafter, band in np.argwhere(self.counts[..., TRIALS] > 0.0).tolist():
            place, temperature_band = divmod(group, _TEMPERATURE_BANDS)
            hits, trials = self.counts[group, drafter, band].tolist()
            yield LearnedRate("confidence", classes[place], temperature_band, drafters[drafter], band, hits, trials)
        for position_key, known in self._positions.items():
            yield LearnedRate("position", *position_key, known.hits, known.trials)

    def recall(self, rates: Iterable[LearnedRate]) -> None:
        """Begin with what was known."""
        for rate in rates:
            if rate.kind == "position":
                key = self._classes.known(rate.workload_class), rate.temperature_band, rate.drafter, rate.index
                self._put(key, _Band(rate.hits, rate.trials))
            elif 0 <= rate.temperature_band < _TEMPERATURE_BANDS and 0 <= rate.index < _BANDS:
                group = _TEMPERATURE_BANDS * self._class_places[rate.workload_class] + rate.temperature_band
                self.counts[group, self._drafter_places[rate.drafter], rate.index] = rate.hits, rate.trials


def survival_of(draft: Draft) -> list[float]:
    """The probability that the walk reaches each node of a calibrated draft: acceptances multiplied along its path.

    Only one child of a node can be right. Where drafters that know nothing of each other are sure of different
    children, all of them are believed less, so that no more than certainty is shared out.
    """
    survival, claimed = np.empty(len(draft)), np.zeros(len(draft) + 1)
    survive(np.array(draft.parents, np.int64), np.array(draft.confidence, np.float64), claimed, survival)
    return list(survival.tolist())


def _confidence_band(stated: float) -> int:
    return min(_BANDS - 1, int(min(1.0, max(0.0, stated)) * _BANDS))

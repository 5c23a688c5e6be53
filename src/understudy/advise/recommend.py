"""From scores and costs to advice: for each class the best drafter and depth, or the word not to speculate.

A *case* is a class at a temperature and a concurrency. For each case every candidate is timed with the costs of this
costs. The best is advised if the lower end of its interval beats plain decoding; if not, the advice is not to
speculate.

A policy holds for a class at every temperature and load, and an engine lowers depth by itself where that is right. So
a class is switched off only if it pays in no case, and its depth is limited to the deepest that any case advises. Where
the engine's own rule is as good as the best fixed depth, nothing is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.advise.scores import Score, by_class
from understudy.advise.timing import Costs, expected_speedup
from understudy.bench.statistics import Estimate
from understudy.control.classes import OTHER, label_of
from understudy.control.policy_file import Evidence, PolicyFile
from understudy.core.control import ClassPolicy

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_Case = tuple[str, float]
"""A class and a temperature."""
_AS_GOOD = 0.98
"""The own rule is left alone where it comes so near to the best fixed depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One drafter at one depth, in one case."""

    drafter: str
    depth: int | None
    """None where the engine's own rule decides."""
    speedup: Estimate
    acceptance: float | None
    """Accepted by drafted words; None where nothing was drafted."""
    acceptance_by_position: list[float]
    words_per_cycle: float
    break_even: float | None
    """The acceptance at which the same drafts would be as fast as plain decoding; None where they could not be."""

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain decoding, chance considered."""
        return self.speedup.low > 1.0

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "drafter": self.drafter,
            "depth": self.depth,
            "speedup": round(self.speedup.value, 4),
            "low": round(self.speedup.low, 4),
            "high": round(self.speedup.high, 4),
            "acceptance": _rounded(self.acceptance),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "words_per_cycle": round(self.words_per_cycle, 4),
            "break_even": _rounded(self.break_even),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do in one case."""

    workload_class: str
    temperature: float
    concurrency: int
    num_texts: int
    candidates: list[Candidate]
    """The fastest first."""

    @property
    def best(self) -> Candidate | None:
        """The fastest, whether it pays or not; None where nothing could be told."""
        return self.candidates[0] if self.candidates else None

    @property
    def pays(self) -> bool:
        """Whether to speculate."""
        return self.best is not None and self.best.pays

    @property
    def reason(self) -> str:
        """Why, in words."""
        best = self.best
        if best is None:
            return "do not speculate: the answers are too short to tell"
        where = f"temperature {self.temperature:g}, {self.concurrency} at once, {self.num_texts} answers"
        gain = f"{best.speedup.value:.2f} times the speed ({best.speedup.low:.2f} to {best.speedup.high:.2f}; {where})"
        if self.pays:
            return f"{_named(best)}: {gain}"
        if best.acceptance is None:
            return f"do not speculate: nothing was drafted ({where})"
        return f"do not speculate: {_named(best)} is the best with {gain}; {_shortcoming(best, best.acceptance)}"

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "class": self.workload_class,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "answers": self.num_texts,
            "speculate": self.pays,
            "reason": self.reason,
            "candidates": [candidate.describe() for candidate in self.candidates],
        }


def recommend(
    scores: Iterable[Score],
    costs: Costs,
    *,
    concurrencies: Sequence[int],
    own_rule: Mapping[int, Score] | None = None,
) -> list[Advice]:
    """Advise on every class, temperature and concurrency that the scores hold.

    `own_rule` is what the engine's own rule would have bought, by concurrency: it buys less where more share a pass.
    """
    fixed = _apart(scores)
    own = {concurrency: _apart([score]) for concurrency, score in (own_rule or {}).items()}
    return [
        _advice(case, concurrency, [*found, *own.get(concurrency, {}).get(case, [])], costs)
        for case, found in fixed.items()
        for concurrency in concurrencies
    ]


def _apart(scores: Iterable[Score]) -> dict[_Case, list[Score]]:
    """The scores of each class at each temperature."""
    apart: dict[_Case, list[Score]] = {}
    for score in scores:
        for of_class in by_class(score):
            for temperature in sorted({s.transcript.request.sampling.temperature for s in of_class.scores}):
                chosen = tuple(s for s in of_class.scores if s.transcript.request.sampling.temperature == temperature)
                part = Score(of_class.workload_class, score.drafter, score.depth, chosen)
                apart.setdefault((of_class.workload_class, temperature), []).append(part)
    return apart


def _advice(case: _Case, concurrency: int, scores: Sequence[Score], costs: Costs) -> Advice:
    candidates = [
        candidate
        for score in scores
        if score.depth != 0 and (candidate := _candidate(score, costs, concurrency)) is not None
    ]
    return Advice(
        workload_class=case[0],
        temperature=case[1],
        concurrency=concurrency,
        num_texts=max((len(score.scores) for score in scores), default=0),
        # of equals the one that drafts less
        candidates=sorted(candidates, key=lambda c: (-c.speedup.value, 0 if c.depth is None else c.depth)),
    )


def _candidate(score: Score, costs: Costs, concurrency: int) -> Candidate | None:
    speedup = expected_speedup(score, costs, concurrency=concurrency)
    if speedup is None:
        return None
    return Candidate(
        drafter=score.drafter,
        depth=score.depth,
        speedup=speedup,
        acceptance=score.acceptance,
        acceptance_by_position=score.acceptance_by_position,
        words_per_cycle=_words_per_cycle(score),
        break_even=_break_even(score, speedup.value),
    )


def _words_per_cycle(score: Score) -> float:
    cycles = [cycle for found in score.scores for cycle in found.cycles]
    return sum(cycle.emitted for cycle in cycles) / max(1, len(cycles))


def _break_even(score: Score, speedup: float) -> float | None:
    """The acceptance at which these drafts, costing what they cost, would give as many words as plain decoding.

    A cycle says its bonus and acceptance * drafted words, in the time of words_per_cycle / speedup plain steps.
    """
    cycles = [cycle for found in score.scores for cycle in found.cycles]
    drafted = sum(cycle.depth for cycle in cycles) / max(1, len(cycles))
    if not drafted:
        return None
    rate = (_words_per_cycle(score) / speedup - 1.0) / drafted
    return max(0.0, rate) if rate <= 1.0 else None


def make_policy(
    advice: Sequence[Advice],
    *,
    model: str,
    system_fingerprint: str,
    date: str,
    drafters: Sequence[str],
    unscored: Sequence[str] = (),
) -> PolicyFile:
    """What to begin with for each class. `drafters` are those that an engine has if nobody says otherwise.

    Against `unscored`, those of them that the advice knows nothing of, the policy says nothing.
    """
    classes: dict[str, ClassPolicy] = {}
    evidence: dict[str, Evidence] = {}
    for name in dict.fromkeys(found.workload_class for found in advice):
        cases = [found for found in advice if found.workload_class == name]
        label = label_of(name) or OTHER
        paying = [found for found in cases if found.pays]
        shown = max(paying or cases, key=lambda found: found.best.speedup.value if found.best else 0.0)
        classes[label] = _class_policy(paying, shown, drafters, unscored)
        if shown.best is not None:
            best = shown.best
            evidence[label] = Evidence(
                speedup=round(best.speedup.value, 3),
                low=round(best.speedup.low, 3),
                high=round(best.speedup.high, 3),
                acceptance=_rounded(best.acceptance),
                break_even=_rounded(best.break_even),
            )
    return PolicyFile(
        model=model, system_fingerprint=system_fingerprint, date=date, classes=classes, evidence=evidence
    )  # fmt: skip


def _class_policy(
    paying: Sequence[Advice], shown: Advice, drafters: Sequence[str], unscored: Sequence[str]
) -> ClassPolicy:
    if unscored:  # what holds for the others, off or so deep at most, would hold for these
        return ClassPolicy(reason=f"{shown.reason}; {', '.join(unscored)} could not be scored, so the engine decides")
    if not paying:
        return ClassPolicy(enabled=False, reason=shown.reason)
    if all(_own_rule_is_as_good(found) for found in paying):
        return ClassPolicy(reason=f"{shown.reason}; the engine's own rule is as good as any depth")
    chosen = [found.best for found in paying if found.best is not None]
    depths = [best.depth for best in chosen]
    names = dict.fromkeys(name for best in chosen for name in (drafters if best.depth is None else [best.drafter]))
    return ClassPolicy(
        max_depth=None if None in depths else max(depth for depth in depths if depth is not None),
        drafters=None if set(names) == set(drafters) else tuple(names),
        reason=shown.reason,
    )


def _own_rule_is_as_good(advice: Advice) -> bool:
    own = next((candidate for candidate in advice.candidates if candidate.depth is None), None)
    return own is not None and advice.best is not None and own.speedup.value >= _AS_GOOD * advice.best.speedup.value


def _named(candidate: Candidate) -> str:
    if candidate.depth is None:
        return f"the engine's own rule with {candidate.drafter}"
    return f"{candidate.drafter} at a depth of {candidate.depth}"


def _shortcoming(best: Candidate, acceptance: float) -> str:
    """Why a candidate does not pay."""
    if best.speedup.value > 1.0:
        return "that may be chance"
    needed = "no acceptance would pay" if best.break_even is None else f"it would need {best.break_even:.2f}"
    return f"acceptance is {acceptance:.2f}, and {needed}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

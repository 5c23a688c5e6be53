"""Statistics that stay valid however often one looks at them.

A usual 95 % interval is right 95 times of 100 if one looks once, at a moment that was fixed before. Whoever looks after
every observation and stops at the first alarm is misled far more often. Here an error of 5 % covers all looks together:

    ConfidenceSequence   an interval for a mean, such as that of the log ratios of windows with and without drafts
    TwoArms              an interval for the difference of two arms that observations were given to by lot
    sample_ratio_evidence   whether as many observations came from each arm as the lot should have sent there

The interval. With d the distance of a mean from the truth, in units of the unknown spread, the likelihood ratio of
"d ~ Normal(0, 1/c)" against "d = 0", with the spread integrated out, is a martingale that begins at 1 (the sequential
t-test, Lai 1976). It passes 1/alpha with a probability of at most alpha at any time (Ville); what it has not passed is
the interval. For normal observations that is exact from the second one on; for others it becomes the normal mixture
of Robbins, whose error tends to alpha (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021). A burn-in, before which
the interval is infinite, covers the time until then. c decides when the interval is narrowest beside others: it is
tuned for a number of observations, and loses little a factor of ten away from it.

Each is a few numbers: `state()` gives them as plain data that JSON can hold, `from_state` takes them back.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from understudy.core.control import Speedup

ALPHA = 0.05
_TUNING = -2.0 * math.log(ALPHA) + math.log(-2.0 * math.log(ALPHA)) + 1.0
"""tuned_for / c, after Waudby-Smith et al."""
_MEMORY = 32
"""Observations over which a machine's drift is followed."""
_MOST_STRATA = 64
_PRIOR_COUNT = 100.0
"""Observations that the belief in the right sample ratio is worth."""
_MOST_EXPONENT = 700.0
"""exp of more is no float."""


@dataclass(slots=True)
class ConfidenceSequence:
    """The mean of observations, and where the true one is."""

    tuned_for: int = 100
    """Observations for which the interval is to be narrowest."""
    burn_in: int = 10
    """Observations before which nothing is said."""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Squared distances from the mean, summed up."""

    def add(self, x: float) -> None:
        """Take an observation in."""
        assert math.isfinite(x)
        self.count += 1
        before = x - self.mean
        self.mean += before / self.count
        self.squares += before * (x - self.mean)

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Where the true mean is; with a probability of at most alpha it is outside at any time at all."""
        half = self._half_width(alpha)
        return self.mean - half, self.mean + half

    def speedup(self, alpha: float = ALPHA) -> Speedup | None:
        """Where observations are log ratios, plain time over speculative: what that comes to; None if unknown yet."""
        low, high = self.interval(alpha)
        if not math.isfinite(low):
            return None
        return Speedup(estimate=ratio(self.mean), low=ratio(low), high=ratio(high), num_windows=self.count)

    def state(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ConfidenceSequence:
        """What `state` told."""
        return cls(**state)

    def _half_width(self, alpha: float) -> float:
        n, c = self.count, self.tuned_for / _TUNING
        if n < max(2, self.burn_in) or not self.squares:  # where all were alike, nothing is known of their spread
            return math.inf
        # with V the squared distances from a supposed mean and S their sum, that mean is out if
        #   sqrt(c / (n + c)) (V / (V - S^2 / (n + c))) ^ (n / 2)  >=  1 / alpha
        # which is solved for the distance of the supposed mean from the observed one
        log_needed = (math.log((n + c) / c) - 2.0 * math.log(alpha)) / n
        if log_needed >= math.log((n + c) / c):  # no distance is large enough
            return math.inf
        needed = math.exp(log_needed)
        return math.sqrt((needed - 1.0) * self.squares / (n * (1.0 - needed * c / (n + c))))


@dataclass(slots=True)
class _Expected:
    """What the next observation of a kind will be like: the mean of the last ones."""

    count: int = 0
    mean: float = 0.0

    def add(self, x: float) -> None:
        self.count += 1
        self.mean += (x - self.mean) / min(self.count, _MEMORY)


@dataclass(slots=True)
class TwoArms:
    """The difference of two arms' means, treatment less control, where a lot sent each observation to its arm.

    It rests on the lot alone. From each observation x, what was expected of it before it came is taken away, and what
    is left is divided by the chance of its arm:

        score = (x - expected) / share          in the treatment
                (expected - x) / (1 - share)    in the control

    Whatever else happened before, and however the machine drifts, a score's expectation given all that is the effect
    itself. So neither drift nor the kinds of requests that come can pass for an effect; they only widen the interval,
    and less so the better the expectation: it follows the last observations, of each stratum for itself.
    """

    share: float = 0.5
    """The chance of the treatment."""
    tuned_for: int = 1000
    burn_in: int = 30
    """Observations of each arm before which nothing is said."""
    num_control: int = 0
    num_treatment: int = 0
    scores: ConfidenceSequence = field(default_factory=ConfidenceSequence)
    expected: dict[str, _Expected] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert 0.0 < self.share < 1.0
        self.scores.tuned_for, self.scores.burn_in = self.tuned_for, 0

    def add(self, in_treatment: bool, x: float, *, stratum: str = "") -> None:
        """Take an observation in; of a stratum, such as its class, the first one only tells what to expect."""
        expected = self._expected(stratum)
        if expected.count:
            left = x - expected.mean
            self.scores.add(left / self.share if in_treatment else -left / (1.0 - self.share))
            self.num_treatment += in_treatment
            self.num_control += not in_treatment
        expected.add(x)

    def _expected(self, stratum: str) -> _Expected:
        if stratum not in self.expected and len(self.expected) >= _MOST_STRATA:
            stratum = ""
        return self.expected.setdefault(stratum, _Expected())

    def state(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TwoArms:
        """What `state` told."""
        scores = ConfidenceSequence.from_state(state["scores"])
        expected = {stratum: _Expected(**known) for stratum, known in state["expected"].items()}
        return cls(**{**state, "scores": scores, "expected": expected})

    @property
    def effect(self) -> float:
        """By how much the treatment's mean is above the control's."""
        return self.scores.mean

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Where the true effect is."""
        if min(self.num_control, self.num_treatment) < self.burn_in:
            return -math.inf, math.inf
        return self.scores.interval(alpha)


def ratio(log_ratio: float) -> float:
    """exp, for whatever interval."""
    return math.exp(min(log_ratio, _MOST_EXPONENT)) if log_ratio < math.inf else math.inf


def sample_ratio_evidence(num_control: int, num_treatment: int, *, share: float) -> float:
    """How much likelier the counts are under some other share than under the one that the lot should have had.

    The natural logarithm of it. A mixture of all other shares, those near `share` the likelier ones, against `share`:
    a martingale, so that it passes log(1 / alpha) with a probability of at most alpha, whenever one looks (Lindon and
    Malek 2020).
    """
    of_treatment, of_control = _PRIOR_COUNT * share, _PRIOR_COUNT * (1.0 - share)
    mixture = _log_beta(of_treatment + num_treatment, of_control + num_control) - _log_beta(of_treatment, of_control)
    return mixture - num_treatment * math.log(share) - num_control * math.log1p(-share)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

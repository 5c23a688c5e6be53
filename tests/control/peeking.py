"""Worlds to try always-valid statistics on, and the same arithmetic for a thousand of them at once.

A world is a machine's log times per token: normal, with a drift that each observation shares with the ones before it,
and stalls of ten times the usual. `Looks` holds what `TwoArms` would say after each observation of each run; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import signal

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

TUNING = -2.0 * np.log(0.05) + np.log(-2.0 * np.log(0.05)) + 1.0


def log_times(generator: np.random.Generator, shape: tuple[int, int], *, stalls: float = 0.01) -> Floats:
    """[runs, observations] A spread of 35 %, a drift of 30 % that halves in 70 observations, and stalls."""
    noise = 0.35 * generator.standard_normal(shape)
    steps = 0.3 * generator.standard_normal(shape)
    steps[:, 1:] *= np.sqrt(1.0 - 0.99**2)  # so that the drift is as wide at any time as at first
    drift = signal.lfilter([1.0], [1.0, -0.99], steps, axis=1)
    stalled: Floats = np.log(10.0) * (generator.random(shape) < stalls)
    return noise + drift + stalled


@dataclass
class Looks:
    """[runs, observations] What is said after each observation; the first only tells what to expect."""

    low: Floats
    high: Floats

    @property
    def false_alarms(self) -> float:
        """The share of runs in which no effect was excluded at some time."""
        return float(((self.low > 0.0) | (self.high < 0.0)).any(axis=1).mean())

    def first_below_zero(self) -> Floats:
        """[runs] How many observations it took until the effect was certainly below zero; infinite if it never was."""
        found = self.high < 0.0
        return np.where(found.any(axis=1), found.argmax(axis=1) + 1.0, np.inf)


def two_arms(x: Floats, treated: Flags, *, share: float, tuned_for: int = 1000, burn_in: int = 30) -> Looks:
    """What `TwoArms` says of each run, after each observation."""
    scores = np.zeros_like(x)
    expected = x[:, 0].copy()
    for place in range(1, x.shape[1]):
        left = x[:, place] - expected
        scores[:, place] = np.where(treated[:, place], left / share, -left / (1.0 - share))
        expected += left / min(place + 1, 32)
    mean, half = means_and_half_widths(scores[:, 1:], tuned_for=tuned_for)
    num_treated = np.cumsum(treated[:, 1:], axis=1)
    fewest = np.minimum(num_treated, np.arange(1, x.shape[1]) - num_treated)
    half[fewest < burn_in] = np.inf
    unknown = np.full((x.shape[0], 1), np.inf)
    return Looks(np.hstack([-unknown, mean - half]), np.hstack([unknown, mean + half]))


def means_and_half_widths(x: Floats, *, tuned_for: int, alpha: float = 0.05) -> tuple[Floats, Floats]:
    """[runs, observations] What `ConfidenceSequence` says without a burn-in."""
    n, c = np.arange(1.0, x.shape[1] + 1.0), tuned_for / TUNING
    mean = np.cumsum(x, axis=1) / n
    squares = np.maximum(0.0, np.cumsum(x * x, axis=1) - n * mean * mean)
    needed = np.exp((np.log((n + c) / c) - 2.0 * np.log(alpha)) / n)
    below = n * (1.0 - needed * c / (n + c))
    is_known = (below > 0.0) & (n > 1)
    half = np.sqrt((needed - 1.0) * squares / np.where(is_known, below, 1.0))
    return mean, np.where(is_known, half, np.inf)

"""The arithmetic of a report: percentiles, and a ratio of speeds with an interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work done by the baseline and by another arm, one right after the other."""

    base_s: float
    base_tokens: int
    arm_s: float
    arm_tokens: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and the interval that holds it with CONFIDENCE."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float | None:
    """Give the value below which `share` of the values lie, with a straight line between neighbours."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def speedup(pairs: Sequence[Pair]) -> float | None:
    """Tokens per second of the arm by those of the baseline; with the same tokens, the ratio of total times."""
    base_s, arm_s = sum(pair.base_s for pair in pairs), sum(pair.arm_s for pair in pairs)
    base_tokens, arm_tokens = sum(pair.base_tokens for pair in pairs), sum(pair.arm_tokens for pair in pairs)
    if not (base_tokens and arm_tokens and base_s > 0 and arm_s > 0):
        return None
    return (arm_tokens / arm_s) / (base_tokens / base_s)


def speedup_estimate(pairs: Sequence[Pair]) -> Estimate | None:
    """Give the speed-up and its interval, by drawing as many pairs from the pairs, again and again.

    A single pair says nothing about the spread: its interval is the point.
    """
    value = speedup(pairs)
    if value is None:
        return None
    draw = random.Random(BOOTSTRAP_SEED)
    resampled = [speedup(draw.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES)] if len(pairs) > 1 else []
    ratios = [ratio for ratio in resampled if ratio is not None] or [value]
    tail = (1 - CONFIDENCE) / 2
    low, high = percentile(ratios, tail), percentile(ratios, 1 - tail)
    assert low is not None
    assert high is not None
    return Estimate(value, low, high)

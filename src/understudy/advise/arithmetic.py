"""When does speculation pay? The arithmetic of a cycle, with nothing but numbers that anyone can write down.

All times are in plain steps of the target: one pass that gives one word to each of `batch` sequences.

acceptance   the chance that a drafted word is the target's, given that all before it were; one number, or one by place
survival     the chance that a drafted word and all before it are the target's: the product of acceptances
depth        words drafted ahead in a cycle
cost ratio   a draft's pass by a target's pass                                                                     c
row cost     what one more row adds to a target's pass of one row: 0 where reading the weights is all it does      v
block cost   what a cycle's draft costs whatever its depth: a drafter that says all words in one pass              C

    words per cycle    1 + a_1 + a_1 a_2 + ...                    with constant acceptance (1 - a^(depth+1)) / (1 - a)
    a cycle takes      1 + C + depth * slot cost                  slot cost = c + v * batch / (1 + v * (batch - 1))
    speed-up           words per cycle / what a cycle takes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

MOST_DEPTH = 64
_BISECTIONS = 60
"""Halvings of an interval of length 1: what is left is below the precision of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleCost:
    """What drafting and verifying cost, in plain steps."""

    cost_ratio: float = 0.0
    row_cost: float = 0.0
    block_cost: float = 0.0
    batch: int = 1

    @property
    def slot(self) -> float:
        """What one more drafted word of every sequence adds to a cycle: a draft's pass, and a row of the target's."""
        plain = 1.0 + self.row_cost * (self.batch - 1)  # a pass for the whole batch, in passes of one row
        return self.cost_ratio + self.row_cost * self.batch / plain

    def cycle(self, depth: int) -> float:
        """A whole cycle; plain decoding is a cycle of depth 0, and drafts nothing."""
        return 1.0 + (self.block_cost + depth * self.slot if depth else 0.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One depth."""

    depth: int
    words_per_cycle: float
    speedup: float


def survival(acceptance: float | Sequence[float], depth: int) -> list[float]:
    """The chance that each place of a draft is reached and right; beyond the known places the last one goes on."""
    if isinstance(acceptance, int | float):
        rates: list[float] = [acceptance] * depth
    else:
        rates = [*acceptance[:depth], *repeat(acceptance[-1] if acceptance else 0.0, depth - len(acceptance))]
    return list(accumulate(rates, mul))


def words_per_cycle(acceptance: float | Sequence[float], depth: int) -> float:
    """Words that a cycle gives a sequence: those that survive, and the target's own after them."""
    return 1.0 + sum(survival(acceptance, depth))


def speedup(acceptance: float | Sequence[float], depth: int, cost: CycleCost) -> float:
    """How many times faster than plain decoding."""
    return words_per_cycle(acceptance, depth) / cost.cycle(depth)


def table(acceptance: float | Sequence[float], cost: CycleCost, depths: Sequence[int]) -> list[Point]:
    """Every depth."""
    return [Point(d, words_per_cycle(acceptance, d), speedup(acceptance, d, cost)) for d in depths]


def best(acceptance: float | Sequence[float], cost: CycleCost, *, most_depth: int = MOST_DEPTH) -> Point:
    """The fastest depth, the lowest of equals; 0 where speculation does not pay."""
    return max(table(acceptance, cost, range(most_depth + 1)), key=lambda point: (point.speedup, -point.depth))


def break_even(cost: CycleCost, depth: int | None = None) -> float | None:
    """The constant acceptance at which a depth is as fast as plain decoding; without a depth, the lowest of all depths.

    None if not even words that are always right would pay.
    """
    if depth is None:
        found = [rate for d in range(1, MOST_DEPTH + 1) if (rate := break_even(cost, d)) is not None]
        return min(found, default=None)
    if speedup(1.0, depth, cost) <= 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if speedup(middle, depth, cost) < 1.0:
            low = middle
        else:
            high = middle
    return high


def stationary_depth(acceptance: float, cost: CycleCost) -> float:
    """The depth, as a real number, at which the speed-up neither rises nor falls: the best one lies beside it.

    With constant acceptance a and slot cost s it solves
    a^(depth+1) * -ln(a) * (1 + C + s * depth) = s * (1 - a^(depth+1)).
    Never below 0; infinite where words cost nothing.
    """
    if acceptance <= 0.0:
        return 0.0
    if acceptance >= 1.0 or cost.slot <= 0.0:
        return math.inf

    def rises(depth: float) -> bool:
        missed: float = acceptance ** (depth + 1)
        takes = 1.0 + cost.block_cost + cost.slot * depth
        return missed * -math.log(acceptance) * takes > cost.slot * (1.0 - missed)

    if not rises(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rises(high):
        low, high = high, 2.0 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    return low


def sequences_displaced(draft_bytes: int, *, kv_bytes_per_token: int, context: int) -> float:
    """How many sequences of a context's length the memory of a draft would have held."""
    return draft_bytes / (kv_bytes_per_token * context)

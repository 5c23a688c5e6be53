"""What a pass of the target costs on this machine: measured at start, kept fresh by live steps.

    seconds = drift * (table(rows) + per_key * keys + per_read * reads)

rows: all rows of the pass. keys: the context lengths of its sequences, summed (each key is fetched once per
sequence). reads: rows times context, summed (each row scores each key). The table is measured, not modelled, because
it has steps: rows are padded to fours, and from some count on arithmetic takes longer than reading the weights.

Rows that are drafted beside others may turn out dearer or cheaper than the table says: what a pass takes beyond the
same pass without them is multiplied by `row_factor`, which live steps with drafts correct.

A shared machine becomes faster and slower as a whole, by half within minutes. So live steps without drafts correct the
drift, which all entries share, quickly, and the entry that they belong to slowly and within narrow bounds: what decides
whether a row is bought is the ratio of two entries, and that must not depend on which of them was measured at a bad
moment. Steps with drafts never move the drift: if drafted rows became dearer, plain steps would be believed to have
become so too, and the ledgers, which hold the one against the other, would see no loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from understudy.core.control import PassCosts

PROFILED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WIDE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""For a GPU, where dozens of texts draft at once and rows are nearly free up to some count: the sizes of its passes."""
_DRIFT_WEIGHT = 0.1
_AGING_STEPS = 8
"""What is known of the machine grows old: after so many steps with drafts a plain one counts as two, and so on."""
_FACTOR_WEIGHT = 0.05
_FACTOR_RANGE = (0.5, 8.0)
_DRIFT_RANGE = (1.0 / 32.0, 32.0)
"""Wide: a machine that was busy while it was profiled may turn out ten times as fast as it seemed."""
_ENTRY_WEIGHT = 0.01
_ENTRY_RANGE = (0.8, 1.25)
"""How far live steps may move an entry from what was profiled, beside the drift."""
_MOST_SWEEPS = 8
_CALM = 0.05
"""Share of all measured time that a further sweep may take off, where a machine is calm."""
_MOST_SURPRISE = 2.0
"""A single step counts as at most so many times slower or faster than predicted."""


class Load(NamedTuple):
    """The size of a pass. A tuple, because planning makes dozens of them."""

    rows: int
    keys: int
    reads: int

    @classmethod
    def of(cls, sequences: Iterable[tuple[int, int]]) -> Load:
        """Add up (rows, context) of each sequence."""
        rows = keys = reads = 0
        for count, context in sequences:
            rows, keys, reads = rows + count, keys + context, reads + count * context
        return cls(rows, keys, reads)


@dataclass(slots=True)
class CostModel:
    """Predicts the seconds of a pass."""

    rows_s: dict[int, float]
    """Seconds by number of rows, at no context."""
    per_key_s: float = 0.0
    per_read_s: float = 0.0
    drift: float = 1.0
    """How much slower the machine is now than when it was profiled."""
    row_factor: float = 1.0
    """How much dearer drafted rows are than the table says."""
    _num_since_plain: int = 0
    _grid: list[int] = field(init=False)
    _profiled_s: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.rows_s = dict(sorted(self.rows_s.items()))  # our own: it is corrected, and read in this order
        self._grid = list(self.rows_s)
        self._profiled_s = dict(self.rows_s)

    @property
    def measured(self) -> PassCosts:
        """What it was at first, before live steps corrected it."""
        return PassCosts(rows_s=self._profiled_s, per_key_s=self.per_key_s, per_read_s=self.per_read_s)

    def step_s(self, load: Load, base: Load | None = None) -> float:
        """Predicted seconds of a pass; `base` is the same pass without what was drafted in it, if anything was."""
        if base is not None:
            return self.drafted_s(load, self.step_s(base))
        return self.drift * (self._table_s(load.rows) + self.per_key_s * load.keys + self.per_read_s * load.reads)

    def drafted_s(self, load: Load, plain_s: float) -> float:
        """Predicted seconds of a pass that takes `plain_s` without what was drafted in it."""
        whole_s = self.step_s(load)
        # where the table falls, no multiple of that may lead below nothing
        return plain_s + self.row_factor * (whole_s - plain_s) if whole_s > plain_s else whole_s

    def observe(self, load: Load, seconds: float, base: Load | None = None) -> None:
        """Let a live step correct what is believed; far beyond the table it says nothing."""
        if load.rows > self._grid[-1]:
            return
        is_plain = base is None or base.rows == load.rows
        predicted_s = self.step_s(load) if is_plain else self.step_s(load, base)
        surprise = _within(seconds / predicted_s, 1.0 / _MOST_SURPRISE, _MOST_SURPRISE)
        if not is_plain:
            self._num_since_plain += 1
            self.row_factor = _within(self.row_factor * surprise**_FACTOR_WEIGHT, *_FACTOR_RANGE)
            return
        weight = 1.0 - (1.0 - _DRIFT_WEIGHT) ** (1.0 + self._num_since_plain / _AGING_STEPS)
        self._num_since_plain = 0
        self.drift = _within(self.drift * surprise**weight, *_DRIFT_RANGE)
        nearest = load.rows if load.rows in self.rows_s else min(self._grid, key=lambda rows: abs(rows - load.rows))
        low, high = (factor * self._profiled_s[nearest] for factor in _ENTRY_RANGE)
        self.rows_s[nearest] = _within(self.rows_s[nearest] * surprise**_ENTRY_WEIGHT, low, high)

    def _table_s(self, rows: int) -> float:
        """Straight lines between measured counts, and beyond them the slope of the last line or of the whole table.

        The larger of the two: one entry that was disturbed must not make a thousand rows look free.
        """
        grid = self._grid
        if rows in self.rows_s:
            return self.rows_s[rows]
        if len(grid) == 1:
            return self.rows_s[grid[0]] * rows / grid[0]
        if rows > grid[-1]:
            last_s = self.rows_s[grid[-1]]
            slopes = [(last_s - self.rows_s[count]) / (grid[-1] - count) for count in (grid[0], grid[-2])]
            return last_s + max(0.0, *slopes) * (rows - grid[-1])
        right = min(max(bisect_left(grid, rows), 1), len(grid) - 1)
        x0, x1 = grid[right - 1], grid[right]
        y0, y1 = self.rows_s[x0], self.rows_s[x1]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), min(y0, y1) / 2)


def profile(
    time_step: Callable[[int, int], float],
    *,
    long_context: int,
    repeats: int = 2,
    counts: Sequence[int] = PROFILED_ROWS,
) -> CostModel:
    """Measure a cost model; `time_step(rows, context)` runs one pass and returns its seconds.

    All points are measured `repeats` times, and on a machine that others use further on until that takes nothing off.
    """
    points = [(rows, 0) for rows in counts] + [(rows, long_context) for rows in (1, 8)]
    seconds = dict.fromkeys(points, math.inf)
    for number in range(1, _MOST_SWEEPS + 1):
        before_s = sum(seconds.values())
        for point in points:
            seconds[point] = min(seconds[point], time_step(*point))  # disturbances only ever add
        if number >= repeats and sum(seconds.values()) >= (1.0 - _CALM) * before_s:
            break
    one = max(0.0, seconds[1, long_context] - seconds[1, 0]) / long_context  # per_key + per_read
    eight = max(0.0, seconds[8, long_context] - seconds[8, 0]) / long_context  # per_key + 8 per_read
    per_read = max(0.0, (eight - one) / 7)
    # A count was disturbed where a larger one took less time: it takes no longer than that.
    least = {rows: min(seconds[more, 0] for more in counts if more >= rows) for rows in counts}
    return CostModel(least, max(0.0, one - per_read), per_read)


def recalled(measured: PassCosts) -> CostModel:
    """A model that was measured earlier."""
    return CostModel(measured.rows_s, measured.per_key_s, measured.per_read_s)


def stepped(cost: CostModel) -> CostModel:
    """The same where rows are rounded up to the next size that was measured: one row more costs a whole step."""
    sizes = list(cost.rows_s)
    steps = zip([0, *sizes], sizes, strict=False)
    table = {rows: cost.rows_s[size] for below, size in steps for rows in (below + 1, size)}
    return CostModel(table, cost.per_key_s, cost.per_read_s)


def _within(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))

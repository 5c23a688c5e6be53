"""Linear layers for the CPU: y = x W^T + b, one fixed order of additions for every row.

    out[row, n] = b[n] + x[row, 0] * w[n, 0] + x[row, 1] * w[n, 1] + ...     fused, in ascending order

That is all the arithmetic there is, whatever the number of rows, so rows cannot depend on their neighbours. What the
number of rows does change is how many of them share a weight while it is in a register: one, four or eight.

Weights lie in panels of 16 outputs, [panel, input, output], and a panel is read from memory once for all rows. Up to
about eight rows the time is that of reading the weights, which is why a drafted row costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.simd import LANES, fma, has_wide_registers, load, prefetch, spread, store

Floats = NDArray[np.float32]

ROWS = 4
"""Row counts above one are padded to a multiple of this."""

_EIGHT_FIT = has_wide_registers()
"""Eight sums of 16 floats stay in registers; with AVX2 they would spill and take 2.5 times as long as twice four."""

_AHEAD = 256 * LANES
"""How far ahead of its use a weight is asked for: 16 KiB. A single row is so fast that it runs ahead by itself."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inputs] in panels."""

    panels: Floats
    """Flat: [panels, inputs, LANES]"""
    bias: Floats
    """[panels * LANES], zero where there is none"""
    num_outputs: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Lay out a weight [outputs, inputs]; outputs beyond the last whole panel are padding."""
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // LANES)
        rows: Floats = weight.float().numpy()
        if num_panels * LANES > num_outputs:
            rows = np.concatenate([rows, np.zeros((num_panels * LANES - num_outputs, num_inputs), np.float32)])
        panels = np.ascontiguousarray(rows.reshape(num_panels, LANES, num_inputs).transpose(0, 2, 1)).reshape(-1)
        start = np.zeros(num_panels * LANES, np.float32)
        if bias is not None:
            start[:num_outputs] = bias.float().numpy()
        return cls(panels, start, num_outputs)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.panels.nbytes + self.bias.nbytes

    def __call__(self, x: Floats) -> Floats:
        """x [rows, inputs] -> [rows, outputs]; one row, or a multiple of ROWS."""
        assert x.shape[0] == 1 or x.shape[0] % ROWS == 0
        out = np.empty((x.shape[0], len(self.bias)), np.float32)
        _linear(x, self.panels, self.bias, out)
        return out if len(self.bias) == self.num_outputs else out[:, : self.num_outputs]


@jit_exact_parallel
def _linear(x: Floats, panels: Floats, bias: Floats, out: Floats) -> None:
    """Compute x [rows, inputs] -> out [rows, outputs], panel by panel."""
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    for panel in numba.prange(num_outputs // LANES):
        first = panel * LANES
        weights = panel * num_inputs * LANES
        row = 0
        while _EIGHT_FIT and row + 8 <= num_rows:
            _eight_rows(flat_x, row, panels, weights, num_inputs, bias, first, flat_out, num_outputs)
            row += 8
        while row + 4 <= num_rows:
            _four_rows(flat_x, row, panels, weights, num_inputs, bias, first, flat_out, num_outputs)
            row += 4
        if row < num_rows:
            _one_row(flat_x, panels, weights, num_inputs, bias, first, flat_out)


@jit_exact
def _one_row(x: Floats, panels: Floats, weights: int, num_inputs: int, bias: Floats, first: int, out: Floats) -> None:
    """One row times one panel; the panel starts at `weights` and gives outputs first .. first + LANES - 1."""
    s0 = load(bias, first)
    for k in range(num_inputs):
        s0 = fma(spread(x, k), load(panels, weights + k * LANES), s0)
    store(out, first, s0)


@jit_exact
def _four_rows(
    x: Floats, row: int, panels: Floats, weights: int, n: int, bias: Floats, first: int, out: Floats, m: int
) -> None:
    """Rows row .. row + 3 times one panel: n inputs, m outputs."""
    s0 = load(bias, first)
    s1, s2, s3 = s0, s0, s0
    at = row * n
    for k in range(n):
        prefetch(panels, weights + k * LANES + _AHEAD)
        weight = load(panels, weights + k * LANES)
        s0 = fma(spread(x, at + k), weight, s0)
        s1 = fma(spread(x, at + n + k), weight, s1)
        s2 = fma(spread(x, at + 2 * n + k), weight, s2)
        s3 = fma(spread(x, at + 3 * n + k), weight, s3)
    to = row * m + first
    store(out, to, s0)
    store(out, to + m, s1)
    store(out, to + 2 * m, s2)
    store(out, to + 3 * m, s3)


@jit_exact
def _eight_rows(
    x: Floats, row: int, panels: Floats, weights: int, n: int, bias: Floats, first: int, out: Floats, m: int
) -> None:
    """Rows row .. row + 7 times one panel: n inputs, m outputs."""
    s0 = load(bias, first)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    at = row * n
    for k in range(n):
        prefetch(panels, weights + k * LANES + _AHEAD)
        weight = load(panels, weights + k * LANES)
        s0 = fma(spread(x, at + k), weight, s0)
        s1 = fma(spread(x, at + n + k), weight, s1)
        s2 = fma(spread(x, at + 2 * n + k), weight, s2)
        s3 = fma(spread(x, at + 3 * n + k), weight, s3)
        s4 = fma(spread(x, at + 4 * n + k), weight, s4)
        s5 = fma(spread(x, at + 5 * n + k), weight, s5)
        s6 = fma(spread(x, at + 6 * n + k), weight, s6)
        s7 = fma(spread(x, at + 7 * n + k), weight, s7)
    to = row * m + first
    store(out, to, s0)
    store(out, to + m, s1)
    store(out, to + 2 * m, s2)
    store(out, to + 3 * m, s3)
    store(out, to + 4 * m, s4)
    store(out, to + 5 * m, s5)
    store(out, to + 6 * m, s6)
    store(out, to + 7 * m, s7)

"""Linear layers for the CPU: y = x W^T + b, one fixed order of additions for every row.

    out[row, n] = b[n] + x[row, 0] * w[n, 0] + x[row, 1] * w[n, 1] + ...     fused, in ascending order

That is all the arithmetic there is, whatever the number of rows, so rows cannot depend on their neighbours. What the
number of rows does change is how many of them share a weight while it is in a register: one, four or eight.

Weights lie in panels of 16 outputs, [panel, input, output], and a panel is read from memory once for all rows. Up to
about eight rows the time is that of reading the weights, which is why a drafted row costs next to nothing. One row and
four are multiplied with two panels side by side: a single sum's next addition would else wait for its last, and four
rows' inputs be fetched twice as often.

A file that was quantised to 8 bits (GGUF's Q8_0) becomes weights of four bytes that know no more than the one byte they
came from. Where every weight is a byte times the step of its block, to the last bit, bytes and steps are what is kept,
and multiplied out in registers: the same sums of the same numbers, with a quarter of the memory to read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.packing import Zeros, pack_in_parts
from understudy.kernels.simd import LANES, fma, has_wide_registers, load, load_weights, prefetch, spread, store

Floats = NDArray[np.float32]
SignedBytes = NDArray[np.int8]
Panels = Floats | SignedBytes

f32 = np.float32

ROWS = 4
"""Row counts above one are padded to a multiple of this."""

_MANY_FIT = has_wide_registers()
"""Eight sums of 16 floats stay in registers; with AVX2 they would spill and take 2.5 times as long as twice four."""

_AHEAD_BYTES = 16 * 1024
"""How far ahead of its use a weight is asked for. A single row is so fast that it runs ahead by itself."""

BLOCK = 32
"""Inputs that share a step, as in a Q8_0 file."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inputs] in panels."""

    panels: Panels
    """Flat: [panels, inputs, LANES]; bytes where they hold the weight exactly"""
    steps: Floats
    """Flat: [panels, blocks, LANES], by which bytes are multiplied; empty where there are none"""
    bias: Floats
    """[panels * LANES], zero where there is none"""
    num_outputs: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, *, zeros: Zeros = np.zeros) -> Linear:
        """Lay out a weight [outputs, inputs]; outputs beyond the last whole panel are padding."""
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // LANES)
        rows: Floats = np.ascontiguousarray(weight.float().numpy())
        start = np.zeros(num_panels * LANES, np.float32)
        if bias is not None:
            start[:num_outputs] = bias.float().numpy()
        compact = _as_bytes(rows, num_panels, zeros)
        if compact is not None:
            panels, steps = compact
            return cls(panels.reshape(-1), steps.reshape(-1), start, num_outputs)
        if num_panels * LANES > num_outputs:
            rows = np.concatenate([rows, np.zeros((num_panels * LANES - num_outputs, num_inputs), np.float32)])
        whole = zeros((num_panels, num_inputs, LANES), np.float32)
        whole[...] = rows.reshape(num_panels, LANES, num_inputs).transpose(0, 2, 1)
        return cls(whole.reshape(-1), np.empty(0, np.float32), start, num_outputs)

    @property
    def packed(self) -> tuple[Panels, Floats, Floats]:
        """What `linear` reads."""
        return self.panels, self.steps, self.bias

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.panels.nbytes + self.steps.nbytes + self.bias.nbytes

    def __call__(self, x: Floats) -> Floats:
        """x [rows, inputs] -> [rows, outputs]; one row, or a multiple of ROWS."""
        assert x.shape[0] == 1 or x.shape[0] % ROWS == 0
        out = np.empty((x.shape[0], len(self.bias)), np.float32)
        linear(x, *self.packed, out)
        return out if len(self.bias) == self.num_outputs else out[:, : self.num_outputs]


def _as_bytes(weight: Floats, num_panels: int, zeros: Zeros) -> tuple[SignedBytes, Floats] | None:
    """A weight [outputs, inputs] as panels [panels, inputs, LANES] of bytes and their steps, if that is what it is."""
    num_inputs = weight.shape[1]
    if num_inputs % BLOCK or not _write_bytes(weight[:1], *_room(1, num_inputs, np.zeros)):
        return None  # as nearly every weight says with its first row
    panels, steps = _room(num_panels, num_inputs, zeros)
    return (panels, steps) if all(pack_in_parts(_write_bytes, weight, panels, steps)) else None


def _room(num_panels: int, num_inputs: int, zeros: Zeros) -> tuple[SignedBytes, Floats]:
    return zeros((num_panels, num_inputs, LANES), np.int8), zeros((num_panels, num_inputs // BLOCK, LANES), np.float32)


@jit_exact
def _write_bytes(weight: Floats, panels: SignedBytes, steps: Floats) -> bool:
    """Write a weight as bytes and steps; whether each number came out as it was, a zero's sign too.

    Whoever rounded a block to bytes gave 127 to its largest number, so the 127th part of that is the step.
    """
    for n in range(weight.shape[0]):
        panel, lane = n // LANES, n % LANES
        for block in range(weight.shape[1] // BLOCK):
            first = block * BLOCK
            most = f32(0)
            for k in range(first, first + BLOCK):
                most = max(most, abs(weight[n, k]))
            step, inverse = most / f32(127), f32(0)
            if most > f32(0):
                inverse = f32(127) / most
            steps[panel, block, lane] = step
            for k in range(first, first + BLOCK):
                value = weight[n, k]
                number = np.rint(value * inverse)
                if not abs(number) <= f32(127):
                    return False
                panels[panel, k, lane] = np.int8(number)
                again = f32(panels[panel, k, lane]) * step
                if again != value or np.signbit(again) != np.signbit(value):
                    return False
    return True


@jit_exact_parallel
def linear(x: Floats, panels: Panels, steps: Floats, bias: Floats, out: Floats) -> None:
    """Compute x [rows, inputs] -> out [rows, outputs], two panels at a time where their sums fit into registers."""
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    num_panels = num_outputs // LANES
    for pair in numba.prange((num_panels + 1) // 2):
        first, last = 2 * pair, min(2 * pair + 2, num_panels)
        are_two = _MANY_FIT and first + 2 == last
        num_eights = num_rows // 8 if _MANY_FIT else 0
        for panel in range(first, last):
            for row in range(0, 8 * num_eights, 8):
                _eight_rows(flat_x, row, panels, steps, panel, bias, flat_out, num_inputs, num_outputs)
        for row in range(8 * num_eights, num_rows - 3, 4):
            if are_two:
                _four_rows_twice(flat_x, row, panels, steps, first, bias, flat_out, num_inputs, num_outputs)
            else:
                for panel in range(first, last):
                    _four_rows(flat_x, row, panels, steps, panel, bias, flat_out, num_inputs, num_outputs)
        if num_rows == 1 and are_two:
            _one_row_twice(flat_x, panels, steps, first, bias, flat_out, num_inputs)
        elif num_rows == 1:
            for panel in range(first, last):
                _one_row(flat_x, panels, steps, panel, bias, flat_out, num_inputs)


@jit_exact
def _one_row(x: Floats, panels: Panels, steps: Floats, panel: int, bias: Floats, out: Floats, n: int) -> None:
    """One row of n inputs times one panel, which gives outputs panel * LANES .. panel * LANES + LANES - 1."""
    s0 = load(bias, panel * LANES)
    weights, step = panel * n * LANES, panel * (n // BLOCK) * LANES
    for k in range(n):
        s0 = fma(spread(x, k), load_weights(panels, weights + k * LANES, steps, step + k // BLOCK * LANES), s0)
    store(out, panel * LANES, s0)


@jit_exact
def _one_row_twice(x: Floats, panels: Panels, steps: Floats, panel: int, bias: Floats, out: Floats, n: int) -> None:
    """As `_one_row`, for two panels that follow each other: one sum's next addition waits for its last."""
    s0, t0 = load(bias, panel * LANES), load(bias, (panel + 1) * LANES)
    weights, step = panel * n * LANES, panel * (n // BLOCK) * LANES
    more, more_steps = weights + n * LANES, step + (n // BLOCK) * LANES
    for k in range(n):
        x0 = spread(x, k)
        s0 = fma(x0, load_weights(panels, weights + k * LANES, steps, step + k // BLOCK * LANES), s0)
        t0 = fma(x0, load_weights(panels, more + k * LANES, steps, more_steps + k // BLOCK * LANES), t0)
    store(out, panel * LANES, s0)
    store(out, (panel + 1) * LANES, t0)


@jit_exact
def _four_rows(
    x: Floats, row: int, panels: Panels, steps: Floats, panel: int, bias: Floats, out: Floats, n: int, m: int
) -> None:
    """Rows row .. row + 3 times one panel: n inputs, m outputs."""
    s0 = load(bias, panel * LANES)
    s1, s2, s3 = s0, s0, s0
    weights, step = panel * n * LANES, panel * (n // BLOCK) * LANES
    at = row * n
    for k in range(n):
        prefetch(panels, weights + k * LANES + _AHEAD_BYTES // panels.itemsize)
        weight = load_weights(panels, weights + k * LANES, steps, step + k // BLOCK * LANES)
        s0 = fma(spread(x, at + k), weight, s0)
        s1 = fma(spread(x, at + n + k), weight, s1)
        s2 = fma(spread(x, at + 2 * n + k), weight, s2)
        s3 = fma(spread(x, at + 3 * n + k), weight, s3)
    to = row * m + panel * LANES
    store(out, to, s0)
    store(out, to + m, s1)
    store(out, to + 2 * m, s2)
    store(out, to + 3 * m, s3)


@jit_exact
def _four_rows_twice(
    x: Floats, row: int, panels: Panels, steps: Floats, panel: int, bias: Floats, out: Floats, n: int, m: int
) -> None:
    """Rows row .. row + 3 times two panels that follow each other: an input is fetched once for both."""
    s0, t0 = load(bias, panel * LANES), load(bias, (panel + 1) * LANES)
    s1, s2, s3, t1, t2, t3 = s0, s0, s0, t0, t0, t0
    weights, step = panel * n * LANES, panel * (n // BLOCK) * LANES
    more, more_steps = weights + n * LANES, step + (n // BLOCK) * LANES
    at = row * n
    for k in range(n):
        prefetch(panels, weights + k * LANES + _AHEAD_BYTES // panels.itemsize)
        prefetch(panels, more + k * LANES + _AHEAD_BYTES // panels.itemsize)
        left = load_weights(panels, weights + k * LANES, steps, step + k // BLOCK * LANES)
        right = load_weights(panels, more + k * LANES, steps, more_steps + k // BLOCK * LANES)
        x0, x1, x2, x3 = spread(x, at + k), spread(x, at + n + k), spread(x, at + 2 * n + k), spread(x, at + 3 * n + k)
        s0, t0 = fma(x0, left, s0), fma(x0, right, t0)
        s1, t1 = fma(x1, left, s1), fma(x1, right, t1)
        s2, t2 = fma(x2, left, s2), fma(x2, right, t2)
        s3, t3 = fma(x3, left, s3), fma(x3, right, t3)
    to = row * m + panel * LANES
    store(out, to, s0)
    store(out, to + LANES, t0)
    store(out, to + m, s1)
    store(out, to + m + LANES, t1)
    store(out, to + 2 * m, s2)
    store(out, to + 2 * m + LANES, t2)
    store(out, to + 3 * m, s3)
    store(out, to + 3 * m + LANES, t3)


@jit_exact
def _eight_rows(
    x: Floats, row: int, panels: Panels, steps: Floats, panel: int, bias: Floats, out: Floats, n: int, m: int
) -> None:
    """Rows row .. row + 7 times one panel: n inputs, m outputs."""
    s0 = load(bias, panel * LANES)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    weights, step = panel * n * LANES, panel * (n // BLOCK) * LANES
    at = row * n
    for k in range(n):
        prefetch(panels, weights + k * LANES + _AHEAD_BYTES // panels.itemsize)
        weight = load_weights(panels, weights + k * LANES, steps, step + k // BLOCK * LANES)
        s0 = fma(spread(x, at + k), weight, s0)
        s1 = fma(spread(x, at + n + k), weight, s1)
        s2 = fma(spread(x, at + 2 * n + k), weight, s2)
        s3 = fma(spread(x, at + 3 * n + k), weight, s3)
        s4 = fma(spread(x, at + 4 * n + k), weight, s4)
        s5 = fma(spread(x, at + 5 * n + k), weight, s5)
        s6 = fma(spread(x, at + 6 * n + k), weight, s6)
        s7 = fma(spread(x, at + 7 * n + k), weight, s7)
    to = row * m + panel * LANES
    store(out, to, s0)
    store(out, to + m, s1)
    store(out, to + 2 * m, s2)
    store(out, to + 3 * m, s3)
    store(out, to + 4 * m, s4)
    store(out, to + 5 * m, s5)
    store(out, to + 6 * m, s6)
    store(out, to + 7 * m, s7)

"""Linear layers with weights of 8 bits for the CPU: a quarter of the bytes, and still one fixed order for every row.

    weight     w[n, k] = scale[n] * (stored[n, k] - 128)         one scale for each output, its largest weight is 127
    input      x[k] = step * q[k], q = -127 .. 127               one step for each BLOCK inputs of the row
    output     out[n] = b[n] + scale[n] * (step[0] * dot(q, w of block 0) + step[1] * ...)    fused, in ascending order

A dot product of whole numbers is exact, whoever computes it in whatever order; the few sums of floats are written
down. So a row's bits depend on that row alone, and are the same on every processor.

Weights are stored without a sign because the processor multiplies unsigned with signed bytes. The 128 that each has too
much adds 128 * (sum of the block's inputs) to a dot product, so that is where the sum starts from, with a minus.

Panels of 16 outputs are laid out [panel, four inputs, output, input of the four], one byte each: one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.cpu_linear import ROWS
from understudy.kernels.packing import Zeros, pack_in_parts
from understudy.kernels.simd import (
    LANES,
    bits,
    dot,
    fma,
    has_wide_registers,
    larger,
    largest,
    load,
    load_groups,
    magnitude_bits,
    plus,
    prefetch,
    splat,
    spread,
    spread_group,
    spread_integer,
    store,
    store_low_bytes,
    to_floats,
    total,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SignedBytes = NDArray[np.int8]
Ints = NDArray[np.int32]

BLOCK = 32
"""Inputs that share a step."""

_GROUPS = BLOCK // 4
_GROUP_BYTES = 4 * LANES
_AHEAD = 16 * 1024
"""How far ahead of its use a byte is asked for, when rows share a panel and memory would otherwise wait for them."""
_MANY_ROWS = 16
"""From here on it pays to let all threads quantise rows."""
_PAIRS_ROWS = 32
"""From here on panels are multiplied in pairs: arithmetic takes the time, and a pair fetches each input once for both.
Fewer rows wait for weights from memory, which come faster as one stream than as two."""

Vector = Any  # known to compiled code only

f32 = np.float32
_ROUND = f32(1.5 * 2**23)
"""Added to a small number it leaves a float that ends with the bits of that number, rounded half to even."""
_ROUND_BITS = 0x4B400000
_INFINITE = 0x7F800000
_LEAST = 0x0D800000
"""The bits of 2**-100: a block with nothing larger counts as zeros, since its step could not be inverted."""
_PAIRS_FIT = has_wide_registers()
"""Sixteen sums and two weights stay in registers; AVX2 has sixteen of half a Vector."""
_LEAST_SCALE = f32(2**-100)
"""The same for weights: below it lie the numbers of few digits, by which nothing can be divided."""


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A weight [outputs, inputs] in panels of bytes."""

    panels: Bytes
    """Flat: [panels, groups of four inputs, LANES, 4]; inputs are padded to whole blocks"""
    scales: Floats
    """[panels * LANES]"""
    bias: Floats
    """[panels * LANES], zero where there is none"""
    num_outputs: int
    num_inputs: int

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None = None, *, zeros: Zeros = np.zeros) -> Int8Linear:
        """Round a weight [outputs, inputs] to 8 bits and lay it out; a row that is not finite gets the scale NaN."""
        num_outputs, num_inputs = weight.shape
        num_panels, num_blocks = -(-num_outputs // LANES), -(-num_inputs // BLOCK)
        scales = np.zeros((num_panels, LANES), np.float32)
        panels = zeros((num_panels, num_blocks * _GROUPS, LANES, 4), np.uint8)
        panels.fill(128)
        pack_in_parts(_pack, np.ascontiguousarray(weight.float().numpy()), panels, scales)
        start = np.zeros(num_panels * LANES, np.float32)
        if bias is not None:
            start[:num_outputs] = bias.float().numpy()
        return cls(panels.reshape(-1), scales.reshape(-1), start, num_outputs, num_inputs)

    @property
    def packed(self) -> tuple[Bytes, Floats, Floats]:
        """What `linear` reads."""
        return self.panels, self.scales, self.bias

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.panels.nbytes + self.scales.nbytes + self.bias.nbytes

    def __call__(self, x: Floats) -> Floats:
        """x [rows, inputs] -> [rows, outputs]; one row, or a multiple of ROWS."""
        assert x.shape[0] == 1 or x.shape[0] % ROWS == 0
        out = np.empty((x.shape[0], len(self.bias)), np.float32)
        linear(x, *self.packed, out)
        return out if len(self.bias) == self.num_outputs else out[:, : self.num_outputs]


@jit_exact
def _pack(weight: Floats, panels: Bytes, scales: Floats) -> None:
    """Round a weight [outputs, inputs] into panels [panels, groups, LANES, 4] that hold 128, the stored zero.

    Scales [panels, LANES] are zeros.
    """
    num_outputs, num_inputs = weight.shape
    for n in range(num_outputs):
        panel, lane = n // LANES, n % LANES
        most = f32(0)
        for k in range(num_inputs):
            size = abs(weight[n, k])
            if size > most or np.isnan(size):  # a NaN stays: nothing is larger
                most = size
        scale = most / f32(127)
        if not scale < f32(np.inf):
            scales[panel, lane] = f32(np.nan)
        elif scale > _LEAST_SCALE:
            scales[panel, lane] = scale
            for k in range(num_inputs):
                panels[panel, k // 4, lane, k % 4] = np.uint8(np.int32(np.rint(weight[n, k] / scale)) + np.int32(128))


@jit_exact_parallel
def linear(x: Floats, panels: Bytes, scales: Floats, bias: Floats, out: Floats) -> None:
    """Compute x [rows, inputs] -> out [rows, outputs], panel by panel; inputs are filled up to whole blocks.

    The rows that share a weight in a register, one or ROWS, lie interleaved as [tile, block, row of the tile, BLOCK],
    so that one address leads to all of them.
    """
    if x.shape[1] % BLOCK:
        x = _filled_up(x)
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    num_blocks = num_inputs // BLOCK
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    q = np.empty(num_rows * num_inputs, np.int8)
    steps = np.empty(num_rows * num_blocks, f32)
    starts = np.empty(num_rows * num_blocks, np.int32)
    if num_rows < _MANY_ROWS:
        for row in range(num_rows):
            _quantise_row(flat_x, row, min(num_rows, ROWS), num_blocks, q, steps, starts)
    else:
        for row in numba.prange(num_rows):
            _quantise_row(flat_x, row, ROWS, num_blocks, q, steps, starts)
    num_panels = num_outputs // LANES
    num_pairs = num_panels // 2 if _PAIRS_FIT and num_rows >= _PAIRS_ROWS else 0
    if num_pairs:  # threads are woken for a loop, however short it is
        for pair in numba.prange(num_pairs):
            first = 2 * pair * LANES
            for row in range(0, num_rows, ROWS):
                _four_rows_twice(
                    row * num_blocks, q, steps, starts, panels, first, num_blocks, scales, bias, flat_out,
                    row * num_outputs + first, num_outputs,
                )  # fmt: skip
    for panel in numba.prange(2 * num_pairs, num_panels):
        first = panel * LANES
        weights = panel * num_inputs * LANES
        scale, begin = load(scales, first), load(bias, first)
        if num_rows == 1:
            _one_row(q, steps, starts, panels, weights, num_blocks, scale, begin, flat_out, first)
        else:
            for row in range(0, num_rows, ROWS):
                _four_rows(
                    row * num_blocks, q, steps, starts, panels, weights, num_blocks, scale, begin, flat_out,
                    row * num_outputs + first, num_outputs,
                )  # fmt: skip


@jit_exact
def _filled_up(x: Floats) -> Floats:
    """X [rows, inputs] with zeros behind, up to whole blocks."""
    whole = np.zeros((x.shape[0], (x.shape[1] + BLOCK - 1) // BLOCK * BLOCK), f32)
    whole[:, : x.shape[1]] = x
    return whole


@jit_exact
def _quantise_row(
    x: Floats, row: int, tile_rows: int, num_blocks: int, q: SignedBytes, steps: Floats, starts: Ints
) -> None:
    """Round the blocks of one row to bytes, with each block's step and the start of its dot products.

    They go to the row's place in its tile. A block that holds an infinity or a NaN gets the step NaN, and with it every
    output of its row.
    """
    tile, place = row // tile_rows, row % tile_rows
    for number in range(num_blocks):
        at = (row * num_blocks + number) * BLOCK
        block = (tile * num_blocks + number) * tile_rows + place
        to = block * BLOCK
        high = magnitude_bits(load(x, at))
        for i in range(LANES, BLOCK, LANES):
            high = larger(high, magnitude_bits(load(x, at + i)))
        most = largest(high)
        step, inverse = f32(0), f32(0)
        if most >= _INFINITE:
            step = f32(np.nan)
        elif most > _LEAST:
            magnitude = np.int32(most).view(np.float32)
            step, inverse = magnitude / f32(127), f32(127) / magnitude
        factor, rounder = splat(inverse), splat(_ROUND)
        numbers = bits(fma(load(x, at), factor, rounder))
        store_low_bytes(q, to, numbers)
        for i in range(LANES, BLOCK, LANES):
            more = bits(fma(load(x, at + i), factor, rounder))
            store_low_bytes(q, to + i, more)
            numbers = plus(numbers, more)
        steps[block] = step
        starts[block] = np.int32(-128 * (total(numbers) - BLOCK * _ROUND_BITS))  # right in its 32 bits


@jit_exact
def _one_row(
    q: SignedBytes, steps: Floats, starts: Ints, panels: Bytes, weights: int, num_blocks: int, scale: Vector,
    bias: Vector, out: Floats, to: int,
) -> None:  # fmt: skip
    """One row times one panel, which starts at byte `weights`. A single row runs so fast that it needs no prefetch."""
    t0 = splat(f32(0))
    for block in range(num_blocks):
        s0 = spread_integer(starts, block)
        for group in range(_GROUPS):
            s0 = dot(s0, load_groups(panels, weights), spread_group(q, block * BLOCK + group * 4))
            weights += _GROUP_BYTES
        t0 = fma(to_floats(s0), spread(steps, block), t0)
    store(out, to, fma(t0, scale, bias))


@jit_exact
def _four_rows(
    tile: int, q: SignedBytes, steps: Floats, starts: Ints, panels: Bytes, weights: int, num_blocks: int, scale: Vector,
    bias: Vector, out: Floats, to: int, m: int,
) -> None:  # fmt: skip
    """4 rows, whose blocks start with number `tile`, times one panel; their outputs lie m apart, from `to` on."""
    t0 = splat(f32(0))
    t1, t2, t3 = t0, t0, t0
    for block in range(tile, tile + 4 * num_blocks, 4):
        s0 = spread_integer(starts, block)
        s1 = spread_integer(starts, block + 1)
        s2 = spread_integer(starts, block + 2)
        s3 = spread_integer(starts, block + 3)
        for group in range(_GROUPS):
            at = block * BLOCK + group * 4
            prefetch(panels, weights + _AHEAD)
            weight = load_groups(panels, weights)
            weights += _GROUP_BYTES
            s0 = dot(s0, weight, spread_group(q, at))
            s1 = dot(s1, weight, spread_group(q, at + 1 * BLOCK))
            s2 = dot(s2, weight, spread_group(q, at + 2 * BLOCK))
            s3 = dot(s3, weight, spread_group(q, at + 3 * BLOCK))
        t0 = fma(to_floats(s0), spread(steps, block), t0)
        t1 = fma(to_floats(s1), spread(steps, block + 1), t1)
        t2 = fma(to_floats(s2), spread(steps, block + 2), t2)
        t3 = fma(to_floats(s3), spread(steps, block + 3), t3)
    store(out, to, fma(t0, scale, bias))
    store(out, to + m, fma(t1, scale, bias))
    store(out, to + 2 * m, fma(t2, scale, bias))
    store(out, to + 3 * m, fma(t3, scale, bias))


@jit_exact
def _four_rows_twice(
    tile: int, q: SignedBytes, steps: Floats, starts: Ints, panels: Bytes, first: int, num_blocks: int, scales: Floats,
    bias: Floats, out: Floats, to: int, m: int,
) -> None:  # fmt: skip
    """As `_four_rows`, for two panels that follow each other: outputs `first` .. `first` + 2 * LANES - 1."""
    more = num_blocks * BLOCK * LANES  # bytes from one panel to the next
    weights = first // LANES * more
    t0, u0 = splat(f32(0)), splat(f32(0))
    t1, t2, t3, u1, u2, u3 = t0, t0, t0, u0, u0, u0
    for block in range(tile, tile + 4 * num_blocks, 4):
        s0 = r0 = spread_integer(starts, block)
        s1 = r1 = spread_integer(starts, block + 1)
        s2 = r2 = spread_integer(starts, block + 2)
        s3 = r3 = spread_integer(starts, block + 3)
        for group in range(_GROUPS):
            at = block * BLOCK + group * 4
            prefetch(panels, weights + _AHEAD)
            prefetch(panels, weights + more + _AHEAD)
            left, right = load_groups(panels, weights), load_groups(panels, weights + more)
            weights += _GROUP_BYTES
            x0, x1 = spread_group(q, at), spread_group(q, at + 1 * BLOCK)
            x2, x3 = spread_group(q, at + 2 * BLOCK), spread_group(q, at + 3 * BLOCK)
            s0, r0 = dot(s0, left, x0), dot(r0, right, x0)
            s1, r1 = dot(s1, left, x1), dot(r1, right, x1)
            s2, r2 = dot(s2, left, x2), dot(r2, right, x2)
            s3, r3 = dot(s3, left, x3), dot(r3, right, x3)
        step0, step1 = spread(steps, block), spread(steps, block + 1)
        step2, step3 = spread(steps, block + 2), spread(steps, block + 3)
        t0, u0 = fma(to_floats(s0), step0, t0), fma(to_floats(r0), step0, u0)
        t1, u1 = fma(to_floats(s1), step1, t1), fma(to_floats(r1), step1, u1)
        t2, u2 = fma(to_floats(s2), step2, t2), fma(to_floats(r2), step2, u2)
        t3, u3 = fma(to_floats(s3), step3, t3), fma(to_floats(r3), step3, u3)
    scale, begin = load(scales, first), load(bias, first)
    store(out, to, fma(t0, scale, begin))
    store(out, to + m, fma(t1, scale, begin))
    store(out, to + 2 * m, fma(t2, scale, begin))
    store(out, to + 3 * m, fma(t3, scale, begin))
    scale, begin, to = load(scales, first + LANES), load(bias, first + LANES), to + LANES
    store(out, to, fma(u0, scale, begin))
    store(out, to + m, fma(u1, scale, begin))
    store(out, to + 2 * m, fma(u2, scale, begin))
    store(out, to + 3 * m, fma(u3, scale, begin))

"""Row-invariant kernels for the CPU, compiled by numba: norms and gates here, attention in cpu_attention.

Every function in both computes a row from that row's own numbers in one fixed order: the number of rows, their
place in the batch, the page a key lies in and whether it was drafted or committed change no bit. That is what
lets a verified row stand for a plainly decoded one, so three habits hold throughout:

* a sum runs in a fixed order: over features in `LANES` interleaved partial sums, over keys one after the other;
* a key's place in a reduction is its position, never its slot;
* vector loops run over whole pages or lanes, so that no element ever meets a differently rounded tail.

Where one sum is computed by two functions (attention: a key in a page, a key in a tail) the multiply-add is explicit
(simd.py); elsewhere the compiler may fuse it (`contract`), and may never reorder a sum.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.simd import LANES, fma, load, splat, store, times

Floats = NDArray[np.float32]

f32 = np.float32
_LOG2E = f32(1.4426950408889634)
_LN2_HIGH = f32(0.693359375)
_LN2_LOW = f32(-2.12194440e-4)
_EXP_LOW = f32(-87.0)
_EXP_HIGH = f32(87.0)


@jit_exact
def exp(x: f32) -> f32:
    """e**x by range reduction and a polynomial, so that vector and scalar code round alike."""
    x = min(max(x, _EXP_LOW), _EXP_HIGH)
    k = np.floor(x * _LOG2E + f32(0.5))
    r = x - k * _LN2_HIGH
    r = r - k * _LN2_LOW
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + f32(5.0000001201e-1)
    y = y * (r * r) + r
    y = y + f32(1.0)
    exponent = np.int32((np.int32(k) + np.int32(127)) << np.int32(23))
    return f32(y * exponent.view(np.float32))


@jit_exact
def add_rms_norm(x: Floats, delta: Floats, weight: Floats, eps: f32, out: Floats) -> None:
    """X += delta; out = x / rms(x) * weight. All [rows, features]; features are a multiple of LANES."""
    flat_x, flat_delta, one = x.reshape(-1), delta.reshape(-1), splat(f32(1))
    for i in range(0, flat_x.shape[0], LANES):
        store(flat_x, i, fma(load(flat_x, i), one, load(flat_delta, i)))
    rms_norm(x, weight, eps, out)


@jit_exact
def rms_norm(x: Floats, weight: Floats, eps: f32, out: Floats) -> None:
    """Out = x / rms(x) * weight. Both [rows, features]; features are a multiple of LANES."""
    num_rows, num_features = x.shape
    flat_x, flat_out = x.reshape(-1), out.reshape(-1)
    lanes = np.empty(LANES, f32)
    for first in range(0, num_rows * num_features, num_features):
        partial = splat(f32(0))
        for i in range(first, first + num_features, LANES):
            v = load(flat_x, i)
            partial = fma(v, v, partial)
        store(lanes, 0, partial)
        total = f32(0)
        for lane in range(LANES):
            total = total + lanes[lane]
        scale = splat(f32(1) / np.sqrt(total / f32(num_features) + eps))
        for i in range(0, num_features, LANES):
            store(flat_out, first + i, times(times(load(flat_x, first + i), scale), load(weight, i)))


@jit_exact
def gated(gate_up: Floats, out: Floats) -> None:
    """Out = silu(gate) * up. gate_up [rows, 2 * features], out [rows, features]."""
    for row in range(out.shape[0]):
        _gated_row(gate_up[row], out[row])


@jit_exact_parallel
def gated_by_threads(gate_up: Floats, out: Floats) -> None:
    """As `gated`, rows spread over the threads: for many of them."""
    for row in numba.prange(out.shape[0]):
        _gated_row(gate_up[row], out[row])


@jit_exact
def _gated_row(source: Floats, target: Floats) -> None:
    num_features = target.shape[0]
    for i in range(num_features):
        a = source[i]
        target[i] = a / (f32(1) + exp(-a)) * source[num_features + i]

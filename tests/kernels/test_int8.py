"""Linear layers with weights of 8 bits: the same bits beside any rows, on any threads and by any instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import understudy
from understudy.kernels import reference
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cpu_int8 import BLOCK, Int8Linear
from understudy.kernels.simd import LANES, dot, dot_portable, has_byte_dot_products, load_groups, store, to_floats

Floats = NDArray[np.float32]

SHAPES = [(64, 64), (304, 64), (48, 16), (960, 576), (576, 1536), (64, 2048), (33, 100), (300, 48), (16, 4864)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Others share the cores."""
    CpuKernels().take_threads(1)


def draws(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def spiky(*shape: int, seed: int = 0) -> Floats:
    """Rows as they occur: some features a hundred times the others, some rows tiny."""
    rng = np.random.default_rng(seed)
    features = np.where(rng.random(shape[1]) < 0.03, 100.0, 1.0)
    return (draws(*shape, seed=seed) * features * 10.0 ** rng.integers(-4, 3, (shape[0], 1))).astype(np.float32)


def packed(weight: Floats, bias: Floats | None = None) -> Int8Linear:
    return Int8Linear.pack(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias))


def computed(linear: Int8Linear, x: Floats) -> Floats:
    """Rows as a decoder hands them over: one, or a multiple of four whose rest is padding."""
    rows = np.full((CpuKernels().padded_rows(len(x)), x.shape[1]), np.nan, np.float32)
    rows[: len(x)] = x
    return linear(rows)[: len(x)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_rows_do_not_depend_on_their_neighbours(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, x = draws(num_out, num_in), spiky(70, num_in, seed=1)
    bias = draws(num_out, seed=2) if has_bias else None
    linear = packed(weight, bias)
    whole = computed(linear, x)
    assert whole.shape == (70, num_out)
    for count in range(1, 71):
        for first in (0, (count * 7 + 3) % (71 - count)):
            part = computed(linear, x[first : first + count])
            assert np.array_equal(part, whole[first : first + count]), f"{count} rows from {first}"
    expected = reference.int8_linear(x, weight, bias, block=BLOCK)
    size = np.abs(x).max(axis=1, keepdims=True)
    np.testing.assert_allclose(whole / size, expected / size, rtol=1e-5, atol=1e-4)


def test_many_rows() -> None:
    linear, x = packed(draws(48, 96)), draws(777, 96, seed=1)
    whole = computed(linear, x)
    for count in (255, 256, 257, 511, 513, 776):
        assert np.array_equal(computed(linear, x[:count]), whole[:count])
        assert np.array_equal(computed(linear, x[777 - count :]), whole[777 - count :])


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_threads_change_no_bit() -> None:
    linear, x = packed(draws(608, 64)), draws(77, 64, seed=1)
    alone = {count: computed(linear, x[:count]) for count in (1, 5, 8, 13, 77)}
    for num_threads in range(2, min(4, numba.config.NUMBA_NUM_THREADS) + 1):
        CpuKernels().take_threads(num_threads)
        for count, expected in alone.items():
            assert np.array_equal(computed(linear, x[:count]), expected)


def test_close_to_the_weight_that_was_rounded() -> None:
    """A sanity check in the large: a percent of what the layer says, for inputs of usual spread."""
    weight, x = draws(256, 576), draws(16, 576, seed=1)
    expected = reference.linear(x, weight)
    error = packed(weight)(x) - expected
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(expected**2))


# The ends of the scale.


def test_zeros_and_what_is_too_small_to_divide_by() -> None:
    weight, bias = draws(32, 64), draws(32, seed=1)
    linear = packed(weight, bias)
    for value in (0.0, -0.0, 1e-45, -1e-40, 1e-31):
        assert np.array_equal(linear(np.full((1, 64), value, np.float32))[0], bias)
    weight[3], weight[5] = 0.0, 190 * 2.0**-149
    out = packed(weight)(draws(4, 64, seed=2))
    assert np.array_equal(out[:, [3, 5]], np.zeros((4, 2), np.float32))
    assert (out[:, [2, 4]] != 0).all()


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e30])
def test_large_and_small_inputs_keep_their_digits(size: float) -> None:
    weight, x = draws(32, 64), draws(4, 64, seed=1)
    scaled = x * np.float32(size)
    expected = reference.int8_linear(scaled, weight, block=BLOCK)
    np.testing.assert_allclose(packed(weight)(scaled) / size, expected / size, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(value: float) -> None:
    linear, x = packed(draws(32, 96)), draws(8, 96, seed=1)
    sound = linear(x)
    x[2, 50] = value
    for out in (linear(x), np.concatenate([computed(linear, x[row : row + 1]) for row in range(8)])):
        assert np.isnan(out[2]).all()
        assert np.array_equal(np.delete(out, 2, axis=0), np.delete(sound, 2, axis=0))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_weight_that_is_not_finite_shows_in_its_output(value: float) -> None:
    weight = draws(32, 64)
    weight[7, 30] = value
    out = packed(weight)(draws(4, 64, seed=1))
    assert np.isnan(out[:, 7]).all()
    assert np.isfinite(np.delete(out, 7, axis=1)).all()


def test_the_largest_sums_of_bytes_fit() -> None:
    """All inputs and weights at their largest, over more inputs than any model has."""
    for sign in (1, -1):
        x, weight = np.full((4, 32768), 3.0, np.float32), np.full((16, 32768), sign * 2.0, np.float32)
        np.testing.assert_allclose(packed(weight)(x), sign * 6.0 * 32768, rtol=1e-5)


# Instructions.


@numba.njit
def _dot_by_instruction(unsigned: NDArray[np.uint8], signed: NDArray[np.int8], out: Floats) -> None:
    zero = load_groups(np.zeros(4 * LANES, np.uint8), 0)
    store(out, 0, to_floats(dot(zero, load_groups(unsigned, 0), load_groups(signed, 0))))


@numba.njit
def _dot_portably(unsigned: NDArray[np.uint8], signed: NDArray[np.int8], out: Floats) -> None:
    zero = load_groups(np.zeros(4 * LANES, np.uint8), 0)
    store(out, 0, to_floats(dot_portable(zero, load_groups(unsigned, 0), load_groups(signed, 0))))


@pytest.mark.parametrize("by", [_dot_by_instruction, _dot_portably])
def test_dot_of_bytes(by: object) -> None:
    rng = np.random.default_rng(0)
    ends = [(0, -127), (255, 127), (255, -127), (1, -128), (255, -128)]
    cases = [(rng.integers(0, 256, 64), rng.integers(-128, 128, 64)) for _ in range(100)]
    for unsigned, signed in [*cases, *((np.full(64, u), np.full(64, s)) for u, s in ends)]:
        out = np.empty(LANES, np.float32)
        by(unsigned.astype(np.uint8), signed.astype(np.int8), out)  # type: ignore[operator]
        assert np.array_equal(out, (unsigned * signed).reshape(LANES, 4).sum(axis=1))


PRINT_BITS = """
import hashlib, numpy as np, torch
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cpu_int8 import Int8Linear
CpuKernels().take_threads(1)
rng = np.random.default_rng(0)
linear = Int8Linear.pack(torch.from_numpy(rng.standard_normal((304, 192), np.float32)))
x = rng.standard_normal((12, 192), np.float32)
print(hashlib.sha256(linear(x).tobytes() + linear(x[:1]).tobytes()).hexdigest())
"""


@pytest.mark.skipif(not has_byte_dot_products(), reason="this machine has the portable path only")
def test_the_same_bits_on_an_older_processor() -> None:
    """Compiled for AVX2 in another process: other instructions, other tiles, the same numbers."""
    found = set()
    for features in ({}, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.1,+sse4.2,+ssse3"}):
        environment = os.environ | features | {"PYTHONPATH": str(Path(understudy.__file__).parents[1])}
        found.add(subprocess.check_output([sys.executable, "-c", PRINT_BITS], env=environment, text=True))
    assert len(found) == 1

"""Linear layers on a GPU: equal bits for every number of rows and every tile, and close to the slow twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, PRECISION, draws, needs_gpu, on_host
from understudy.kernels import reference
from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kernels.cuda_plans import Split, Tile, gated_tile_for, split_for, tile_for

SHORT = 32 if ON_GPU else 64
"""Inputs of a step: the interpreter adds up a step in an order of its own, so there all tiles have the same."""
TILES = (
    *(Tile(64, 16, SHORT, 4, 3), Tile(64, 32, 64, 4, 4), Tile(64, 64, 64, 4, 3)),
    *(Tile(128, 64, 64, 8, 3), Tile(64, 128, SHORT, 8, 2)),
    *(Tile(64, 16, SHORT, 4, 3, by_box=True), Tile(128, 64, 64, 4, 3, by_box=True)),
)
ROW_COUNTS = range(1, 257) if ON_GPU else (1, 2, 16, 17, 33, 70)
SHAPES = [(128, 64), (200, 96), (64, 576), (304, 64)]
LLAMA = [(6144, 4096), (4096, 4096), (4096, 14336), (49152, 4096)]
SMOLLM = [(960, 576), (576, 576), (576, 1536), (49152, 576)]


def packed(weight: Tensor, bias: Tensor | None = None, *, split: Split | None = None) -> Linear:
    return Linear.pack(weight, bias, device=DEVICE, dtype=DTYPE, split=split)


def check_rows(linear: Linear | GatedLinear, x: Tensor) -> Tensor:
    """Every number of rows, from the front and from elsewhere, and every tile, give the bits of all rows at once."""

    def rows_first(found: Tensor) -> Tensor:
        return found if found.dim() == 2 else found.transpose(0, 1)

    whole = rows_first(linear(x))
    for count in (count for count in ROW_COUNTS if count <= x.shape[0]):
        for first in {0, (7 * count) % (x.shape[0] - count + 1)}:
            found = rows_first(linear(x[first : first + count].contiguous()))
            assert torch.equal(found, whole[first : first + count]), f"{count} rows from {first}"
    for tile in TILES:
        for count in (1, 5, x.shape[0]):
            assert torch.equal(rows_first(linear(x[:count].contiguous(), tile=tile)), whole[:count]), f"{count}, {tile}"
    return whole


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_linear(num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    weight, x = draws(num_outputs, num_inputs), draws(70, num_inputs, seed=1)
    bias = draws(num_outputs, seed=2, dtype=torch.float32) if has_bias else None
    whole = check_rows(packed(weight, bias), x)
    expected = reference.linear(on_host(x), on_host(weight), None if bias is None else on_host(bias))
    np.testing.assert_allclose(on_host(whole).sum(1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("split", [Split(64, 1), Split(64, 2), Split(64, 3), Split(128, 1), Split(128, 2)], ids=str)
def test_every_split_computes_the_same_numbers(split: Split) -> None:
    """Small integers have exact sums, whatever the order: a number that is left out or counted twice shows."""
    weight = torch.randint(-8, 9, (200, 224), generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    x = torch.randint(-8, 9, (21, 224), generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    found = packed(weight, split=split)(x)
    assert found.shape == (split.num_parts, 21, 200)
    assert np.array_equal(on_host(found).sum(0), reference.linear(on_host(x), on_host(weight)))


def test_parts_are_sums_of_neighbouring_inputs() -> None:
    weight, x = draws(128, 192), draws(3, 192, seed=1)
    found = on_host(packed(weight, split=Split(64, 3))(x))
    for part in range(3):
        inputs = slice(64 * part, 64 * part + 64)
        expected = reference.linear(on_host(x)[:, inputs], on_host(weight)[:, inputs])
        np.testing.assert_allclose(found[part], expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_described_as_a_box_is_fetched_by_address() -> None:
    weight, tile = draws(128, 64), Tile(64, 16, 64, 4, 3, by_box=True)
    crooked = torch.cat([weight.new_zeros(3), draws(4 * 64, seed=1)])[3:].view(4, 64)
    assert crooked.data_ptr() % 16
    linear = packed(weight)
    assert torch.equal(linear(crooked, tile=tile), linear(crooked.clone(), tile=tile))
    assert linear(crooked[:0], tile=tile).shape[1:] == (0, 128)


@pytest.mark.parametrize(("num_features", "num_inputs"), [(128, 64), (100, 96)])
def test_gated(num_features: int, num_inputs: int) -> None:
    gate, up, x = (
        draws(num_features, num_inputs),
        draws(num_features, num_inputs, seed=1),
        draws(70, num_inputs, seed=2),
    )
    whole = check_rows(GatedLinear.pack(gate, up, device=DEVICE, dtype=DTYPE), x)
    both = [reference.linear(on_host(x), on_host(weight)) for weight in (gate, up)]
    np.testing.assert_allclose(on_host(whole), reference.gated(np.hstack(both)), rtol=PRECISION, atol=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_outputs", "num_inputs"), LLAMA + SMOLLM)
def test_1_to_256_rows_of_real_shapes(num_outputs: int, num_inputs: int) -> None:
    check_rows(packed(draws(num_outputs, num_inputs)), draws(256, num_inputs, seed=1))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_features", "num_inputs"), [(14336, 4096), (1536, 576)])
def test_1_to_256_rows_of_real_gates_and_prompts(num_features: int, num_inputs: int) -> None:
    gate, up = draws(num_features, num_inputs), draws(num_features, num_inputs, seed=1)
    linear, x = GatedLinear.pack(gate, up, device=DEVICE, dtype=DTYPE), draws(1100, num_inputs, seed=2)
    check_rows(linear, x[:256].contiguous())
    whole = linear(x)
    for count in (1, 64, 128, 256, 257, 384, 385, 512, 513, 1024):
        assert torch.equal(linear(x[:count].contiguous()), whole[:count]), count


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_outputs", "num_inputs"), LLAMA + SMOLLM)
def test_prompts_of_real_shapes(num_outputs: int, num_inputs: int) -> None:
    linear, x = packed(draws(num_outputs, num_inputs)), draws(1100, num_inputs, seed=1)
    whole = linear(x)
    for count in (1, 33, 65, 129, 256, 257, 384, 385, 512, 513, 1024):
        assert torch.equal(linear(x[:count].contiguous()), whole[:, :count]), count


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(960, 576), *LLAMA])
def test_fp16_and_a_prompt_of_777_rows(num_outputs: int, num_inputs: int) -> None:
    linear = Linear.pack(draws(num_outputs, num_inputs), device=DEVICE, dtype=torch.float16)
    x = draws(777, num_inputs, seed=1, dtype=torch.float16)
    whole = linear(x)
    for count in (1, 4, 255, 256, 257, 511, 777):
        assert torch.equal(linear(x[:count].contiguous()), whole[:, :count])


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [*LLAMA, *SMOLLM, *SHAPES, (152064, 3584), (4608, 3584)])
def test_plans(num_outputs: int, num_inputs: int) -> None:
    """A split wastes no step, an output layer is never split, and every tile fits a multiprocessor's memory."""
    split = split_for(num_outputs, num_inputs)
    assert split.padded(num_inputs) - num_inputs < split.unit
    assert split.num_parts == 1 or num_outputs < 8192
    for num_rows in (1, 16, 17, 32, 64, 128, 256, 512, 2048):
        tile = tile_for(num_rows, num_outputs=num_outputs, split=split)
        assert (tile.outputs + tile.rows) * tile.inputs * 2 * tile.num_stages <= 227 * 1024
        assert split.unit % tile.inputs == 0
        gated = gated_tile_for(num_rows, split=split)
        assert (2 * gated.outputs + gated.rows) * gated.inputs * 2 * gated.num_stages <= 227 * 1024
        assert split.unit % gated.inputs == 0

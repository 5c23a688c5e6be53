"""What stands between the products of a layer on a GPU: equal bits for every number of rows, close to the slow twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, PRECISION, draws, ints, on_host
from understudy.kernels import reference
from understudy.kernels.cuda_ops import add_rms_norm, copy_slots, rotate_and_store, take_rows
from understudy.kernels.cuda_rows import PAGE, PlacedRows

NUM_ROWS = 64 if ON_GPU else 9
HEADS = [(4, 2, 16), (9, 3, 64), (32, 8, 128)] if ON_GPU else [(3, 1, 16)]
COUNTS = range(1, NUM_ROWS) if ON_GPU else (1, 2, 5)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("num_features", [64, 576, 4096] if ON_GPU else [64, 100])
def test_add_rms_norm(num_features: int, num_parts: int) -> None:
    x, weight = draws(NUM_ROWS, num_features, dtype=torch.float32), draws(num_features, seed=2, dtype=torch.float32)
    parts = draws(num_parts, NUM_ROWS, num_features, seed=1, dtype=torch.float32) if num_parts else None

    def computed(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = x[first:last].clone()
        given = None if parts is None else parts[:, first:last].contiguous()
        return own, add_rms_norm(own, given, weight, 1e-5, dtype=DTYPE)

    whole_x, whole = computed(0, NUM_ROWS)
    for count in COUNTS:
        own, out = computed(NUM_ROWS - count, NUM_ROWS)
        assert torch.equal(own, whole_x[-count:])
        assert torch.equal(out, whole[-count:])
    delta = np.zeros(x.shape) if parts is None else on_host(parts).sum(0)
    expected_x, expected = reference.add_rms_norm(on_host(x), delta, on_host(weight), 1e-5)
    np.testing.assert_allclose(on_host(whole_x), expected_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(on_host(whole), expected, rtol=2 * PRECISION, atol=1e-5)


def placed(positions: torch.Tensor, slots: torch.Tensor) -> PlacedRows:
    nothing = ints(0)
    return PlacedRows(
        nothing, positions, slots, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, most_keys=1
    )


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (32, 8, 128)] if ON_GPU else [(3, 1, 16)]
)
def test_rotate_and_store(heads: int, kv_heads: int, dim: int, has_norms: bool) -> None:
    rng = np.random.default_rng(0)
    qkv = draws(2, NUM_ROWS, (heads + 2 * kv_heads) * dim, dtype=torch.float32)
    norms = draws(heads + kv_heads, dim, seed=3, dtype=torch.float32) if has_norms else None
    angles = rng.uniform(0, 100, (200, dim // 2))
    cos, sin = (torch.tensor(table, dtype=torch.float32, device=DEVICE) for table in (np.cos(angles), np.sin(angles)))
    rows = placed(ints(*rng.integers(0, 200, NUM_ROWS)), ints(*rng.permutation(8 * PAGE)[:NUM_ROWS]))

    def computed(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = (torch.full((8, kv_heads, PAGE, dim), torch.nan, dtype=DTYPE, device=DEVICE) for _ in range(2))
        own = replace(rows, positions=rows.positions[first:last], slots=rows.slots[first:last])
        queries = rotate_and_store(
            qkv[:, first:last].contiguous(), own, cos, sin, keys, values, num_heads=heads, head_norms=norms, eps=1e-5
        )
        places = own.slots.long()
        for cache in (keys, values):
            assert torch.isnan(cache).sum() == cache.numel() - len(places) * kv_heads * dim, "nothing else is written"
        return queries, keys[places // PAGE, :, places % PAGE], values[places // PAGE, :, places % PAGE]

    whole = computed(0, NUM_ROWS)
    for count in COUNTS:
        for part, full in zip(computed(NUM_ROWS - count, NUM_ROWS), whole, strict=True):
            assert torch.equal(part, full[-count:])
    for row in range(NUM_ROWS):
        vectors = on_host(qkv).sum(0)[row].reshape(-1, dim)
        if norms is not None:
            normed = [
                reference.norm_heads(vector[None], weight, 1e-5)[0]
                for vector, weight in zip(vectors, on_host(norms), strict=False)
            ]
            vectors = np.concatenate([normed, vectors[heads + kv_heads :]])
        position = int(rows.positions[row])
        expected = reference.split_and_rotate(
            vectors.reshape(-1), on_host(cos[position]), on_host(sin[position]),
            num_heads=heads, num_kv_heads=kv_heads, dim=dim,
        )  # fmt: skip
        for found, wanted, scale in zip(whole, expected, (dim**-0.5, 1.0, 1.0), strict=True):
            np.testing.assert_allclose(on_host(found[row]) * scale, wanted, rtol=2 * PRECISION, atol=2 * PRECISION)


def test_take_rows() -> None:
    table = draws(50, 100)
    assert torch.equal(take_rows(table, ints(3, 49, 0, 3), dtype=torch.float32), table[[3, 49, 0, 3]].float())
    assert take_rows(table, ints(), dtype=DTYPE).shape == (0, 100)


def test_copy_slots_in_order() -> None:
    """A later copy may read what an earlier one wrote over, as it would in a loop by hand."""
    keys, values = draws(2, 3, 2, PAGE, 16), draws(2, 3, 2, PAGE, 16, seed=1)
    sources, targets = [40, 42, 70, 41], [39, 40, 41, 5]
    expected = [keys.clone(), values.clone()]
    for source, target in zip(sources, targets, strict=True):
        for cache in expected:
            cache[:, target // PAGE, :, target % PAGE] = cache[:, source // PAGE, :, source % PAGE].clone()
    copy_slots(keys, values, torch.stack([ints(*sources, 0), ints(*targets, 1)]), ints(len(sources)))
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])

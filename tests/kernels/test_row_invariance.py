"""A row's bits do not depend on the rows beside it: compared with array_equal, never with a tolerance.

The cache is full of NaN wherever nothing was written, and nothing is written that no row sees, so that a kernel which
reads what it should not see fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from understudy.kernels import cpu_attention, cpu_ops, reference
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cpu_linear import Linear
from understudy.kernels.rows import Rows

Floats = NDArray[np.float32]
PAGE = cpu_attention.PAGE

HEADS = [(4, 2, 16), (9, 3, 64), (2, 2, 32), (8, 1, 16), (14, 2, 64)]
"""(heads, key heads, head size): the tiny model's, SmolLM2's, one head each, one for all, Qwen2's."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Others share the cores."""
    CpuKernels().take_threads(1)


def draws(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def row_ranges(num_rows: int) -> list[tuple[int, int]]:
    """Every count from the front, and as many from odd offsets."""
    offsets = [(count * 7 + 3) % (num_rows - count + 1) for count in range(1, num_rows + 1)]
    return [(0, count) for count in range(1, num_rows + 1)] + [
        (offset, offset + count) for count, offset in enumerate(offsets, start=1)
    ]


# Norm, gate and rotation.


@pytest.mark.parametrize("features", [16, 64, 576, 1024])
def test_add_rms_norm(features: int) -> None:
    x, delta, weight = draws(64, features), draws(64, features, seed=1), draws(features, seed=2)

    def computed(first: int, last: int) -> tuple[Floats, Floats]:
        own, out = x[first:last].copy(), np.full((last - first, features), np.nan, np.float32)
        cpu_ops.add_rms_norm(own, delta[first:last].copy(), weight, np.float32(1e-5), out)
        return own, out

    whole_x, whole = computed(0, 64)
    for first, last in row_ranges(64):
        own, out = computed(first, last)
        assert np.array_equal(own, whole_x[first:last])
        assert np.array_equal(out, whole[first:last])
    expected_x, expected = reference.add_rms_norm(x, delta, weight, 1e-5)
    np.testing.assert_allclose(whole_x, expected_x, rtol=1e-6)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("features", [1, 7, 16, 100, 1536])
def test_gated(features: int) -> None:
    gate_up = draws(64, 2 * features) * 8

    def computed(first: int, last: int) -> Floats:
        out = np.full((last - first, features), np.nan, np.float32)
        cpu_ops.gated(gate_up[first:last].copy(), out)
        return out

    whole = computed(0, 64)
    for first, last in row_ranges(64):
        assert np.array_equal(computed(first, last), whole[first:last])
    np.testing.assert_allclose(whole, reference.gated(gate_up), rtol=2e-6, atol=1e-6)


def test_gated_at_the_ends_of_the_scale() -> None:
    """Where the exponential of 32 bits would overflow or vanish, the result is still that of the twin."""
    gate = np.array([[-200.0, -88.0, -86.0, -1e-6, 0.0, 1e-6, 86.0, 88.0, 200.0]], np.float32)
    gate_up = np.concatenate([gate, np.ones_like(gate)], axis=1)
    out = np.empty_like(gate)
    cpu_ops.gated(gate_up, out)
    np.testing.assert_allclose(out, reference.gated(gate_up), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_rotate_and_store(heads: int, kv_heads: int, dim: int) -> None:
    num_rows, num_blocks = 64, 8
    rng = np.random.default_rng(0)
    qkv = draws(num_rows, (heads + 2 * kv_heads) * dim)
    angles = rng.uniform(0, 100, (200, dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = rng.integers(0, 200, num_rows).astype(np.int32)
    slots = rng.permutation(num_blocks * PAGE)[:num_rows].astype(np.int32)

    def computed(first: int, last: int, slots: Any) -> tuple[Floats, Floats, Floats]:
        keys = np.full((num_blocks, kv_heads, dim, PAGE), np.nan, np.float32)
        values = np.full((num_blocks, kv_heads, PAGE, dim), np.nan, np.float32)
        queries = np.empty((last - first, heads, dim), np.float32)
        cpu_attention.rotate_and_store(
            qkv[first:last].copy(), cos, sin, positions[first:last], slots[first:last], keys, values, queries
        )
        assert np.isnan(keys).sum() == keys.size - (last - first) * kv_heads * dim, "nothing else is written"
        assert np.isnan(values).sum() == values.size - (last - first) * kv_heads * dim
        return (queries, *reference.read_slots(keys, values, list(slots[first:last])))  # type: ignore[return-value]

    whole = computed(0, num_rows, slots)
    elsewhere = computed(0, num_rows, np.roll(slots, 5))
    assert all(np.array_equal(a, b) for a, b in zip(whole, elsewhere, strict=True))
    for first, last in row_ranges(num_rows):
        for part, full in zip(computed(first, last, slots), whole, strict=True):
            assert np.array_equal(part, full[first:last])
    for row in range(num_rows):
        expected = reference.split_and_rotate(
            qkv[row], cos[positions[row]], sin[positions[row]], num_heads=heads, num_kv_heads=kv_heads, dim=dim
        )
        for part, wanted in zip(whole, expected, strict=True):
            np.testing.assert_allclose(part[row], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_norm_heads(heads: int, kv_heads: int, dim: int) -> None:
    qkv, weights = draws(64, (heads + 2 * kv_heads) * dim), draws(heads + kv_heads, dim, seed=1)

    def computed(first: int, last: int) -> Floats:
        part = qkv[first:last].copy()
        cpu_attention.norm_heads(part, weights, np.float32(1e-6))
        return part

    whole = computed(0, 64)
    for first, last in row_ranges(64):
        assert np.array_equal(computed(first, last), whole[first:last])
    assert np.array_equal(whole[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :]), "values are left alone"
    for head, weight in enumerate(weights):
        expected = reference.norm_heads(qkv[:, head * dim : head * dim + dim], weight, 1e-6)
        np.testing.assert_allclose(whole[:, head * dim : head * dim + dim], expected, rtol=1e-5, atol=1e-6)


# Attention.


@dataclass(frozen=True)
class Row:
    """One query at a position, whose last `num_tail` keys are found slot by slot."""

    position: int
    num_tail: int = 0


class Text:
    """Keys, values and queries of a text, by position, and attention over them from any place in a cache."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int, *, window: int | None = None) -> None:
        self.length = length
        self.window = window
        self.keys = draws(length, kv_heads, dim)
        self.values = draws(length, kv_heads, dim, seed=1)
        self.queries = draws(length, heads, dim, seed=2) * 2 / dim**0.5
        self.alone = np.concatenate([self.attend([Row(position)], seed=0) for position in range(length)])
        """[length, heads, dim] every row computed by itself, in line."""

    def attend(self, wanted: Sequence[Row], *, seed: int, groups: Sequence[int] | None = None) -> Floats:
        """Compute these rows together, with pages in an order and tails in places that the seed draws."""
        keys, values, rows = self.lay_out(wanted, random.Random(seed), groups or [0, len(wanted)])
        queries = self.queries[[row.position for row in wanted]]
        out = np.full(queries.shape, np.nan, np.float32)
        cpu_attention.attend(
            queries, keys, values, rows.tables, rows.group_starts, rows.group_tables,
            rows.prefix_lens, rows.tail_starts, rows.tail_slots, 1 + seed % 5,
            self.window or cpu_attention.NO_WINDOW, out,
        )  # fmt: skip
        return out

    def is_seen(self, position: int, row: Row) -> bool:
        """Whether a row may look at a position."""
        return row.position - (self.window or self.length) < position <= row.position

    def lay_out(self, wanted: Sequence[Row], rng: random.Random, groups: Sequence[int]) -> tuple[Floats, Floats, Rows]:
        """Put the text into a cache: its pages in any order, and for each row a tail of its own, scattered."""
        num_pages = -(-self.length // PAGE)
        num_tail_slots = sum(row.num_tail for row in wanted)
        num_blocks = num_pages + -(-num_tail_slots // PAGE) + 3
        blocks = rng.sample(range(num_blocks), num_blocks)
        table, spare = blocks[:num_pages], blocks[num_pages:]
        keys = np.full((num_blocks, *self.keys.shape[1:], PAGE), np.nan, np.float32)
        values = np.full((num_blocks, self.keys.shape[1], PAGE, self.keys.shape[2]), np.nan, np.float32)
        free = [block * PAGE + offset for block in spare for offset in range(PAGE)]
        rng.shuffle(free)

        def write(position: int, slot: int) -> int:
            keys[slot // PAGE, :, :, slot % PAGE] = self.keys[position]
            values[slot // PAGE, :, slot % PAGE] = self.values[position]
            return slot

        for position in range(max(row.position + 1 - row.num_tail for row in wanted)):
            if any(self.is_seen(position, row) for row in wanted):
                write(position, table[position // PAGE] * PAGE + position % PAGE)
        tails = [
            [
                write(position, free.pop()) if self.is_seen(position, row) else free.pop()
                for position in range(row.position + 1 - row.num_tail, row.position + 1)
            ]
            for row in wanted
        ]
        nothing = np.zeros(len(wanted), np.int32)
        rows = Rows(
            token_ids=nothing.astype(np.int64),
            positions=nothing,
            slots=nothing,
            tables=np.array([[0] * num_pages, table], np.int32),
            group_starts=np.array(groups, np.int32),
            group_tables=np.full(len(groups) - 1, 1, np.int32),
            prefix_lens=np.array([row.position + 1 - row.num_tail for row in wanted], np.int32),
            tail_starts=np.cumsum([0, *(row.num_tail for row in wanted)]).astype(np.int32),
            tail_slots=np.array([slot for tail in tails for slot in tail], np.int32),
            logit_rows=nothing.astype(np.int64),
        )
        return keys, values, rows

    def check(self, wanted: Sequence[Row], *, seed: int, groups: Sequence[int] | None = None) -> None:
        """Rows computed together equal rows computed alone."""
        out = self.attend(wanted, seed=seed, groups=groups)
        assert np.array_equal(out, self.alone[[row.position for row in wanted]])


WINDOWS = [(HEADS[0], window) for window in (1, 2, 7, PAGE - 1, PAGE, PAGE + 1, 70, 3 * PAGE)]
TEXTS = [*((heads, None) for heads in HEADS), *WINDOWS, (HEADS[1], 40), (HEADS[4], 100)]


@pytest.fixture(scope="module", params=TEXTS, ids=str)
def text(request: pytest.FixtureRequest) -> Text:
    """A text of a few pages and a bit, seen whole or through a window."""
    heads, window = request.param
    return Text(5 * PAGE + 7, *heads, window=window)


def test_attend_one_to_64_rows_in_line(text: Text) -> None:
    for count in range(1, 65):
        first = (count * 11) % (text.length - count + 1)
        text.check([Row(position) for position in range(first, first + count)], seed=count)


def test_attend_rows_in_any_order_and_twice(text: Text) -> None:
    rng = random.Random(0)
    for seed in range(20):
        text.check([Row(rng.randrange(text.length)) for _ in range(rng.randint(1, 20))], seed=seed)


def test_attend_any_grouping(text: Text) -> None:
    rng = random.Random(1)
    wanted = [Row(position) for position in range(40, 72)]
    for seed in range(20):
        cuts = sorted(rng.sample(range(1, len(wanted)), rng.randint(0, 10)))
        text.check(wanted, seed=seed, groups=[0, *cuts, len(wanted)])


def test_attend_chain_equals_tail(text: Text) -> None:
    """The same keys through the block table, or named one by one, from none of them to all."""
    for position in (0, 1, 5, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, text.length - 1):
        for num_tail in {0, 1, 2, 3, 5, 17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 3, position, position + 1}:
            if num_tail <= position + 1:
                text.check([Row(position, num_tail)], seed=num_tail)


def test_attend_tree_rows_beside_chain_rows(text: Text) -> None:
    rng = random.Random(2)
    for seed in range(40):
        base = rng.randrange(text.length - 20)
        wanted = [Row(base), *(Row(base + depth, rng.randint(0, depth)) for depth in rng.choices(range(1, 20), k=12))]
        cuts = sorted(rng.sample(range(1, len(wanted)), rng.randint(0, 3)))
        text.check(wanted, seed=seed, groups=[0, *cuts, len(wanted)])


def test_attend_is_close_to_the_slow_twin(text: Text) -> None:
    wanted = [Row(0), Row(31), Row(32), Row(100, 3), Row(text.length - 1, 40)]
    keys, values, rows = text.lay_out(wanted, random.Random(3), [0, 2, len(wanted)])
    out = text.attend(wanted, seed=3, groups=[0, 2, len(wanted)])
    for index, row in enumerate(wanted):
        seen = reference.read_slots(keys, values, reference.slots_seen(rows, index, PAGE, text.window))
        assert len(seen[0]) == min(row.position + 1, text.window or text.length)
        expected = reference.attend(text.queries[row.position], *seen)
        np.testing.assert_allclose(out[index], expected, rtol=1e-5, atol=1e-6)


def test_attend_with_scores_far_apart() -> None:
    """A score that drowns all others: no overflow, no NaN, and the same bits in a tail."""
    text = Text(50, 2, 1, 16)
    text.queries *= 200
    text.alone = np.concatenate([text.attend([Row(position)], seed=0) for position in range(text.length)])
    assert np.isfinite(text.alone).all()
    text.check([Row(position, position // 2) for position in range(20, 50)], seed=1)


def test_a_window_as_long_as_the_text_is_none() -> None:
    whole, windowed = Text(3 * PAGE + 5, 4, 2, 16), Text(3 * PAGE + 5, 4, 2, 16, window=3 * PAGE + 5)
    assert np.array_equal(whole.alone, windowed.alone)
    shorter = Text(3 * PAGE + 5, 4, 2, 16, window=3 * PAGE + 4)
    differing = (whole.alone != shorter.alone).any(axis=(1, 2))
    assert list(np.flatnonzero(differing)) == [3 * PAGE + 4], "only the last row has a position behind its window"


def test_copy_slots_in_order() -> None:
    """A later copy may read what an earlier one wrote over, as it would in a loop by hand."""
    keys, values = draws(2, 3, 2, 16, PAGE), draws(2, 3, 2, PAGE, 16, seed=1)
    sources, targets = [40, 42, 70, 41], [39, 40, 41, 5]
    expected_keys, expected_values = keys.copy(), values.copy()
    for source, target in zip(sources, targets, strict=True):
        expected_keys[:, target // PAGE, :, :, target % PAGE] = expected_keys[:, source // PAGE, :, :, source % PAGE]
        expected_values[:, target // PAGE, :, target % PAGE] = expected_values[:, source // PAGE, :, source % PAGE]
    cpu_attention.copy_slots(keys, values, np.array(sources, np.int32), np.array(targets, np.int32))
    assert np.array_equal(keys, expected_keys)
    assert np.array_equal(values, expected_values)


# Linear layers.

SHAPES = [(64, 64), (304, 64), (48, 16), (960, 576), (576, 1536), (64, 2048), (33, 100), (300, 48)]


def padded(x: Floats) -> Floats:
    """The rows as a decoder hands them over: one, or a multiple of four whose rest is padding."""
    rows = np.full((CpuKernels(num_threads=1).padded_rows(len(x)), x.shape[1]), np.nan, np.float32)
    rows[: len(x)] = x
    return rows


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_linear(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, x = draws(num_out, num_in), draws(70, num_in, seed=1)
    bias = draws(num_out, seed=2) if has_bias else None
    linear = Linear.pack(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias))
    whole = linear(padded(x))[:70]
    assert whole.shape == (70, num_out)
    for first, last in row_ranges(70):
        part = linear(padded(x[first:last]))[: last - first]
        assert np.array_equal(part, whole[first:last]), f"rows {first} to {last}"
    np.testing.assert_allclose(whole, reference.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_linear_of_many_rows() -> None:
    linear, x = Linear.pack(torch.from_numpy(draws(32, 64))), draws(777, 64, seed=1)
    whole = linear(padded(x))
    for count in (255, 256, 257, 511, 513, 777):
        assert np.array_equal(linear(padded(x[:count]))[:count], whole[:count])
        assert np.array_equal(linear(padded(x[777 - count :]))[:count], whole[777 - count : 777])


def bytes_times_steps(num_out: int, num_in: int, *, seed: int = 0) -> Floats:
    """A weight as it comes out of a Q8_0 file: whole numbers up to 127 times a step for each 32, in half precision."""
    rng = np.random.default_rng(seed)
    steps = (rng.random((num_out, num_in // 32, 1)) * 0.01).astype(np.float16).astype(np.float32)
    numbers = rng.integers(-127, 128, (num_out, num_in // 32, 32)).astype(np.float32)
    numbers[:, :, 7] = 127 * rng.choice([-1, 1], numbers.shape[:2])
    steps[1], numbers[2, 0] = 0, 0  # whole outputs, and single blocks, may be nothing
    weight: Floats = (steps * numbers).reshape(num_out, num_in) + np.float32(0)  # no zero has a sign in such a file
    return weight


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (33, 32), (304, 576), (16, 1536)])
def test_a_weight_that_bytes_hold_gives_the_bits_of_its_floats(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, x = bytes_times_steps(num_out, num_in), draws(70, num_in, seed=1)
    bias = torch.from_numpy(draws(num_out, seed=2)) if has_bias else None
    held = Linear.pack(torch.from_numpy(weight), bias)
    assert held.panels.dtype == np.int8
    assert held.num_bytes < 0.35 * weight.nbytes + 4 * 16 * num_in
    with_one_float = np.concatenate([weight, np.full((1, num_in), 1 / 3, np.float32)])
    with_one_float[-1, 0] = 1 / 7  # a row that no byte and step can say, so all of it is held as floats
    bias_too = None if bias is None else torch.cat([bias, torch.zeros(1)])
    floats = Linear.pack(torch.from_numpy(with_one_float), bias_too)
    assert floats.panels.dtype == np.float32
    for first, last in [*row_ranges(20), (0, 70), (1, 70)]:
        rows = padded(x[first:last])
        count = last - first
        assert np.array_equal(held(rows)[:count], floats(rows)[:count, :num_out])
    expected = reference.linear(x, weight, None if bias is None else bias.numpy())
    np.testing.assert_allclose(held(padded(x))[:70], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e-3, 3e38, 1e-45])
def test_one_number_that_is_no_byte_leaves_a_weight_as_it_is(value: float) -> None:
    weight = bytes_times_steps(64, 64)
    weight[41, 50] = value
    assert Linear.pack(torch.from_numpy(weight)).panels.dtype == np.float32


def test_linear_on_two_threads() -> None:
    linear, x = Linear.pack(torch.from_numpy(draws(608, 64))), padded(draws(13, 64, seed=1))
    alone = linear(x)
    CpuKernels().take_threads(2)
    assert np.array_equal(linear(x)[:13], alone[:13])

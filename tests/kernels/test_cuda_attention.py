"""Attention on a GPU: a row's bits are the same alone, among others, behind a window and as a node of a tree.

The cache is full of NaN wherever nothing was written, so that a kernel which reads what it should not see fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, PRECISION, draws, needs_gpu, on_host
from understudy.kernels import reference
from understudy.kernels.cuda_attention import SPAN, attend, new_counters
from understudy.kernels.cuda_rows import GROUP_ROWS, PAGE, place_rows
from understudy.kernels.rows import Rows

HEADS = [(4, 2, 16), (9, 3, 64), (2, 2, 32), (32, 8, 128), (14, 2, 64)] if ON_GPU else [(4, 2, 16), (3, 1, 32)]
"""(heads, key heads, head size): the tiny model's, SmolLM2's, one head each, Llama's, Qwen2's"""
WINDOWS = [(HEADS[0], window) for window in (1, 7, SPAN // 2, SPAN, SPAN + 1)]
LENGTH = 2 * SPAN + 9


@dataclass(frozen=True)
class Row:
    """A row by its position; the last `num_tail` keys it sees are named slot by slot."""

    position: int
    num_tail: int = 0


class Text:
    """Keys, values and queries of a text, by position, and attention over them from any place in a cache."""

    def __init__(self, length: int, heads: int, kv_heads: int, dim: int, *, window: int | None = None) -> None:
        self.length = length
        self.window = window
        self.keys = draws(length, kv_heads, dim)
        self.values = draws(length, kv_heads, dim, seed=1)
        self.queries = draws(length, heads, dim, seed=2)
        self.alone: dict[int, Tensor] = {}
        self.counters = new_counters(DEVICE)

    def attend(self, wanted: Sequence[Row], *, seed: int, cuts: Sequence[int] = (), **options: bool) -> Tensor:
        """Compute these rows together, with pages in an order and tails in places that the seed draws."""
        keys, values, rows = self.lay_out(wanted, random.Random(seed), cuts)
        queries = self.queries[[row.position for row in wanted]].contiguous()
        return attend(
            queries, keys, values, place_rows(rows, DEVICE), counters=self.counters, window=self.window, **options
        )

    def lay_out(self, wanted: Sequence[Row], rng: random.Random, cuts: Sequence[int]) -> tuple[Tensor, Tensor, Rows]:
        """Put the text into a cache: its pages in any order, and for each row a tail of its own, scattered."""
        num_pages = -(-self.length // PAGE)
        num_blocks = num_pages + -(-sum(row.num_tail for row in wanted) // PAGE) + 2
        blocks = rng.sample(range(num_blocks), num_blocks)
        table, spare = blocks[:num_pages], blocks[num_pages:]
        free = [block * PAGE + offset for block in spare for offset in range(PAGE)]
        rng.shuffle(free)
        written = [
            (position, table[position // PAGE] * PAGE + position % PAGE)
            for position in range(max(row.position + 1 - row.num_tail for row in wanted))
        ]
        tails = [
            [(position, free.pop()) for position in range(row.position + 1 - row.num_tail, row.position + 1)]
            for row in wanted
        ]
        written += [pair for tail in tails for pair in tail]
        positions, slots = (torch.tensor(line, dtype=torch.long, device=DEVICE) for line in zip(*written, strict=True))
        shape = (num_blocks, self.keys.shape[1], PAGE, self.keys.shape[2])
        keys, values = (torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE) for _ in range(2))
        keys[slots // PAGE, :, slots % PAGE] = self.keys[positions]
        values[slots // PAGE, :, slots % PAGE] = self.values[positions]
        starts = sorted({*range(0, len(wanted), GROUP_ROWS), *cuts, len(wanted)})
        rows = Rows(
            token_ids=np.zeros(len(wanted), np.int64),
            positions=np.array([row.position for row in wanted], np.int32),
            slots=np.zeros(len(wanted), np.int32),
            tables=np.array([[0] * num_pages, table], np.int32),
            group_starts=np.array(starts, np.int32),
            group_tables=np.full(len(starts) - 1, 1, np.int32),
            prefix_lens=np.array([row.position + 1 - row.num_tail for row in wanted], np.int32),
            tail_starts=np.cumsum([0, *(row.num_tail for row in wanted)]).astype(np.int32),
            tail_slots=np.array([slot for tail in tails for _, slot in tail], np.int32),
            logit_rows=np.zeros(0, np.int64),
        )
        return keys, values, rows

    def row_alone(self, position: int) -> Tensor:
        """A row computed by itself, in line."""
        if position not in self.alone:
            self.alone[position] = self.attend([Row(position)], seed=0, spans_apart=True)[0]
        return self.alone[position]

    def check(self, wanted: Sequence[Row], *, seed: int, cuts: Sequence[int] = ()) -> None:
        """Rows computed together equal rows computed alone, with their spans apart or not."""
        expected = torch.stack([self.row_alone(row.position) for row in wanted])
        assert torch.isfinite(expected).all()
        for spans_apart in (False, True):
            found = self.attend(wanted, seed=seed, cuts=cuts, spans_apart=spans_apart)
            assert not self.counters.any()
            assert torch.equal(found, expected), f"{wanted}, spans apart: {spans_apart}"


@pytest.fixture(scope="module", params=[*((heads, None) for heads in HEADS), *WINDOWS], ids=str)
def text(request: pytest.FixtureRequest) -> Text:
    heads, window = request.param
    return Text(LENGTH, *heads, window=window)


def test_rows_in_line(text: Text) -> None:
    for count in (1, 2, 3, 4, 5, 8, 9, 33, 256) if ON_GPU else (1, 6):
        first = (count * 11) % (text.length - count + 1)
        text.check([Row(position) for position in range(first, first + count)], seed=count)


def test_rows_where_spans_end(text: Text) -> None:
    edges = [
        edge + near for edge in (SPAN, 2 * SPAN, text.length - 1) for near in (-1, 0, 1) if edge + near < text.length
    ]
    text.check([Row(position) for position in (0, *edges)], seed=1)


def test_a_tail_equals_a_line(text: Text) -> None:
    positions = (0, 1, PAGE, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN - 1, LENGTH - 1) if ON_GPU else (1, SPAN + 1)
    for position in positions:
        for num_tail in {1, 2, 5, PAGE + 1, SPAN + 1, position + 1} if ON_GPU else {1, SPAN + 1, position + 1}:
            if num_tail <= position + 1:
                text.check([Row(position, num_tail)], seed=num_tail)


def test_tree_rows_beside_chain_rows(text: Text) -> None:
    rng = random.Random(2)
    for seed in range(30 if ON_GPU else 2):
        base = rng.randrange(SPAN - 30, text.length - 20)
        wanted = [Row(base), *(Row(base + depth, rng.randint(0, depth)) for depth in rng.choices(range(1, 20), k=7))]
        text.check(wanted, seed=seed, cuts=rng.sample(range(1, len(wanted)), 2))


def test_close_to_the_slow_twin(text: Text) -> None:
    wanted = [Row(0), Row(31), Row(SPAN + 30, 3), Row(text.length - 1, 40), Row(text.length - 1)]
    found = on_host(text.attend(wanted, seed=3))
    for index, row in enumerate(wanted):
        seen = slice(max(0, row.position + 1 - (text.window or text.length)), row.position + 1)
        queries = on_host(text.queries[row.position]) / text.queries.shape[2] ** 0.5
        expected = reference.attend(queries, on_host(text.keys[seen]), on_host(text.values[seen]))
        np.testing.assert_allclose(found[index], expected, rtol=0, atol=4 * PRECISION)


def test_scores_far_apart() -> None:
    """A score that drowns all others: no overflow, no NaN, and the same bits in a tail."""
    text = Text(SPAN + 20, 2, 1, 16)
    text.queries *= 200
    text.check([Row(position, position // 2) for position in range(SPAN - 2, SPAN + 3)], seed=1)


@pytest.mark.gpu
@needs_gpu
def test_a_long_text() -> None:
    text = Text(5000, 32, 8, 128)
    text.check([Row(4000 + 7 * depth, depth % 5) for depth in range(64)], seed=1)

"""Rows name the right tokens, positions, slots and ancestors, whatever the trees and however blocks lie."""

from __future__ import annotations

import random

import numpy as np
import pytest

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kernels import reference
from understudy.kernels.rows import Rows
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work, build_rows

PAGE = 32


def random_draft(rng: random.Random, most_nodes: int) -> Draft:
    count = rng.randint(0, most_nodes)
    parents = tuple(rng.choice((ROOT, node - 1, rng.randint(ROOT, node - 1))) for node in range(count))
    return Draft(tuple(rng.randrange(1000) for _ in range(count)), parents, (1.0,) * count, ("x",) * count)


def random_works(rng: random.Random) -> list[Work]:
    pool = BlockPool(64)
    rng.shuffle(pool._free)
    works = []
    for _ in range(rng.randint(1, 5)):
        cache = SequenceCache(pool, PAGE, None, "")
        length, num_known = rng.randint(0, 100), rng.choice((1, 1, 1, rng.randint(1, 50)))
        draft = random_draft(rng, 20)
        assert cache.reserve(length)
        cache.commit(length, [])
        assert cache.reserve(num_known + len(draft))
        wants_logits = bool(len(draft)) or rng.random() < 0.7
        works.append(Work(cache, [rng.randrange(1000) for _ in range(num_known)], draft, wants_logits))
    return works


def slot_at(cache: SequenceCache, position: int) -> int:
    return cache.blocks[position // PAGE] * PAGE + position % PAGE


def check_known(rows: Rows, first: int, work: Work) -> None:
    for offset, token in enumerate(work.known):
        row, position = first + offset, work.cache.length + offset
        assert rows.token_ids[row] == token
        assert rows.positions[row] == position
        assert rows.slots[row] == slot_at(work.cache, position)
        assert reference.slots_seen(rows, row, PAGE) == [slot_at(work.cache, p) for p in range(position + 1)]


def check_drafted(rows: Rows, first: int, work: Work) -> None:
    """A node sees the text, then its ancestors and itself by depth, wherever they were written, and nobody else."""
    num_known = len(work.known)
    text = [slot_at(work.cache, position) for position in range(work.cache.length + num_known)]
    for node, token in enumerate(work.draft.tokens):
        row, path = first + num_known + node, work.draft.path(node)
        assert rows.token_ids[row] == token
        assert rows.positions[row] == len(text) + len(path) - 1
        assert rows.slots[row] == work.cache.slot(num_known + node)
        assert reference.slots_seen(rows, row, PAGE) == text + [work.cache.slot(num_known + n) for n in path]


@pytest.mark.parametrize("seed", range(60))
def test_rows_name_their_tokens_positions_slots_and_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    works = random_works(rng)
    rows = build_rows(works, heads_per_kv_head=rng.choice((1, 3, 7)))
    first = 0
    logit_rows: list[int] = []
    for work in works:
        check_known(rows, first, work)
        check_drafted(rows, first, work)
        last = first + len(work.known) + len(work.draft)
        logit_rows += range(first + len(work.known) - 1, last) if work.wants_logits else ()
        first = last
    assert first == len(rows.token_ids) == len(rows.slots) == rows.group_starts[-1]
    assert rows.logit_rows.tolist() == logit_rows
    assert len(set(rows.slots.tolist())) == first, "two rows are written to one slot"


@pytest.mark.parametrize("seed", range(10))
def test_groups_cover_every_row_once_and_hold_one_sequence_each(seed: int) -> None:
    works = random_works(random.Random(seed))
    rows = build_rows(works, heads_per_kv_head=3)
    assert rows.group_starts[0] == 0
    assert (np.diff(rows.group_starts) > 0).all()
    sizes = np.diff(rows.group_starts)
    covered = [int(sizes[rows.group_tables == index].sum()) for index in range(len(works))]
    assert covered == [len(work.known) + len(work.draft) for work in works]


def test_long_contexts_come_in_smaller_groups() -> None:
    def longest_group(length: int) -> int:
        cache = SequenceCache(BlockPool(4096), PAGE, None, "")
        assert cache.reserve(length + 64)
        cache.length = length
        rows = build_rows([Work(cache, [0] * 64, EMPTY, wants_logits=False)], heads_per_kv_head=3)
        return int(np.diff(rows.group_starts).max())

    sizes = [longest_group(length) for length in (0, 10_000, 100_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 1


def test_chain_needs_no_list_of_ancestors() -> None:
    cache = SequenceCache(BlockPool(8), PAGE, None, "")
    assert cache.reserve(40)
    cache.length = 30
    chain = Draft.chain(range(5), confidence=[1.0] * 5, source="x")
    rows = build_rows([Work(cache, [1], chain, wants_logits=True)], heads_per_kv_head=1)
    assert rows.tail_slots.size == 0
    assert rows.prefix_lens.tolist() == [31, 32, 33, 34, 35, 36]


def test_one_row_by_itself_sees_what_it_saw_among_the_others() -> None:
    works = random_works(random.Random(3))
    rows = build_rows(works, heads_per_kv_head=3)
    for row in range(len(rows.token_ids)):
        alone = rows.only(row)
        assert alone.token_ids.tolist() == [rows.token_ids[row]]
        assert alone.positions.tolist() == [rows.positions[row]]
        assert alone.slots.tolist() == [rows.slots[row]]
        assert reference.slots_seen(alone, 0, PAGE) == reference.slots_seen(rows, row, PAGE)
        assert alone.logit_rows.tolist() == ([0] if row in rows.logit_rows else [])

"""A sequence's cache is a length and a list of blocks; rollback is setting a length."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from understudy.core.draft import ROOT, Draft
from understudy.kernels import cpu_attention
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import PrefixCache
from understudy.kv.sequence import SequenceCache

PAGE = 4
TEXT = list(range(100, 200))


class Room:
    """A pool, a prefix cache and sequences in it."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixCache(self.pool, PAGE)
        self.caches: list[SequenceCache] = []

    def sequence(self, tenant: str = "") -> SequenceCache:
        self.caches.append(SequenceCache(self.pool, PAGE, self.prefix, tenant))
        return self.caches[-1]

    def written(self, num_tokens: int, *, tokens: Sequence[int] = TEXT, tenant: str = "") -> SequenceCache:
        """A sequence that has committed the first tokens of a text."""
        cache = self.sequence(tenant)
        cache.adopt_prefix(tokens[:num_tokens])
        assert cache.reserve(num_tokens - cache.length)
        cache.commit(num_tokens - cache.length, tokens)
        return cache

    def check(self) -> None:
        self.pool.check([self.prefix.blocks(), *(cache.blocks for cache in self.caches)])


@pytest.mark.parametrize(("rows", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3)])
def test_reserve_holds_whole_blocks(rows: int, blocks: int) -> None:
    cache = Room().sequence()
    assert cache.reserve(rows)
    assert len(cache.blocks) == blocks
    assert cache.length == 0


def test_reserve_that_fails_holds_nothing_more_than_before() -> None:
    room = Room(4)
    other = room.written(5)
    cache = room.sequence("other tenant")
    assert cache.reserve(3)
    before = list(cache.blocks)
    assert not cache.reserve(30)
    assert cache.blocks == before
    room.check()
    assert cache.reserve(8), "what is left can still be had"
    assert other.length == 5
    room.check()


def test_reserve_again_is_no_second_reservation() -> None:
    room = Room()
    cache = room.sequence()
    assert cache.reserve(6)
    held = list(cache.blocks)
    assert cache.reserve(6)
    assert cache.reserve(2)
    assert cache.blocks == held


def test_slots_follow_the_block_table() -> None:
    room = Room()
    cache = room.written(6)
    assert cache.reserve(7)
    slots = [cache.slot(row) for row in range(7)]
    positions = range(6, 13)
    assert slots == [cache.blocks[position // PAGE] * PAGE + position % PAGE for position in positions]
    assert len(set(slots)) == 7


def test_commit_lets_go_of_what_lies_behind() -> None:
    room = Room()
    cache = room.sequence()
    assert cache.reserve(16)
    cache.commit(5, TEXT)
    assert cache.length == 5
    assert len(cache.blocks) == 2
    assert room.pool.num_available == 6
    room.check()


def test_commit_of_nothing_rolls_everything_back() -> None:
    room = Room()
    cache = room.written(5)
    blocks = list(cache.blocks)
    assert cache.reserve(9)
    cache.commit(0, TEXT)
    assert (cache.length, cache.blocks) == (5, blocks)
    room.check()


def test_release_gives_everything_back_and_starts_anew() -> None:
    room = Room()
    cache = room.written(10)
    cache.release()
    assert (cache.length, cache.blocks) == (0, [])
    assert room.pool.num_available == 8
    assert cache.adopt_prefix(TEXT[:10]) == 8, "its own committed blocks are found again"
    room.check()


@pytest.mark.parametrize(
    ("prompt", "adopted"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12), (50, 12)]
)
def test_adopting_leaves_at_least_one_token_to_compute(prompt: int, adopted: int) -> None:
    room = Room()
    room.written(14)
    cache = room.sequence()
    assert cache.adopt_prefix(TEXT[:prompt]) == adopted
    assert cache.length == adopted
    assert adopted < prompt
    room.check()


def test_adopted_blocks_are_shared_and_what_follows_is_not() -> None:
    room = Room()
    first = room.written(10)
    second = room.sequence()
    second.adopt_prefix(TEXT[:10])
    assert second.blocks == first.blocks[:2]
    assert second.reserve(2)
    assert second.blocks[2] not in first.blocks
    room.check()


def test_nothing_is_adopted_from_another_tenant_or_without_a_prefix_cache() -> None:
    room = Room()
    room.written(14, tenant="ann")
    assert room.sequence("bob").adopt_prefix(TEXT) == 0
    assert SequenceCache(room.pool, PAGE, None, "ann").adopt_prefix(TEXT) == 0


def test_only_whole_committed_blocks_enter_the_prefix_cache() -> None:
    room = Room()
    cache = room.sequence()
    assert cache.reserve(12)
    cache.commit(3, TEXT)
    assert room.prefix.blocks() == []
    assert cache.reserve(9)
    cache.commit(4, TEXT)
    assert room.prefix.blocks() == cache.blocks[:1]
    assert cache.reserve(9)
    cache.commit(1, TEXT)
    assert sorted(room.prefix.blocks()) == sorted(cache.blocks[:2])
    room.check()


def test_two_that_compute_the_same_text_end_up_sharing_it() -> None:
    room = Room()
    caches = [room.sequence(), room.sequence()]
    for cache in caches:  # both begin before either has committed
        assert cache.adopt_prefix(TEXT[:9]) == 0
        assert cache.reserve(9)
    for cache in caches:
        cache.commit(9, TEXT)
    assert caches[0].blocks[:2] == caches[1].blocks[:2]
    assert caches[0].blocks[2] != caches[1].blocks[2]
    assert room.pool.num_available == 4
    room.check()


def test_shared_blocks_outlive_the_one_that_wrote_them() -> None:
    room = Room(3)
    first = room.written(8)
    second = room.sequence()
    second.adopt_prefix(TEXT[:9])
    first.release()
    assert room.pool.take() is not None
    assert room.pool.take() is None, "the second still holds the other two"
    assert second.length == 8


def in_line(num_known: int, draft: Draft, path: list[int]) -> tuple[list[int], list[int]]:
    cache = SequenceCache(BlockPool(64), PAGE, None, "")
    assert cache.reserve(3)
    cache.commit(3, TEXT)
    assert cache.reserve(num_known + len(draft))
    return cache.keep(num_known, path)


def test_accepted_chain_needs_no_copy() -> None:
    draft = Draft.chain([1, 2, 3], confidence=[1.0] * 3, source="x")
    assert in_line(2, draft, [0, 1, 2]) == ([], [])
    assert in_line(2, draft, []) == ([], [])


def random_tree(rng: random.Random) -> Draft:
    count = rng.randint(1, 20)
    parents = tuple(rng.randint(ROOT, node - 1) for node in range(count))
    return Draft(tuple(range(count)), parents, (1.0,) * count, ("x",) * count)


def test_copies_bring_any_path_of_a_tree_in_line() -> None:
    """Number every row in a real cache, copy, and read the accepted ones back in their order."""
    rng = random.Random(3)
    page = cpu_attention.PAGE
    num_moved = 0
    for _ in range(200):
        draft = random_tree(rng)
        cache = SequenceCache(BlockPool(6), page, None, "")
        random.Random(rng.random()).shuffle(cache._pool._free)
        cache.reserve(start := rng.randint(0, 70))
        cache.commit(start, TEXT)
        num_known = rng.randint(1, 5)
        assert cache.reserve(num_known + len(draft))
        keys = np.full((1, 6, 1, 16, page), -1.0, np.float32)
        values = np.full((1, 6, 1, page, 16), -1.0, np.float32)
        for row in range(num_known + len(draft)):
            slot = cache.slot(row)
            keys[0, slot // page, 0, :, slot % page] = values[0, slot // page, 0, slot % page] = row
        path = list(draft.path(rng.randrange(len(draft))))
        sources, targets = cache.keep(num_known, path)
        if sources:
            cpu_attention.copy_slots(keys, values, np.array(sources, np.int32), np.array(targets, np.int32))
        wanted = [*range(num_known), *(num_known + node for node in path)]
        slots = [cache.slot(row) for row in range(len(wanted))]
        assert [keys[0, slot // page, 0, 0, slot % page] for slot in slots] == wanted
        assert [values[0, slot // page, 0, slot % page, 0] for slot in slots] == wanted
        num_moved += len(sources)
    assert num_moved > 100


def test_random_lives_add_up() -> None:
    rng = random.Random(5)
    room = Room(12)
    for _ in range(6):
        room.sequence(rng.choice(("", "ann")))
    text = [rng.randrange(2) for _ in range(60)]
    for _ in range(2000):
        cache = rng.choice(room.caches)
        if not cache.blocks and not cache.length:
            cache.adopt_prefix(text[: rng.randint(1, 60)])
        rows = rng.randint(0, 9)
        if cache.length + rows <= len(text) and rng.random() < 0.8:
            if cache.reserve(rows):
                cache.commit(rng.randint(0, rows), text)
        else:
            cache.release()
        room.check()
        assert len(cache.blocks) == -(-cache.length // PAGE)

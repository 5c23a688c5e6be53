"""Blocks are handed out once, counted by reference, and every leak is found."""

from __future__ import annotations

import random

import pytest

from understudy.kv.pool import BlockPool


def test_hands_out_every_block_once_and_then_none() -> None:
    pool = BlockPool(4)
    assert sorted(pool.take() for _ in range(4)) == [0, 1, 2, 3]  # type: ignore[type-var]
    assert pool.take() is None
    assert pool.num_available == 0


def test_block_is_free_when_its_last_reference_is_given_back() -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert block == 0
    pool.share(block)
    pool.share(block)
    assert pool.references(block) == 3
    pool.release(block)
    pool.release(block)
    assert pool.take() is None
    pool.release(block)
    assert pool.num_available == 1
    assert pool.take() == block


def test_free_block_can_be_neither_shared_nor_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.share(0)
    with pytest.raises(AssertionError):
        pool.release(0)


def test_asks_for_cached_blocks_only_when_none_is_free() -> None:
    pool = BlockPool(2)
    held = [pool.take(), pool.take()]
    asked = []

    def reclaim() -> bool:
        asked.append(len(asked))
        pool.drop(0)
        return True

    pool.reclaim = reclaim
    pool.keep(0)
    assert pool.num_available == 0
    pool.release(0)
    assert pool.num_available == 1
    assert pool.take() == 0
    assert asked == [0]
    assert held == [0, 1]


def test_check_passes_for_honest_owners() -> None:
    pool = BlockPool(5)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.share(first)
    pool.check([[first, second], [first]])


@pytest.mark.parametrize(
    "owners",
    [
        [],  # nobody owns what was taken: a leak
        [[0]],  # one owner forgot to say so
        [[0], [0], [0]],  # one owner too many
        [[0, 1], [0]],  # a free block is claimed
        [[0, 0, 2]],
    ],
)
def test_check_finds_what_does_not_add_up(owners: list[list[int]]) -> None:
    pool = BlockPool(3)
    assert pool.take() == 0
    pool.share(0)
    pool.check([[0], [0]])
    with pytest.raises(AssertionError):
        pool.check(owners)


def test_check_finds_a_lost_free_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check([])


def test_check_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(3)
    pool._free.append(0)
    with pytest.raises(AssertionError):
        pool.check([])


def test_random_use_adds_up() -> None:
    rng = random.Random(0)
    pool = BlockPool(8)
    owners: list[list[int]] = [[] for _ in range(4)]
    for _ in range(2000):
        owner = rng.choice(owners)
        action = rng.randrange(3)
        if action == 0:
            block = pool.take()
            assert (block is None) == (len({b for blocks in owners for b in blocks}) == 8)
            owner += [] if block is None else [block]
        elif action == 1 and any(owners):
            block = rng.choice([b for blocks in owners for b in blocks])
            pool.share(block)
            owner.append(block)
        elif owner:
            pool.release(owner.pop(rng.randrange(len(owner))))
        pool.check(owners)

"""Committed blocks are found again by the same text of the same tenant, and the oldest leaf goes first."""

from __future__ import annotations

import random

import pytest

from understudy.kv import prefix as prefix_module
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import Node, PrefixCache

PAGE = 4


class Shelf:
    """A prefix cache over a small pool, and what a sequence would do with it."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, PAGE)

    def put(self, tokens: list[int], tenant: str = "") -> None:
        """Commit whole pages of a text and let go of them."""
        node = self.cache.root(tenant)
        held = []
        for page in pages(tokens):
            block = self.pool.take()
            assert block is not None
            node = self.cache.insert(node, page, block)
            if node.block != block:  # as a sequence does: take the kept one in place of one's own
                self.pool.share(node.block)
                self.pool.release(block)
            held.append(node.block)
        self.give_back(held)

    def find(self, tokens: list[int], tenant: str = "", *, limit: int | None = None) -> list[int]:
        """The blocks of the longest cached prefix, held by the caller."""
        return [node.block for node in self.cache.find(tenant, tokens, len(tokens) if limit is None else limit)]

    def num_found(self, tokens: list[int], tenant: str = "") -> int:
        """How many pages are cached; nothing is held."""
        found = self.find(tokens, tenant)
        self.give_back(found)
        return len(found)

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.release(block)

    def check(self, *held: list[int]) -> None:
        self.pool.check([self.cache.blocks(), *held])


def pages(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + PAGE]) for start in range(0, len(tokens) - PAGE + 1, PAGE)]


A, B, C = list(range(4)), list(range(10, 14)), list(range(20, 24))


def test_finds_the_longest_prefix_in_whole_pages() -> None:
    shelf = Shelf()
    shelf.put(A + B + C)
    assert shelf.num_found(A) == 1
    assert shelf.num_found(A + B) == 2
    assert shelf.num_found(A + B + C) == 3
    assert shelf.num_found([*A, *B, 20, 21, 22]) == 2, "part of a page is no page"
    assert shelf.num_found(A + C) == 1
    assert shelf.num_found(B) == 0, "a page is known by what is before it"
    shelf.check()


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_finds_no_more_than_the_limit(limit: int, found: int) -> None:
    shelf = Shelf()
    shelf.put(A + B + C)
    assert len(shelf.find(A + B + C, limit=limit)) == found


def test_same_page_behind_another_text_is_another_block() -> None:
    shelf = Shelf()
    shelf.put(A + C)
    shelf.put(B + C)
    assert shelf.find(A + C)[1] != shelf.find(B + C)[1]


def test_found_blocks_are_held_until_they_are_given_back() -> None:
    shelf = Shelf()
    shelf.put(A + B)
    held = shelf.find(A + B)
    assert [shelf.pool.references(block) for block in held] == [2, 2]
    shelf.check(held)
    shelf.give_back(held)
    shelf.check()


def test_tenants_are_apart() -> None:
    shelf = Shelf()
    shelf.put(A + B, "ann")
    assert shelf.num_found(A + B, "bob") == 0
    assert shelf.num_found(A + B, "") == 0
    shelf.put(A + B, "bob")
    assert shelf.num_found(A + B, "ann") == 2
    assert set(shelf.find(A + B, "ann")).isdisjoint(shelf.find(A + B, "bob"))


def test_text_that_is_kept_already_is_kept_once() -> None:
    shelf = Shelf()
    shelf.put(A + B)
    shelf.put(A + B)
    shelf.put(A + C)
    assert len(shelf.cache.blocks()) == 3
    assert shelf.pool.num_available == 8
    shelf.check()


def test_reclaims_the_least_recently_used_leaf_first() -> None:
    shelf = Shelf(4)
    shelf.put(A + B)
    shelf.put(C)
    assert shelf.num_found(A + B) == 2  # used now, so C is the oldest
    taken = [shelf.pool.take() for _ in range(2)]
    assert None not in taken
    assert shelf.num_found(C) == 0
    assert shelf.num_found(A + B) == 2


def test_reclaims_leaves_before_their_parents() -> None:
    shelf = Shelf(3)
    shelf.put(A + B + C)
    for left in (2, 1, 0):
        assert shelf.pool.take() is not None
        assert shelf.num_found(A + B + C) == left
    assert shelf.pool.take() is None


def test_looking_up_a_parent_alone_does_not_strand_its_children() -> None:
    """However a tree is used, everything that nobody holds can be reclaimed, one block at a time."""
    shelf = Shelf(5)
    shelf.put(A + B + C)
    shelf.put(A + C)
    for text in (A, A + C, A + B, A):
        shelf.num_found(text)
    assert all(shelf.pool.take() is not None for _ in range(5))
    assert shelf.cache.blocks() == []


def test_block_in_use_is_never_reclaimed() -> None:
    shelf = Shelf(3)
    shelf.put(A + B)
    held = shelf.find(A)
    assert shelf.pool.num_available == 2
    assert shelf.pool.take() is not None
    assert shelf.pool.take() is not None
    assert shelf.pool.take() is None
    assert shelf.find(A) == held


def test_number_available_is_what_can_be_taken() -> None:
    rng = random.Random(1)
    for _ in range(50):
        shelf = Shelf(12)
        for _ in range(rng.randint(0, 4)):
            shelf.put([token for page in rng.choices((A, B, C), k=rng.randint(1, 2)) for token in page])
        if rng.random() < 0.5:
            shelf.find(A + B)
        available = shelf.pool.num_available
        assert sum(shelf.pool.take() is not None for _ in range(13)) == available


def test_idle_tenants_are_forgotten_and_busy_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module, "_MOST_TENANTS", 3)
    shelf = Shelf()
    shelf.put(A, "busy")
    for number in range(20):
        shelf.cache.root(f"idle-{number}")
    assert len(shelf.cache._roots) <= 4
    assert shelf.num_found(A, "busy") == 1


class SlowTwin:
    """The same rules over plain lists: texts as tuples of pages, the least recently used first."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def put(self, tenant: str, tokens: list[int]) -> None:
        whole = tuple(pages(tokens))
        for length in range(1, len(whole) + 1):
            if (tenant, whole[:length]) not in self.entries:
                self.entries.append((tenant, whole[:length]))
                for ancestor in range(length - 1, 0, -1):
                    self._refresh((tenant, whole[:ancestor]))

    def find(self, tenant: str, tokens: list[int]) -> int:
        whole = tuple(pages(tokens))
        found = 0
        while found < len(whole) and (tenant, whole[: found + 1]) in self.entries:
            found += 1
        for length in range(found, 0, -1):
            self._refresh((tenant, whole[:length]))
        return found

    def drop(self) -> None:
        """Drop the oldest entry that begins no other."""
        for tenant, path in self.entries:
            if not any(t == tenant and other[:-1] == path for t, other in self.entries):
                self.entries.remove((tenant, path))
                return

    def _refresh(self, entry: tuple[str, tuple[tuple[int, ...], ...]]) -> None:
        self.entries.remove(entry)
        self.entries.append(entry)


def texts_in(cache: PrefixCache) -> set[tuple[str, tuple[tuple[int, ...], ...]]]:
    names = {id(root): tenant for tenant, root in cache._roots.items()}

    def path_of(node: Node) -> tuple[str, tuple[tuple[int, ...], ...]]:
        path: list[tuple[int, ...]] = []
        while node.parent is not None:
            path.append(node.tokens)
            node = node.parent
        return names[id(node)], tuple(reversed(path))

    return {path_of(node) for node in cache._nodes.values()}


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    shelf, twin = Shelf(6), SlowTwin()
    for _ in range(300):
        tenant = rng.choice(("", "ann"))
        text = [token for page in rng.choices((A, B, C), k=rng.randint(1, 3)) for token in page]
        if rng.random() < 0.5:
            assert shelf.num_found(text, tenant) == twin.find(tenant, text)
        elif all((tenant, tuple(pages(text))[:n]) not in twin.entries for n in range(1, 4)):
            while len(twin.entries) + len(pages(text)) > 6:  # the pool drops one when it must
                twin.drop()
            shelf.put(text, tenant)
            twin.put(tenant, text)
        assert texts_in(shelf.cache) == set(twin.entries)
        shelf.check()

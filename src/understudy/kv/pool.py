"""Blocks of the cache, counted by reference.

Some are kept for texts to come (`keep`). One that is kept and that nobody else refers to is idle: it can be handed out
again. How many are idle is asked for with every text that wants to begin, so it is counted along, never looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block numbers. A block is free when nobody refers to it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # the last one freed goes first: its memory is still warm
        self.reclaim: Callable[[], bool] = lambda: False
        """Asked when no block is free: lets go of one idle block, or returns False."""
        self._is_kept = bytearray(num_blocks)
        self._num_idle = 0

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out, kept ones that nobody uses among them."""
        return len(self._free) + self._num_idle

    def take(self) -> int | None:
        """Return a block with one reference, or None if all are in use."""
        if not self._free and not self.reclaim():
            return None
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use."""
        assert self._references[block] > 0
        self._num_idle -= self.is_idle(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back."""
        assert self._references[block] > 0
        self._references[block] -= 1
        self._num_idle += self.is_idle(block)
        if not self._references[block]:
            self._free.append(block)

    def keep(self, block: int) -> None:
        """Add the reference of whoever keeps a block that is in use for texts to come."""
        assert not self._is_kept[block]
        self.share(block)
        self._is_kept[block] = True

    def drop(self, block: int) -> None:
        """Give back the reference of whoever kept a block."""
        assert self._is_kept[block]
        self._num_idle -= self.is_idle(block)
        self._is_kept[block] = False
        self.release(block)

    def is_idle(self, block: int) -> bool:
        """Whether a block is kept, and nobody uses it."""
        return self._references[block] == 1 and bool(self._is_kept[block])

    def references(self, block: int) -> int:
        """How many refer to a block."""
        return self._references[block]

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Compare the counts with those who claim to refer: every reference has an owner, every free block none."""
        claimed = Counter(block for blocks in owners for block in blocks)
        for block, count in enumerate(self._references):
            assert count == claimed[block], f"block {block}: {count} references, {claimed[block]} owners"
        assert self._num_idle == sum(map(self.is_idle, range(self.num_blocks)))
        assert sorted(self._free) == [block for block, count in enumerate(self._references) if not count]

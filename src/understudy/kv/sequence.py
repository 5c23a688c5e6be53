"""The cache of one sequence: a length and a list of blocks. Whatever lies beyond the length is garbage.

positions   0 ....................... length - 1 | length ... length + reserved - 1
            committed, equal to a fresh prefill  | rows of this step: known tokens, then drafted ones
rollback    is setting the length
a tree      leaves its accepted rows where they were written; `keep` says which slots to copy together
"""

from __future__ import annotations

from collections.abc import Sequence

from understudy.kv.pool import BlockPool
from understudy.kv.prefix import PrefixCache


class SequenceCache:
    """Blocks and committed length of one sequence."""

    def __init__(self, pool: BlockPool, page_tokens: int, prefix: PrefixCache | None, tenant: str) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._prefix = prefix
        self._tenant = tenant
        self._node = prefix.root(tenant) if prefix else None
        self._num_cached_blocks = 0  # blocks, from the front, that the prefix cache knows
        self.blocks: list[int] = []
        self.length = 0

    def adopt_prefix(self, tokens: Sequence[int]) -> int:
        """Start from the longest cached prefix that leaves at least one token to compute; return its length."""
        assert not self.blocks
        assert not self.length
        if self._prefix is None:
            return 0
        nodes = self._prefix.find(self._tenant, tokens, len(tokens) - 1)
        if nodes:
            self.blocks = [node.block for node in nodes]
            self._node = nodes[-1]
            self._num_cached_blocks = len(nodes)
            self.length = len(nodes) * self._page_tokens
        return self.length

    def reserve(self, num_rows: int) -> bool:
        """Make room for rows beyond the length; on failure nothing more is held than before."""
        held = len(self.blocks)
        if self.length + num_rows <= held * self._page_tokens:
            return True
        wanted = -(-(self.length + num_rows) // self._page_tokens)
        while len(self.blocks) < wanted:
            block = self._pool.take()
            if block is None:
                self._shrink(held)
                return False
            self.blocks.append(block)
        return True

    def slot(self, row: int) -> int:
        """Where row number `row` beyond the length is written."""
        block, offset = divmod(self.length + row, self._page_tokens)
        return self.blocks[block] * self._page_tokens + offset

    def slots(self, count: int) -> list[int]:
        """Where the first `count` rows beyond the length are written."""
        size = self._page_tokens
        found: list[int] = []
        position, end = self.length, self.length + count
        while position < end:
            block, offset = divmod(position, size)
            length = min(size - offset, end - position)
            first = self.blocks[block] * size + offset
            found.extend(range(first, first + length))
            position += length
        return found

    def keep(self, num_known: int, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (sources, targets): the copies that bring an accepted path in line behind `num_known` rows.

        Node n of the draft was written at row num_known + n. Nodes of a path ascend and never lie before their
        place in it, so copying in order overwrites nothing that is still needed.
        """
        moves = [(node, place) for place, node in enumerate(path) if node != place]
        return [self.slot(num_known + node) for node, _ in moves], [self.slot(num_known + place) for _, place in moves]

    def commit(self, num_rows: int, tokens: Sequence[int]) -> None:
        """Take the first `num_rows` rows beyond the length into the text `tokens`; let go of all behind them."""
        self.length += num_rows
        if len(self.blocks) * self._page_tokens >= self.length + self._page_tokens:
            self._shrink(-(-self.length // self._page_tokens))
        if self._prefix is None or self._node is None:
            return
        for index in range(self._num_cached_blocks, self.length // self._page_tokens):
            start = index * self._page_tokens
            page = tuple(tokens[start : start + self._page_tokens])
            self._node = self._prefix.insert(self._node, page, self.blocks[index])
            if self._node.block != self.blocks[index]:
                self._pool.share(self._node.block)
                self._pool.release(self.blocks[index])
                self.blocks[index] = self._node.block
            self._num_cached_blocks = index + 1

    def release(self) -> None:
        """Give everything back; the sequence may start again from nothing."""
        self._shrink(0)
        self.length = 0
        self._num_cached_blocks = 0
        self._node = self._prefix.root(self._tenant) if self._prefix else None

    def _shrink(self, num_blocks: int) -> None:
        while len(self.blocks) > num_blocks:
            self._pool.release(self.blocks.pop())

"""Keys and values of a trained draft's own layers: pages that texts take as they grow.

A text's keys stand in a line of their own, in the order in which its rows were read. Rows that were never shown have no
key, so a key's place in that line is not its position in the text: it was turned by its position when it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from understudy.kernels.cpu import Cache, CpuKernels
from understudy.models.config import ModelConfig

Ints = NDArray[np.int32]

_FIRST_BLOCKS = 64


class Pages:
    """Blocks of keys and values for all texts; when they run out there are twice as many."""

    def __init__(self, kernels: CpuKernels, config: ModelConfig, *, num_layers: int) -> None:
        self.page_tokens = kernels.page_tokens
        self._kernels = kernels
        self._config = config
        self._num_layers = num_layers
        self.cache = self._new_cache(_FIRST_BLOCKS)
        """To be looked up for every pass: it is another one after it grew."""
        self._free = list(range(_FIRST_BLOCKS))

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def reserve(self, blocks: list[int], num_keys: int) -> None:
        """Give a text blocks until it has room for so many keys."""
        missing = -(-num_keys // self.page_tokens) - len(blocks)
        while missing > len(self._free):
            self._grow()
        blocks.extend(self._free.pop() for _ in range(missing))

    def release(self, blocks: list[int]) -> None:
        """Take all blocks of a text back."""
        self._free.extend(blocks)
        blocks.clear()

    def slots(self, blocks: Sequence[int], first: int, last: int) -> list[int]:
        """Where the keys first .. last - 1 of a text lie."""
        page = self.page_tokens
        return [blocks[key // page] * page + key % page for key in range(first, last)]

    def tables(self, texts: Sequence[Sequence[int]]) -> Ints:
        """The blocks of some texts, [texts, most blocks]."""
        tables = np.zeros((len(texts), max(len(blocks) for blocks in texts)), np.int32)
        for line, blocks in zip(tables, texts, strict=True):
            line[: len(blocks)] = blocks
        return tables

    def _grow(self) -> None:
        old, num_blocks = self.cache, self.cache.keys.shape[1]
        self.cache = self._new_cache(2 * num_blocks)
        self.cache.keys[:, :num_blocks] = old.keys
        self.cache.values[:, :num_blocks] = old.values
        self._free.extend(range(num_blocks, 2 * num_blocks))

    def _new_cache(self, num_blocks: int) -> Cache:
        config = self._config
        return self._kernels.cache(
            num_layers=self._num_layers, num_blocks=num_blocks, num_kv_heads=config.num_kv_heads, dim=config.head_dim
        )

"""One forward pass of the target over the works of a step, and what such a pass costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import EMPTY
from understudy.kernels.rows import Rows
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work, build_rows

Floats = NDArray[np.float32]


class Runner:
    """Owns the target's weights and cache."""

    def __init__(self, decoder: Decoder, *, num_blocks: int, page_tokens: int, row_by_row: bool = False) -> None:
        """Make room for `num_blocks` blocks. `row_by_row` is for machines that fail the self-test, without drafts."""
        self.decoder = decoder
        self.page_tokens = page_tokens
        self.num_blocks = num_blocks
        self._row_by_row = row_by_row
        self.cache = decoder.new_cache(num_blocks)
        self._heads_per_kv_head = decoder.config.num_heads // decoder.config.num_kv_heads

    def forward(self, works: Sequence[Work]) -> list[Floats]:
        """Return for each work the logits [num_logits, vocabulary] of scored rows, root, draft, scouts' leaves."""
        rows = build_rows(works, heads_per_kv_head=self._heads_per_kv_head)
        logits = self._forward_row_by_row(rows) if self._row_by_row else self.decoder.forward(rows, self.cache)
        split: list[Floats] = []
        start = 0
        for work in works:
            stop = start + work.num_logits
            split.append(logits[start:stop])
            start = stop
        return split

    def _forward_row_by_row(self, rows: Rows) -> Floats:
        singles = [rows.only(row) for row in range(len(rows.token_ids))]
        return np.concatenate([self.decoder.forward(single, self.cache) for single in singles])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, in order."""
        self.cache.move(np.array(sources, np.int32), np.array(targets, np.int32))

    def time_step(self, num_rows: int, context: int) -> float:
        """Seconds of one pass over this many rows of a sequence of that length. Only on an idle engine."""
        rows = self._profile_rows(num_rows, context)
        started = time.perf_counter()
        self.decoder.forward(rows, self.cache)
        return time.perf_counter() - started

    def _profile_rows(self, num_rows: int, context: int) -> Rows:
        cache = SequenceCache(BlockPool(self.num_blocks), self.page_tokens, None, "")
        cache.reserve(context + num_rows)
        cache.length = context
        work = Work(cache, [0] * num_rows, EMPTY, wants_logits=False)
        rows = build_rows([work], heads_per_kv_head=self._heads_per_kv_head)
        return replace(rows, logit_rows=np.arange(num_rows))

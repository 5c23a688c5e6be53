"""The rows of one forward pass, as the kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

MOST_PLACES = 1024
"""Rows of one pass whose logits can be wanted on a device that draws: their words have places there."""


class Rows(NamedTuple):
    """R rows of S sequences. Where a key lies (slot) and where it stands in the text (position) are two things.

        a row's keys:   position 0 ........ prefix_len - 1 | prefix_len ............ its own position
        found through:  the sequence's block table         | its tail: a list of slots, one per position

    A chain needs no tail: its drafted keys lie where their positions say. In a tree, siblings share positions but
    not slots, so a node names the slots of its ancestors one by one.
    """

    token_ids: NDArray[np.int64]
    """[R]"""
    positions: Ints
    """[R] the row's place in its text"""
    slots: Ints
    """[R] where the row's own key and value are written: block * PAGE + offset"""
    tables: Ints
    """[S, most blocks] the blocks of each sequence"""
    group_starts: Ints
    """[G + 1] rows group_starts[g] .. group_starts[g + 1] - 1 are of one sequence and share each page that is read"""
    group_tables: Ints
    """[G] the sequence of each group"""
    prefix_lens: Ints
    """[R]"""
    tail_starts: Ints
    """[R + 1] row r's tail is tail_slots[tail_starts[r] : tail_starts[r + 1]]"""
    tail_slots: Ints
    """[all tails]"""
    logit_rows: NDArray[np.int64]
    """[N] the rows whose logits are wanted"""

    def only(self, row: int) -> Rows:
        """One of the rows, by itself; the keys of those before it must be in the cache."""
        group = int(np.searchsorted(self.group_starts, row, side="right")) - 1
        tail = self.tail_slots[self.tail_starts[row] : self.tail_starts[row + 1]]
        return Rows(
            token_ids=self.token_ids[row : row + 1],
            positions=self.positions[row : row + 1],
            slots=self.slots[row : row + 1],
            tables=self.tables,
            group_starts=np.array([0, 1], np.int32),
            group_tables=self.group_tables[group : group + 1],
            prefix_lens=self.prefix_lens[row : row + 1],
            tail_starts=np.array([0, len(tail)], np.int32),
            tail_slots=tail,
            logit_rows=np.zeros(int(np.isin(row, self.logit_rows)), np.int64),
        )


_NONE = np.zeros(0, np.int32)
_START = np.zeros(1, np.int32)
NO_ROWS = Rows(
    token_ids=np.zeros(0, np.int64),
    positions=_NONE,
    slots=_NONE,
    tables=np.zeros((0, 1), np.int32),
    group_starts=_START,
    group_tables=_NONE,
    prefix_lens=_NONE,
    tail_starts=_START,
    tail_slots=_NONE,
    logit_rows=np.zeros(0, np.int64),
)

"""From sequences and their drafts to the rows of one pass: the only place that knows slots and ancestor tables.

A sequence's rows are its known tokens that the cache lacks (a chunk of the prompt, or just the last committed
token), then one row per drafted node. Known rows and the drafted rows that lie in line read their keys through the
block table; a node off that line names the slots of its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from understudy.core.dice import Dice
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kernels.rows import Ints, Rows
from understudy.kv.sequence import SequenceCache

_GROUP_SCORES = 1 << 16
"""Scores that a group of rows may hold at once, so that they stay in a core's second-level cache."""
_GROUP_ROWS = 4
"""Rows that read a page together: few enough that a handful of rows is work for several threads."""


class Work(NamedTuple):
    """What one sequence computes in a step."""

    cache: SequenceCache
    known: Sequence[int]
    """Tokens whose rows come first, the root of the draft last. For -1 - n see `kernels.interface.Passes`."""
    draft: Draft
    wants_logits: bool
    """The known rows reach the end of the text, so the last one and the draft's are sampled from."""
    scouts: Draft = EMPTY
    """Rows beside the draft, from the same root, that are never part of the text; their leaves give logits."""
    scored: range = range(0)
    """Known rows whose logits are wanted besides, because the token that follows each is known: never the root."""
    dice: Dice | None = None
    """How its words are drawn, if a device may draw them by itself."""
    wants_features: bool = False
    """Whether hidden states of its known and drafted rows are wanted: those of `Runner.feature_layers`."""

    @property
    def num_rows(self) -> int:
        """Rows of all kinds."""
        return len(self.known) + len(self.draft) + len(self.scouts)

    @property
    def num_logits(self) -> int:
        """Rows whose logits are wanted: those that are scored; the root, the draft's nodes, the scouts' leaves."""
        if not self.wants_logits:
            return len(self.scored)
        return len(self.scored) + 1 + len(self.draft.tokens) + len(self.scouts.leaves())

    @property
    def is_single(self) -> bool:
        """Whether it is one row that a word is drawn from, as in plain decoding."""
        return len(self.known) == 1 and self.wants_logits and not self.draft.tokens and not self.scouts.tokens


@dataclass(slots=True)
class _Building:
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    group_starts: list[int] = field(default_factory=list)
    group_tables: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    tail_starts: list[int] = field(default_factory=lambda: [0])
    tail_slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    def add(self, token: int, position: int, slot: int, prefix_len: int, tail: Sequence[int]) -> None:
        self.token_ids.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        self.prefix_lens.append(prefix_len)
        self.tail_slots.extend(tail)
        self.tail_starts.append(len(self.tail_slots))

    def starts_of_groups(self, first: int, last: int, most: int) -> list[int]:
        """Where the groups of some rows begin, of so many rows at most; those with tails are groups by themselves."""
        starts: list[int] = []
        has_tail = [self.tail_starts[row + 1] > self.tail_starts[row] for row in range(first, last)]
        for row in range(first, last):
            begins = not starts or row - starts[-1] == most
            if begins or has_tail[row - first] or has_tail[row - 1 - first]:
                starts.append(row)
        return starts


def build_rows(works: Sequence[Work], *, heads_per_kv_head: int, tails_alone: bool = False) -> Rows:
    """Lay out the rows of all sequences, one sequence after the other.

    `tails_alone`: a row with a tail shares a group with nobody, for devices that read tails row by row.
    """
    if all(work.is_single for work in works):
        return _single_rows(works)
    building = _Building()
    for index, work in enumerate(works):
        first = len(building.token_ids)
        _add_known(building, work)
        _add_draft(building, work, work.draft, len(work.known))
        drafted = len(building.token_ids)
        _add_draft(building, work, work.scouts, len(work.known) + len(work.draft))
        last = len(building.token_ids)
        building.logit_rows.extend(first + row for row in work.scored)
        if work.wants_logits:
            building.logit_rows.extend(range(first + len(work.known) - 1, drafted))
            building.logit_rows.extend(drafted + leaf for leaf in work.scouts.leaves())
        step = max(1, min(_GROUP_ROWS, _GROUP_SCORES // (heads_per_kv_head * (work.cache.length + last - first))))
        starts = building.starts_of_groups(first, last, step) if tails_alone else range(first, last, step)
        building.group_starts.extend(starts)
        building.group_tables.extend([index] * len(starts))
    building.group_starts.append(len(building.token_ids))
    return _to_arrays(building, [work.cache.blocks for work in works])


def _add_known(building: _Building, work: Work) -> None:
    first, count = work.cache.length, len(work.known)
    building.token_ids.extend(work.known)
    building.positions.extend(range(first, first + count))
    building.slots.extend(work.cache.slots(count))
    building.prefix_lens.extend(range(first + 1, first + count + 1))
    building.tail_starts.extend([len(building.tail_slots)] * count)


def _add_draft(building: _Building, work: Work, draft: Draft, first_row: int) -> None:
    """Add one row per node, written from `first_row` on.

    A node is in line if it and all its ancestors lie where their positions say.
    """
    if not draft.tokens:
        return
    num_known = len(work.known)
    base = work.cache.length + num_known
    in_line: dict[int, int] = {ROOT: 0}  # node -> drafted keys of its path that the block table reaches
    tails: dict[int, tuple[int, ...]] = {ROOT: ()}  # node -> slots of the rest of its path
    depths = draft.depths()
    for node, token in enumerate(draft.tokens):
        parent, depth = draft.parents[node], depths[node]
        slot = work.cache.slot(first_row + node)
        if not tails[parent] and first_row + node == num_known + depth - 1:
            in_line[node], tails[node] = in_line[parent] + 1, ()
        else:
            in_line[node], tails[node] = in_line[parent], (*tails[parent], slot)
        building.add(token, base + depth - 1, slot, base + in_line[node], tails[node])


def _single_rows(works: Sequence[Work]) -> Rows:
    """One row of each sequence: the pass that comes most often, in as few steps as it needs."""
    count = len(works)
    positions = np.array([work.cache.length for work in works], np.int32)
    return Rows(
        token_ids=np.array([work.known[0] for work in works], np.int64),
        positions=positions,
        slots=np.array([work.cache.slot(0) for work in works], np.int32),
        tables=_tables([work.cache.blocks for work in works]),
        group_starts=np.arange(count + 1, dtype=np.int32),
        group_tables=np.arange(count, dtype=np.int32),
        prefix_lens=positions + 1,
        tail_starts=np.zeros(count + 1, np.int32),
        tail_slots=np.zeros(0, np.int32),
        logit_rows=np.arange(count),
    )


def _tables(blocks: Sequence[Sequence[int]]) -> Ints:
    tables = np.zeros((len(blocks), max(len(line) for line in blocks)), np.int32)
    for index, line in enumerate(blocks):
        tables[index, : len(line)] = line
    return tables


def _to_arrays(building: _Building, blocks: Sequence[Sequence[int]]) -> Rows:
    return Rows(
        token_ids=np.array(building.token_ids, np.int64),
        positions=np.array(building.positions, np.int32),
        slots=np.array(building.slots, np.int32),
        tables=_tables(blocks),
        group_starts=np.array(building.group_starts, np.int32),
        group_tables=np.array(building.group_tables, np.int32),
        prefix_lens=np.array(building.prefix_lens, np.int32),
        tail_starts=np.array(building.tail_starts, np.int32),
        tail_slots=np.array(building.tail_slots, np.int32),
        logit_rows=np.array(building.logit_rows, np.int64),
    )

"""From sequences and their drafts to the rows of one pass: the only place that knows slots and ancestor tables.

A sequence's rows are its known tokens that the cache lacks (a chunk of the prompt, or just the last committed
token), then one row per drafted node. Known rows and the drafted rows that lie in line read their keys through the
block table; a node off that line names the slots of its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kernels.rows import Rows
from understudy.kv.sequence import SequenceCache

_GROUP_SCORES = 1 << 16
"""Scores that a group of rows may hold at once, so that they stay in a core's second-level cache."""
_GROUP_ROWS = 4
"""Rows that read a page together: few enough that a handful of rows is work for several threads."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one sequence computes in a step."""

    cache: SequenceCache
    known: Sequence[int]
    """Tokens whose rows come first; the last one is the root of the draft."""
    draft: Draft
    wants_logits: bool
    """The known rows reach the end of the text, so the last one and the draft's are sampled from."""
    scouts: Draft = EMPTY
    """Rows beside the draft, from the same root, that are never part of the text; their leaves give logits."""
    scored: range = range(0)
    """Known rows whose logits are wanted besides, because the token that follows each is known: never the root."""

    @property
    def num_logits(self) -> int:
        """Rows whose logits are wanted: those that are scored; the root, the draft's nodes, the scouts' leaves."""
        sampled = 1 + len(self.draft) + len(self.scouts.leaves()) if self.wants_logits else 0
        return len(self.scored) + sampled


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


def build_rows(works: Sequence[Work], *, heads_per_kv_head: int) -> Rows:
    """Lay out the rows of all sequences, one sequence after the other."""
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
        starts = range(first, last, step)
        building.group_starts.extend(starts)
        building.group_tables.extend([index] * len(starts))
    building.group_starts.append(len(building.token_ids))
    return _to_arrays(building, [work.cache.blocks for work in works])


def _add_known(building: _Building, work: Work) -> None:
    length = work.cache.length
    for row, token in enumerate(work.known):
        building.add(token, length + row, work.cache.slot(row), length + row + 1, ())


def _add_draft(building: _Building, work: Work, draft: Draft, first_row: int) -> None:
    """Add one row per node, written from `first_row` on.

    A node is in line if it and all its ancestors lie where their positions say.
    """
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


def _to_arrays(building: _Building, blocks: Sequence[Sequence[int]]) -> Rows:
    tables = np.zeros((len(blocks), max(len(line) for line in blocks)), np.int32)
    for index, line in enumerate(blocks):
        tables[index, : len(line)] = line
    return Rows(
        token_ids=np.array(building.token_ids, np.int64),
        positions=np.array(building.positions, np.int32),
        slots=np.array(building.slots, np.int32),
        tables=tables,
        group_starts=np.array(building.group_starts, np.int32),
        group_tables=np.array(building.group_tables, np.int32),
        prefix_lens=np.array(building.prefix_lens, np.int32),
        tail_starts=np.array(building.tail_starts, np.int32),
        tail_slots=np.array(building.tail_slots, np.int32),
        logit_rows=np.array(building.logit_rows, np.int64),
    )

"""From sequences and their drafts to the rows of one pass: the only place that knows slots and ancestor tables.

A sequence's rows are its known tokens that the cache lacks (a chunk of the prompt, or just the last committed
token), then one row per drafted node. Known rows and the drafted rows that lie in line read their keys through the
block table; a node off that line names the slots of its ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, groupby
from operator import attrgetter
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
        num_leaves = len(self.scouts.leaves()) if self.scouts.tokens else 0
        return len(self.scored) + 1 + len(self.draft.tokens) + num_leaves

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

    def add_singles(self, works: Sequence[Work], index: int) -> None:
        """Add rows that a word is drawn from, and that read their keys alone: works from number `index` on.

        All rows of most passes are of this kind, and there may be hundreds.
        """
        count, first = len(works), len(self.token_ids)
        rows, lengths = range(first, first + count), [work.cache.length for work in works]
        self.token_ids.extend([work.known[0] for work in works])
        self.positions.extend(lengths)
        self.slots.extend([work.cache.slot(0) for work in works])
        self.prefix_lens.extend([length + 1 for length in lengths])
        self.tail_starts.extend([len(self.tail_slots)] * count)
        self.logit_rows.extend(rows)
        self.group_starts.extend(rows)
        self.group_tables.extend(range(index, index + count))


class TreeNode(NamedTuple):
    """How the row of one node reads its path; the text before the draft is read through the block table."""

    depth: int
    num_in_line: int
    """Drafted keys of its path that the block table reaches"""
    tail: tuple[int, ...]
    """The other nodes of its path, itself the last, whose slots it names"""


class _Pattern(NamedTuple):
    """The rows of a work in columns: whatever hangs on how many are known and on the parents of drafts alone."""

    positions: tuple[int, ...]
    """From the cache's length on, and so are the next"""
    prefix_lens: tuple[int, ...]
    tails: tuple[int, ...]
    """All tails, one after the other, as rows of the work"""
    tail_ends: tuple[int, ...]
    has_tail: tuple[bool, ...]


def build_rows(works: Sequence[Work], *, heads_per_kv_head: int, tails_alone: bool = False) -> Rows:
    """Lay out the rows of all sequences, one sequence after the other.

    `tails_alone`: a row with a tail shares a group with nobody, for devices that read tails row by row.
    """
    building = _Building()
    index = 0
    for is_single, alike in groupby(works, attrgetter("is_single")):
        group = list(alike)
        if is_single:
            building.add_singles(group, index)
        else:
            for number, work in enumerate(group, index):
                _add_work(building, work, number, heads_per_kv_head, tails_alone=tails_alone)
        index += len(group)
    building.group_starts.append(len(building.token_ids))
    return _to_arrays(building, [work.cache.blocks for work in works])


def _add_work(building: _Building, work: Work, index: int, heads_per_kv_head: int, *, tails_alone: bool) -> None:
    draft, scouts, length = work.draft, work.scouts, work.cache.length
    first, num_known, num_drafted = len(building.token_ids), len(work.known), len(draft.tokens)
    num_rows = num_known + num_drafted + len(scouts.tokens)
    slots = work.cache.slots(num_rows)
    building.token_ids.extend(work.known)
    building.slots.extend(slots)
    step = max(1, min(_GROUP_ROWS, _GROUP_SCORES // (heads_per_kv_head * (length + num_rows))))
    starts: Sequence[int] = range(first, first + num_rows, step)
    tail = len(building.tail_slots)
    if num_rows == num_known:
        building.positions.extend(range(length, length + num_known))
        building.prefix_lens.extend(range(length + 1, length + num_known + 1))
        building.tail_starts.extend([tail] * num_known)
    else:
        pattern = _pattern(num_known, tuple(draft.parents), tuple(scouts.parents))
        building.token_ids.extend(draft.tokens)
        building.token_ids.extend(scouts.tokens)
        building.positions.extend([length + offset for offset in pattern.positions])
        building.prefix_lens.extend([length + offset for offset in pattern.prefix_lens])
        building.tail_slots.extend([slots[row] for row in pattern.tails])
        building.tail_starts.extend([tail + end for end in pattern.tail_ends])
        if tails_alone and pattern.tails:
            starts = [first + row for row in _starts_of_groups(pattern.has_tail, step)]
    if work.scored:
        building.logit_rows.extend(range(first + work.scored.start, first + work.scored.stop))
    if work.wants_logits:
        drafted = first + num_known + num_drafted
        building.logit_rows.extend(range(first + num_known - 1, drafted))
        building.logit_rows.extend([drafted + leaf for leaf in scouts.leaves()])
    building.group_starts.extend(starts)
    building.group_tables.extend([index] * len(starts))


def tree_nodes(parents: Sequence[int], num_before: int) -> list[TreeNode]:
    """The nodes of a draft that is written behind `num_before` rows of another one.

    A node is in line if it and all its ancestors lie where their positions say.
    """
    nodes: list[TreeNode] = []
    for node, parent in enumerate(parents):
        depth, num_in_line, tail = TreeNode(0, 0, ()) if parent == ROOT else nodes[parent]
        if not tail and num_before + node == depth:
            nodes.append(TreeNode(depth + 1, num_in_line + 1, ()))
        else:
            nodes.append(TreeNode(depth + 1, num_in_line, (*tail, node)))
    return nodes


@lru_cache(maxsize=1024)  # most trees of a drafter are alike, and few rows are known before them
def _pattern(num_known: int, draft: tuple[int, ...], scouts: tuple[int, ...]) -> _Pattern:
    # a known row is like a node that lies so much before the root's children
    rows = [(TreeNode(place, place, ()), 0) for place in range(1 - num_known, 1)]
    for parents, num_before in ((draft, 0), (scouts, len(draft))):
        rows += [(node, num_known + num_before) for node in tree_nodes(parents, num_before)]
    nodes = [node for node, _ in rows]
    return _Pattern(
        positions=tuple(num_known - 1 + node.depth for node in nodes),
        prefix_lens=tuple(num_known + node.num_in_line for node in nodes),
        tails=tuple(before + place for node, before in rows for place in node.tail),
        tail_ends=tuple(accumulate(len(node.tail) for node in nodes)),
        has_tail=tuple(bool(node.tail) for node in nodes),
    )


@lru_cache(maxsize=1024)
def _starts_of_groups(has_tail: tuple[bool, ...], most: int) -> tuple[int, ...]:
    """Where the groups of some rows begin, of so many rows at most; those with tails are groups by themselves."""
    starts = [0]
    for row in range(1, len(has_tail)):
        if row - starts[-1] == most or has_tail[row] or has_tail[row - 1]:
            starts.append(row)
    return tuple(starts)


def _tables(blocks: Sequence[Sequence[int]]) -> Ints:
    lengths = [len(line) for line in blocks]
    table = np.zeros((len(lengths), max(lengths)), np.int32)
    table[np.arange(table.shape[1]) < np.array(lengths)[:, None]] = list(chain.from_iterable(blocks))
    return table


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

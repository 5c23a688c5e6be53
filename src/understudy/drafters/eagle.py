"""Drafts with one decoder layer that continues the target's features (models/heads/eagle.py), row after row.

    true row i      fed the fused features at position i; it reads x[i+1] and guesses x[i+2]
    drafted row     fed the state of the row before it, in the place of features that do not exist yet

Keys of true rows are kept; drafted ones lie behind them and are forgotten by not being counted. A true row that is not
the last has nothing to say, so only its key and value are computed. Then one pass for each depth: all texts, and in a
tree the best nodes of that depth. A drafted row attends to the true rows and to its own ancestors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import ROOT, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.packed import Body, PackedFusion, stacked_norms
from understudy.drafters.pages import Pages
from understudy.drafters.seen import PLAIN, WIDTH, SeeingDrafter, Text
from understudy.drafters.tree import Growth, Shape
from understudy.kernels.rows import Rows
from understudy.models.heads.eagle import EagleHead

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(slots=True)
class _Batch:
    """The rows of one pass, as they are gathered."""

    fed: list[Floats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    tails: list[tuple[int, ...]] = field(default_factory=list)
    group_starts: list[int] = field(default_factory=lambda: [0])
    group_tables: list[int] = field(default_factory=list)

    def add(self, fed: Floats, token: int, *, position: int, slot: int, num_seen: int, tail: tuple[int, ...]) -> None:
        """Add a row that sees so many keys in line, then those of its tail."""
        self.fed.append(fed)
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        self.prefix_lens.append(num_seen)
        self.tails.append(tail)

    def close(self, table: int) -> None:
        """All rows since the last call are of one text, which has this place in the tables."""
        self.group_starts.append(len(self.tokens))
        self.group_tables.append(table)

    def rows(self, tables: Ints) -> Rows:
        """The rows as kernels read them."""
        return Rows(
            token_ids=np.array(self.tokens, np.int64),
            positions=np.array(self.positions, np.int32),
            slots=np.array(self.slots, np.int32),
            tables=tables,
            group_starts=np.array(self.group_starts, np.int32),
            group_tables=np.array(self.group_tables, np.int32),
            prefix_lens=np.array(self.prefix_lens, np.int32),
            tail_starts=np.array([0, *accumulate(map(len, self.tails))], np.int32),
            tail_slots=np.array([slot for tail in self.tails for slot in tail], np.int32),
            logit_rows=np.arange(len(self.tokens)),
        )


@dataclass(slots=True, eq=False)
class _Drafting:
    """One text while it is drafted for."""

    text: Text
    growth: Growth
    table: int
    """Its place in the tables of the call."""
    num_rows: int = 0
    """Drafted rows computed so far; their keys stand behind those of true rows."""
    row_of: dict[int, int] = field(default_factory=dict)
    """Nodes of the last pass -> their rows in it"""
    slots_of: dict[int, tuple[int, ...]] = field(default_factory=lambda: {ROOT: ()})
    """Nodes of the last pass -> slots of the drafted keys on their path, their own last"""


class EagleDrafter(SeeingDrafter):
    """One pass per depth."""

    name: ClassVar[str] = "eagle"
    is_one_pass: ClassVar[bool] = False

    def __init__(self, head: EagleHead, body: Body, *, shape: Shape) -> None:
        super().__init__(body, feature_layers=head.spec.feature_layers, shape=shape)
        self._fusion = PackedFusion.pack(head.fusion, body)
        self._input_norms = stacked_norms(head.embedding_norm, head.state_norm)
        self._layer = body.layer(head.attention, head.feed_forward, head.feed_forward_norm)
        self._keys_values = body.linear(head.attention.k, head.attention.v)
        self._output_norm = body.numbers(head.output_norm.weight)
        self._pages = Pages(body.kernels, body.config, num_layers=1)
        self._most_position = body.config.max_positions - 1

    def time_step(self, rows: int, context: int) -> float:
        """Seconds of one pass over so many rows behind a context, children and all."""
        text = Text(num_keys=context)
        self._pages.reserve(text.blocks, context + rows)
        batch = _Batch()
        nothing = np.zeros(self._body.config.hidden_size, np.float32)
        for place, slot in enumerate(self._pages.slots(text.blocks, context, context + rows), context):
            batch.add(nothing, 0, position=place, slot=slot, num_seen=place + 1, tail=())
        batch.close(0)
        started = time.perf_counter()
        _, logits = self._step(batch, self._pages.tables([text.blocks]))
        growth = Growth(PLAIN, Budget(1, 1), shape=self._shape, width=1, source=self.name)
        self._body.children(logits, [growth] * rows)
        seconds = time.perf_counter() - started
        self._release(text)
        return seconds

    def _read(self, texts: Sequence[Text], contexts: Sequence[Context]) -> None:
        """Fuse the features of all unread rows, and write their keys and values."""
        fresh = [(text, context) for text, context in zip(texts, contexts, strict=True) if text.positions]
        if not fresh:
            return
        positions = [position for text, _ in fresh for position in text.positions]
        tokens = [context.tokens[position + 1] for text, context in fresh for position in text.positions]
        counts = [len(text.positions) for text, _ in fresh]
        self._body.take_threads(len(tokens))
        pieces = [text.take() for text, _ in fresh]
        fused = self._fusion(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), self._body)
        slots: list[int] = []
        for (text, _), count, end in zip(fresh, counts, np.cumsum(counts).tolist(), strict=True):
            text.last = fused[end - 1]
            first, text.num_keys = text.num_keys, text.num_keys + count
            self._pages.reserve(text.blocks, text.num_keys)
            slots += self._pages.slots(text.blocks, first, text.num_keys)
        x = self._inputs(fused[: len(tokens)], np.array(tokens, np.int64))
        self._body.inject(
            self._keys_values(x),
            self._pages,
            positions=np.array(positions, np.int32),
            slots=np.array(slots, np.int32),
            layer=0,
        )

    def _draft(self, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow all trees depth by depth, one pass for each."""
        width = 1 if self._shape.num_children == 1 else WIDTH
        drafting: list[_Drafting] = []
        for table, (text, context, budget) in enumerate(zip(texts, contexts, budgets, strict=True)):
            growth = Growth(context, budget, shape=self._shape, width=width, source=self.name)
            self._pages.reserve(text.blocks, text.num_keys + width * min(budget.max_depth, budget.max_rows))
            drafting.append(_Drafting(text, growth, table))
        tables = self._pages.tables([text.blocks for text in texts])
        going, states = drafting, np.empty((0, 0), np.float32)
        started, num_rows, num_passes = time.perf_counter(), 0, 0
        while going:
            batch = _Batch()
            for one in going:
                self._gather(one, states, batch)
            num_rows, num_passes = num_rows + len(batch.tokens), num_passes + 1
            states, logits = self._step(batch, tables)
            found = self._body.children(logits, [one.growth for one in going for _ in one.growth.level])
            for one in going:
                one.growth.add([found[row] for row in one.row_of.values()])
            going = [one for one in going if one.growth.level and one.growth.budget.goes_on(one.growth.best_chain())]
        self._observe(texts, started, num_rows=round(num_rows / num_passes), num_passes=num_passes)
        return [one.growth.draft() for one in drafting]

    def _gather(self, one: _Drafting, states: Floats, batch: _Batch) -> None:
        """Add the rows of a tree's next level: those of its nodes, or at its root the last true row."""
        growth, text, before = one.growth, one.text, one.row_of
        is_chain = self._shape.num_children == 1
        position = min(len(growth.context.tokens) - 2 + growth.depth, self._most_position)
        one.row_of, slots_of = {}, dict(one.slots_of)
        for node in growth.level:
            one.row_of[node] = len(batch.tokens)
            if node == ROOT:
                assert text.last is not None
                (slot,) = self._pages.slots(text.blocks, text.num_keys - 1, text.num_keys)
                batch.add(text.last, growth.token(ROOT), position=position, slot=slot, num_seen=text.num_keys, tail=())
                continue
            key = text.num_keys + one.num_rows
            one.num_rows += 1
            (slot,) = self._pages.slots(text.blocks, key, key + 1)
            tail = (*one.slots_of[growth.parent(node)], slot)
            slots_of[node] = tail
            batch.add(
                states[before[growth.parent(node)]],
                growth.token(node),
                position=position,
                slot=slot,
                num_seen=key + 1 if is_chain else text.num_keys,
                tail=() if is_chain else tail,
            )
        one.slots_of = slots_of
        batch.close(one.table)

    def _step(self, batch: _Batch, tables: Ints) -> tuple[Floats, Floats]:
        """One pass: states [rows, hidden] that the next rows may be fed, and scores [rows, draft ids]."""
        rows, fed = batch.rows(tables), np.stack(batch.fed)
        step = self._body.start(rows, self._pages)
        step.stream[: len(fed)] = fed
        step.behind_norm(self._inputs(fed, rows.token_ids), self._layer, 0, self._body.turns)
        normed = step.norm(self._output_norm)
        return step.stream, self._body.logits(normed, len(fed))

    def _inputs(self, fed: Floats, tokens: NDArray[np.int64]) -> Floats:
        """What attention reads of rows: [norm(embedding) ; norm(fed)]."""
        return self._body.norm_each(np.stack([self._body.embedding[tokens], fed], axis=1), self._input_norms)

    def _release(self, text: Text) -> None:
        self._pages.release(text.blocks)

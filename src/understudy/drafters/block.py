"""Drafts a whole block in one pass (models/heads/block.py), and walks through it word by word.

    context    keys and values that each layer makes of the fused features of all rows shown: kept, written once
    rows       of the block, N for each text; they attend to the context and to all rows of their own block
    walk       depth by depth: the scores of row k, plus a bias by the very word that a node carries

A pass is paid once, however deep the draft; the walk costs a small linear layer for each depth, over the nodes of all
texts. How sure a place is comes from the confidence that was trained for it: the best child has it, and the others what
is left for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.packed import Body, PackedFusion, stacked_norms
from understudy.drafters.pages import Pages
from understudy.drafters.seen import PLAIN, TAUGHT, WIDTH, SeeingDrafter, Text
from understudy.drafters.tree import Child, Growth, Shape
from understudy.kernels.rows import Rows
from understudy.models.heads.block import BlockHead, BlockLayer

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class BlockDrafter(SeeingDrafter):
    """One pass for all depths."""

    name: ClassVar[str] = "block"
    is_one_pass: ClassVar[bool] = True
    trust: ClassVar[float] = TAUGHT

    def __init__(self, head: BlockHead, body: Body, *, shape: Shape) -> None:
        super().__init__(body, feature_layers=head.spec.feature_layers, shape=shape)
        layers = [layer for layer in head.layers if isinstance(layer, BlockLayer)]
        self._fusion = PackedFusion.pack(head.fusion, body)
        self._context_norm = stacked_norms(head.context_norm)
        self._layers = [
            body.layer(one.attention, one.feed_forward, one.feed_forward_norm, one.attention_norm) for one in layers
        ]
        # keys and values of all layers in one: they are made of the same context
        self._injected = body.linear(*(part for one in layers for part in (one.attention.k, one.attention.v)))
        self._output_norm = body.numbers(head.output_norm.weight)
        self._masks = body.numbers(head.mask_embeddings)  # [N, hidden]
        self._markov_in = body.numbers(head.markov_in.weight)  # [draft ids + 1, rank]
        self._markov_out = body.linear(head.markov_out)
        hidden = body.config.hidden_size
        odds = body.numbers(head.confidence_out.weight)[0]
        self._row_odds = odds[:hidden]
        # what the word before adds to the log odds: [draft ids + 1]
        self._word_odds = self._markov_in @ odds[hidden:] + body.numbers(head.confidence_out.bias)
        self._pages = Pages(body.kernels, body.config, num_layers=len(layers))

    def time_step(self, rows: int, context: int) -> float:
        """Seconds of one pass for so many texts of this length, walk and all."""
        text, num_rows = Text(num_keys=context), len(self._masks)
        started = time.perf_counter()
        self._draft([text] * rows, [PLAIN] * rows, [Budget(num_rows, 4 * num_rows)] * rows)
        seconds = time.perf_counter() - started
        self._release(text)
        return seconds

    def _read(self, texts: Sequence[Text], contexts: Sequence[Context]) -> None:
        """Write what the layers make of all unread rows."""
        fresh = [text for text in texts if text.positions]
        if not fresh:
            return
        positions = np.array([position for text in fresh for position in text.positions], np.int32)
        slots: list[int] = []
        for text in fresh:
            first, text.num_keys = text.num_keys, text.num_keys + len(text.positions)
            self._pages.reserve(text.blocks, text.num_keys)
            slots += self._pages.slots(text.blocks, first, text.num_keys)
        self._body.take_threads(len(positions))
        pieces = [text.take() for text in fresh]
        fused = self._fusion(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), self._body)
        context = self._body.norm_each(fused[: len(positions), None], self._context_norm)
        keys_values = self._injected(context).reshape(len(context), len(self._layers), -1)
        for layer in range(len(self._layers)):
            part = np.ascontiguousarray(keys_values[:, layer])
            self._body.inject(part, self._pages, positions=positions, slots=np.array(slots, np.int32), layer=layer)

    def _draft(self, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One pass for the blocks of all texts, then the walk through them."""
        started = time.perf_counter()
        width = 1 if self._shape.num_children == 1 else WIDTH
        growths = [
            Growth(context, budget, shape=self._shape, width=width, source=self.name)
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        depth = min(len(self._masks), max(min(budget.max_depth, budget.max_rows) for budget in budgets))
        hidden = self._compute(texts, contexts)[:, :depth]  # [texts, depth, hidden]
        scores = self._body.logits(hidden.reshape(-1, hidden.shape[2]), len(texts) * depth)
        odds = np.einsum("tdh,h->td", hidden, self._row_odds)  # not `@`: that may wake other threads than ours
        scores = scores.reshape(len(texts), depth, -1)
        for place in range(depth):
            self._walk(growths, scores[:, place], odds[:, place])
        self._observe(texts, started, num_rows=len(texts))
        return [growth.draft() for growth in growths]

    def _walk(self, growths: Sequence[Growth], scores: Floats, odds: Floats) -> None:
        """One depth of all trees, from the scores [texts, draft ids] and log odds [texts] of their rows there."""
        lines = [(text, node) for text, growth in enumerate(growths) for node in growth.level]
        if not lines:
            return
        words = self._body.places[[growths[text].token(node) for text, node in lines]]  # -1 finds the last line
        before = self._body.padded(len(lines), self._markov_in.shape[1])
        before[: len(lines)] = self._markov_in[words]
        texts = [text for text, _ in lines]
        biased = self._markov_out(before)[: len(lines)] + scores[texts]
        log_odds = (odds[texts] + self._word_odds[words]).tolist()
        offered = self._body.children(biased, [growths[text] for text in texts])
        found = iter([_believed(*pair) for pair in zip(offered, log_odds, strict=True)])
        for growth in growths:
            if growth.level:
                growth.add(list(islice(found, len(growth.level))))

    def _compute(self, texts: Sequence[Text], contexts: Sequence[Context]) -> Floats:
        """The blocks of all texts, as the output layer wants them: [texts, N, hidden]."""
        num_texts, (num_rows, hidden) = len(texts), self._masks.shape
        rows = self._rows(texts, contexts)
        step = self._body.start(rows, self._pages)
        blocks = step.stream[: num_texts * num_rows].reshape(num_texts, num_rows, hidden)
        blocks[:] = self._masks
        blocks[:, 0] += self._body.embedding[[context.tokens[-1] for context in contexts]]
        for place, layer in enumerate(self._layers):
            step.layer(layer, place, self._body.turns)
        return step.norm(self._output_norm)[: num_texts * num_rows].reshape(num_texts, num_rows, hidden)

    def _rows(self, texts: Sequence[Text], contexts: Sequence[Context]) -> Rows:
        """N rows for each text, each of which sees the context and the whole block, which lies behind it."""
        num_rows = len(self._masks)
        positions = np.empty((len(texts), num_rows), np.int32)
        slots: list[int] = []
        for place, (text, context) in enumerate(zip(texts, contexts, strict=True)):
            self._pages.reserve(text.blocks, text.num_keys + num_rows)
            slots += self._pages.slots(text.blocks, text.num_keys, text.num_keys + num_rows)
            positions[place] = np.arange(num_rows) + (len(context.tokens) - 1)
        count = len(slots)
        return Rows(
            token_ids=np.zeros(count, np.int64),
            positions=np.minimum(positions.reshape(-1), self._body.config.max_positions - 1),
            slots=np.array(slots, np.int32),
            tables=self._pages.tables([text.blocks for text in texts]),
            group_starts=np.arange(0, count + 1, num_rows, dtype=np.int32),
            group_tables=np.arange(len(texts), dtype=np.int32),
            prefix_lens=np.repeat(np.array([text.num_keys + num_rows for text in texts], np.int32), num_rows),
            tail_starts=np.zeros(count + 1, np.int32),
            tail_slots=np.empty(0, np.int32),
            logit_rows=np.arange(count),
        )

    def _release(self, text: Text) -> None:
        self._pages.release(text.blocks)


def _believed(offered: list[Child], log_odds: float) -> list[Child]:
    """Children with the confidence of their place: that is how likely the best one is right.

    Where it is less than the best one's own, all are believed less, in proportion; where it is more, the others share
    what is left.
    """
    if not offered:
        return offered
    sure = 1.0 / (1.0 + math.exp(-log_odds)) if log_odds > -500.0 else 0.0
    best = offered[0].confidence
    share = sure / best if sure <= best else (1.0 - sure) / (1.0 - best)
    return [Child(offered[0].token, sure), *(Child(token, own * share) for token, own in offered[1:])]

"""Drafts with small heads on the target's last hidden state (models/heads/medusa.py): one for each place ahead.

A head knows nothing of the words that others chose, so all nodes of one depth have the same children.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from understudy.core.draft import Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.packed import Body
from understudy.drafters.seen import PLAIN, SeeingDrafter, Text
from understudy.drafters.tree import Growth, Shape
from understudy.kernels import cpu_drafts
from understudy.kernels.cpu import PackedLinear
from understudy.kernels.interface import NORMED
from understudy.models.heads.medusa import MedusaHead, ResidualBlock

Floats = NDArray[np.float32]


class MedusaDrafter(SeeingDrafter):
    """All heads in one pass."""

    name: ClassVar[str] = "medusa"
    is_one_pass: ClassVar[bool] = True

    def __init__(self, head: MedusaHead, body: Body, *, shape: Shape) -> None:
        super().__init__(body, feature_layers=(NORMED,), shape=shape)
        self._heads: list[list[PackedLinear]] = []
        for blocks in head.heads:
            assert isinstance(blocks, nn.ModuleList)
            self._heads.append([body.linear(block.linear) for block in blocks if isinstance(block, ResidualBlock)])

    def time_step(self, rows: int, context: int) -> float:
        """Seconds of one pass for so many texts, children and all; it does not depend on their length."""
        text = Text(last=np.zeros(self._body.config.hidden_size, np.float32))
        started = time.perf_counter()
        self._draft([text] * rows, [PLAIN] * rows, [Budget(len(self._heads), 4 * len(self._heads))] * rows)
        return time.perf_counter() - started

    def _read(self, texts: Sequence[Text], contexts: Sequence[Context]) -> None:
        """Keep the last row, which is all that is looked at."""
        for text in texts:
            if text.positions:
                text.last = text.take()[-1, 0]

    def _draft(self, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Compute as many heads as the deepest budget has places for."""
        started = time.perf_counter()
        num_heads = min(len(self._heads), max(budget.max_depth for budget in budgets))
        self._body.take_threads(num_heads * len(texts))
        scores = self._scores(np.stack([text.last for text in texts if text.last is not None]), num_heads)
        growths = [
            Growth(context, budget, shape=self._shape, width=budget.max_rows, source=self.name)
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        for lines in scores:
            for growth, offered in zip(growths, self._body.children(lines, growths), strict=True):
                if growth.level:
                    growth.add([offered] * len(growth.level))
        self._observe(texts, started, num_rows=len(texts))
        return [growth.draft() for growth in growths]

    def _scores(self, last: Floats, num_heads: int) -> Floats:
        """[heads, texts, draft ids] from states [texts, hidden]."""
        num_texts, hidden = last.shape
        outputs = np.empty((num_heads, num_texts, hidden), np.float32)
        for head in range(num_heads):
            x = self._body.padded(num_texts, hidden)
            x[:num_texts] = last
            for linear in self._heads[head]:
                cpu_drafts.add_silu(x, linear(x))
            outputs[head] = x[:num_texts]
        scores = self._body.logits(outputs.reshape(-1, hidden), num_heads * num_texts)
        return scores.reshape(num_heads, num_texts, -1)

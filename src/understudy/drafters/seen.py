"""What a trained draft has been shown of each text, and has yet to read.

    text      t0 t1 ... t8 t9      t9 was said last: its row is computed in the next pass
    shown      x  x ...  x         hidden states of the rows up to t8
    read       k  k  k             keys and values that the draft made of some of them

Looking is free: rows are kept as they come and read when a guess is asked for, those of all texts together. Only where
many have piled up are they read at once, because features take ten times the memory of what is made of them. Rows that
were never shown are missing, and nothing attends to them. Where the row before the last word is missing (the drafter
had no say for a while), nothing is guessed until the next pass.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from understudy.control.cost import CostModel, Load
from understudy.core.draft import EMPTY, Draft
from understudy.core.request import SamplingParams
from understudy.drafters.base import Budget, Context
from understudy.drafters.packed import Body
from understudy.drafters.tree import Shape
from understudy.sampling.noise import NoiseKey

Floats = NDArray[np.float32]

MOST_KEPT = 2048
"""Rows of a text that are kept unread: of most texts nobody asks for a guess, and reading a prompt delays its first
word. A small model's keys and values of them take four times the memory."""
TAUGHT = 0.9
"""How far a confidence is believed that was itself trained on how often guesses are right."""
WIDTH = 8
"""Nodes of a tree that are expanded together, at most."""

PLAIN = Context(-1, [0, 0], 1, "", 0.0, NoiseKey(0), SamplingParams())
"""A text of nobody, to measure with."""


@dataclass(slots=True, eq=False)
class Text:
    """What is known of one text."""

    num_seen: int = 0
    """One more than the last position that was shown."""
    unread: list[Floats] = field(default_factory=list)
    """Features [rows, layers, hidden] that nothing was made of yet"""
    positions: list[int] = field(default_factory=list)
    """Of these rows."""
    blocks: list[int] = field(default_factory=list)
    """The pages of its keys."""
    num_keys: int = 0
    """Keys of true rows that are written."""
    last: Floats | None = None
    """What the kind keeps of the last row that was read"""

    def take(self) -> Floats:
        """All unread features in one piece: [rows, layers, hidden]."""
        features = np.empty((len(self.positions), *self.unread[0].shape[1:]), np.float32)  # in this order in memory
        np.concatenate(self.unread, out=features)
        self.unread.clear()
        self.positions.clear()
        return features


class SeeingDrafter(ABC):
    """A drafter that keeps what it is shown; a kind says how rows are read (`_read`) and guessed from (`_draft`)."""

    name: ClassVar[str]
    is_one_pass: ClassVar[bool]
    """Whether a draft takes one pass of its own, however deep it is; otherwise it takes one for each depth."""

    def __init__(self, body: Body, *, feature_layers: tuple[int, ...], shape: Shape) -> None:
        self.feature_layers = feature_layers
        self.cost = CostModel({1: 1e-3})
        """What its passes cost; believed until it is measured."""
        self.reading_share = 1.0
        """What reading one more row takes, as a share of what one more row of a pass does."""
        self._body = body
        self._shape = shape
        self._texts: dict[int, Text] = {}  # by sequence id

    @property
    def num_texts(self) -> int:
        """Texts that something is kept of."""
        return len(self._texts)

    def start(self, context: Context) -> None:  # noqa: B027 (nothing to do, for any kind)
        """Need nothing: what there is to see comes with the first pass."""

    def see(self, context: Context, first: int, features: Floats) -> None:
        """Keep the rows."""
        text = self._texts.setdefault(context.sequence_id, Text())
        text.num_seen = first + len(features)
        text.unread.append(features)
        text.positions.extend(range(first, text.num_seen))
        if len(text.positions) > MOST_KEPT:
            self.read(context)

    def read(self, context: Context) -> None:
        """Read at once what was shown of a text."""
        self._read([self._texts[context.sequence_id]], [context])

    def num_unread(self, context: Context) -> int:
        """Rows that are yet to be read, counted in rows of a pass."""
        text = self._texts.get(context.sequence_id)
        num_rows = len(text.positions) if text else 1
        return 1 + round((num_rows - 1) * self.reading_share) if num_rows > 1 else 1

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft for each context whose last computed row was seen."""
        drafts = [EMPTY] * len(contexts)
        ready = [
            index
            for index, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget.max_rows > 0 and budget.max_depth > 0 and self._has_last(context)
        ]
        if not ready:
            return drafts
        asked = [contexts[index] for index in ready]
        texts = [self._texts[context.sequence_id] for context in asked]
        self._read(texts, asked)
        for index, draft in zip(ready, self._draft(texts, asked, [budgets[index] for index in ready]), strict=True):
            drafts[index] = draft
        return drafts

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a text."""
        text = self._texts.pop(context.sequence_id, None)
        if text is not None:
            self._release(text)

    @abstractmethod
    def time_step(self, rows: int, context: int) -> float:
        """Seconds of one pass for so many texts of this length, for the cost model."""

    def _has_last(self, context: Context) -> bool:
        """Whether the hidden states at the last computed row are at hand."""
        text = self._texts.get(context.sequence_id)
        return text is not None and text.num_seen == len(context.tokens) - 1

    @abstractmethod
    def _read(self, texts: Sequence[Text], contexts: Sequence[Context]) -> None:
        """Make of unread rows what guessing needs."""

    @abstractmethod
    def _draft(self, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Guess for texts that are read."""

    def _release(self, text: Text) -> None:  # noqa: B027 (some kinds hold nothing)
        """Give back what a text holds."""

    def _observe(self, texts: Sequence[Text], started_s: float, *, num_rows: int, num_passes: int = 1) -> None:
        """Let passes of about so many rows, the first of which began at `started_s`, correct the cost model."""
        seconds = (time.perf_counter() - started_s) / num_passes
        keys = sum(text.num_keys for text in texts)
        self.cost.observe(Load(num_rows, keys, round(keys * num_rows / len(texts))), seconds)

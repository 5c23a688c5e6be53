"""A drafter that guesses several words at once from the target's hidden states at the last computed row.

    text        t0 t1 ... t8 t9       t9 was said last: its row is computed in the next pass
    seen         x  x ...  x          hidden states of the rows up to t8
    guesses                     a b c depth 1, 2, 3: what follows t9, from the hidden states at t8 and the text

Its state is lengths: the number of positions it has seen, and the hidden states at the last of them. Rows that were
never shown (a prefix from the cache) cost it nothing, because only the last one is looked at, and that one is computed
in every pass. Where it has not seen the row before the last word (it had no say for a while), it says nothing until the
next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.tree import Guesses, Shape, by_depth, grow

Floats = NDArray[np.float32]


class Head(Protocol):
    """A network that guesses from hidden states."""

    feature_layers: tuple[int, ...]
    """The hidden states that it reads: see `drafters.base.FeatureDrafter`."""
    max_depth: int
    """How far ahead it guesses."""

    def guess(self, features: Floats, texts: Sequence[Sequence[int]], *, depth: int) -> list[list[Guesses]]:
        """Guess for several texts at once.

        features [texts, layers, hidden] at the token before each text's last; texts are never empty. Returns for each
        text its guesses at the next `depth` positions, or at fewer.
        """


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen of one sequence."""

    num_positions: int
    last: Floats
    """[layers, hidden] at the last of them"""


class HeadDrafter:
    """Drafts chains or trees out of one call of a head for all texts."""

    name: ClassVar[str] = "heads"

    def __init__(self, head: Head, *, shape: Shape) -> None:
        self.feature_layers = head.feature_layers
        self._head = head
        self._shape = shape
        self._seen: dict[int, _Seen] = {}  # by sequence id

    def start(self, context: Context) -> None:
        """Need nothing: what there is to see comes with the first pass."""

    def see(self, context: Context, first: int, features: Floats) -> None:
        """Keep the last row."""
        self._seen[context.sequence_id] = _Seen(first + len(features), features[-1].copy())

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One tree for each context whose last computed row was seen."""
        drafts = [EMPTY] * len(contexts)
        ready = [
            index for index, budget in enumerate(budgets) if budget.max_rows > 0 and self._is_read(contexts[index])
        ]
        depth = min(self._head.max_depth, max((budgets[index].max_depth for index in ready), default=0))
        if depth <= 0:
            return drafts
        features = np.stack([self._seen[contexts[index].sequence_id].last for index in ready])
        guesses = self._head.guess(features, [contexts[index].tokens for index in ready], depth=depth)
        for index, found in zip(ready, guesses, strict=True):
            drafts[index] = grow(
                by_depth(found), contexts[index], budgets[index], shape=self._shape, source=self.name
            )  # fmt: skip
        return drafts

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a sequence."""
        self._seen.pop(context.sequence_id, None)

    def _is_read(self, context: Context) -> bool:
        """Whether the hidden states at the last computed row are at hand."""
        seen = self._seen.get(context.sequence_id)
        return seen is not None and seen.num_positions == len(context.tokens) - 1

"""A drafter that keeps all it is shown of the target's hidden states, and compares it with a fresh pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tests.engine.engines import PAGE
from tests.fresh_features import fresh_features
from understudy.assembly import Target
from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context

Floats = NDArray[np.float32]


class Recorder:
    """Keeps all it is shown, and drafts nothing."""

    name: ClassVar[str] = "recorder"

    def __init__(self, *layers: int) -> None:
        self.feature_layers = layers
        self.seen: dict[int, list[tuple[int, Floats]]] = {}
        self.contexts: dict[int, Context] = {}
        self.num_asked = 0
        self.num_behind = 0
        """How often it was asked without having seen the last computed row."""

    def start(self, context: Context) -> None:
        """Need nothing."""

    def see(self, context: Context, first: int, features: Floats) -> None:
        self.contexts[context.sequence_id] = context
        self.seen.setdefault(context.sequence_id, []).append((first, features))

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        for context in contexts:
            self.num_asked += 1
            self.num_behind += self.positions(context)[-1:] != [len(context.tokens) - 2]
        return [EMPTY] * len(contexts)

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget nothing."""

    def positions(self, context: Context) -> list[int]:
        """All that was seen of a text, in order."""
        shown = self.seen.get(context.sequence_id, [])
        return [position for first, features in shown for position in range(first, first + len(features))]

    def check(self, target: Target, *, may_skip: bool) -> None:
        """Everything that was shown is what a fresh pass over the text shows."""
        assert not self.num_behind
        for sequence_id, context in self.contexts.items():
            positions = self.positions(context)
            assert all(after > before for before, after in itertools.pairwise(positions))
            left_out = sorted(set(range(positions[-1])) - set(positions))
            assert may_skip or not left_out
            # a prefix is found in whole blocks
            assert all((place + 1) % PAGE == 0 or place + 1 in left_out for place in left_out)
            whole = fresh_features(target, context.tokens, self.feature_layers)
            shown = np.concatenate([features for _, features in self.seen[sequence_id]])
            assert np.array_equal(shown, whole[positions]), f"of {positions} in {context.tokens}"

"""One draft model for several depths of the same text.

The passes of a draft model are what a replay takes its time for. A chain of a model is the beginning of any longer one
from the same place, since what it guesses depends on the text and not on how far it may go. So all depths of a text are
replayed side by side, whoever has said least first and the deepest of equals first: the chain that the deepest one is
given serves all others that come by the same place.

How much the model reads is told for each depth as if it were alone: after a draft its cache holds the text and all of
its guesses but the last, and what of them came true is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from understudy.control.cost import CostModel
from understudy.control.planning import MOST_READ_ROWS
from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context, PricedDrafter


@dataclass(frozen=True, slots=True)
class _Held:
    """What the model's cache would hold if one depth were alone."""

    num_read: int = 0
    """Tokens of the text."""
    guesses: tuple[int, ...] = ()
    """Those that were computed after them."""

    def num_unread(self, tokens: Sequence[int]) -> int:
        """Tokens to read before the next guess."""
        right = 0
        for guessed, said in zip(self.guesses, tokens[self.num_read :], strict=False):
            if guessed != said:
                break
            right += 1
        return max(1, len(tokens) - self.num_read - right)


class SharedDraft:
    """Stands between a draft model and the depths of a text that are replayed side by side."""

    name: ClassVar[str] = "model"

    def __init__(self, drafter: PricedDrafter) -> None:
        assert drafter.name == self.name, "only a model's chains are known to begin alike"
        self._drafter = drafter
        self._text = -1
        self._texts: dict[int, int] = {}  # sequence -> the text that it is a replay of
        self._held: dict[int, _Held] = {}  # by sequence
        self._place = (-1, -1)  # the text and the length of what was said, where `_chain` was guessed
        self._chain = EMPTY

    @property
    def cost(self) -> CostModel:
        """That of the model's passes."""
        return self._drafter.cost

    def begin(self) -> None:
        """Sequences that start from now on are replays of the next text."""
        self._text += 1

    def start(self, context: Context) -> None:
        """Meet a replay of the present text."""
        self._texts[context.sequence_id] = self._text
        self._held[context.sequence_id] = _Held()

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a replay, and with the first one of a text the text."""
        self._held.pop(context.sequence_id, None)
        text = self._texts.pop(context.sequence_id, None)
        if text is not None:
            self._drafter.stop(replace(context, sequence_id=text), finished=finished)

    def num_unread(self, context: Context) -> int:
        """Tokens that would have to be read if this depth were alone."""
        held = self._held.get(context.sequence_id)
        return len(context.tokens) if held is None else held.num_unread(context.tokens)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """The chain at this place of the text, guessed when the first one asks."""
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        place = self._texts[context.sequence_id], len(context.tokens)
        if place != self._place:
            (self._chain,) = self._drafter.propose([replace(context, sequence_id=place[0])], [budget])
            self._place = place
        reach = min(budget.max_depth, budget.max_rows)
        chain = self._chain.keep(range(min(reach, len(self._chain))))
        held = self._held[context.sequence_id]
        if len(chain):
            held = _Held(len(context.tokens), chain.tokens[:-1])
        else:  # a long text is read in pieces
            held = _Held(min(len(context.tokens), held.num_read + MOST_READ_ROWS))
        self._held[context.sequence_id] = held
        return chain

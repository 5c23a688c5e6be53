"""What a grammar forces: tokens that must come next, whatever the target thinks of them.

A JSON schema writes most of its answer itself: names of properties, colons, the beginnings of enumerated values. Where
only one text can follow, the target would be asked once per token for a word that is certain. Drafted, all of them are
verified in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context


class ForcedDrafter:
    """Drafts the chain of tokens that the grammar of a sequence leaves no choice about."""

    name: ClassVar[str] = "forced"
    is_certain: ClassVar[bool] = True

    def concerns(self, context: Context) -> bool:
        """Whether the sequence has a grammar."""
        return context.forced_tokens is not None

    def start(self, context: Context) -> None:
        """Keep nothing: the grammar knows where it is."""

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget nothing."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one chain for each context, empty where the grammar leaves a choice."""
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        reach = min(budget.max_depth, budget.max_rows)
        if reach <= 0 or context.forced_tokens is None:
            return EMPTY
        tokens = context.forced_tokens()[:reach]
        return Draft.chain(tokens, confidence=[1.0] * len(tokens), source=self.name) if tokens else EMPTY

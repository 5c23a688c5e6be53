"""Parts that are broken on purpose: a proof must not pass them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.ngram import NgramDrafter
from understudy.kv.sequence import SequenceCache
from understudy.sampling.verify import Word


def believing_walk(draft: Draft, sample: Callable[[int], int]) -> Iterator[Word]:
    """Takes the draft's first child for granted: what a lossy verifier would do."""
    node: int | None = ROOT
    while node is not None:
        row = node + 1
        drawn = sample(row)
        child = next((index for index, parent in enumerate(draft.parents) if parent == node), None)
        yield Word(drawn if child is None else draft.tokens[child], row, child)
        node = child


def careless_keep(self: SequenceCache, num_known: int, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Leaves accepted rows where they were written, beside those of rejected branches."""
    return [], []


class SilentDrafter:
    """Never has anything to say."""

    name: ClassVar[str] = "ngram"

    def start(self, context: Context) -> None:
        """Learn nothing."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [EMPTY] * len(contexts)

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget nothing."""


class FailingDrafter(NgramDrafter):
    """Fails after a while."""

    def start(self, context: Context) -> None:
        if context.sequence_id > 3:
            raise RuntimeError("no more")
        super().start(context)

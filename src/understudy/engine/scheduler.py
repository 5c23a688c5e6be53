"""Who computes what in the next step, under one budget of rows and a limited number of blocks.

Sequences that run come first, in order of arrival; each asks for the rows of its known tokens. When blocks run out,
the youngest gives all of its own back and will be computed again: the same words, a little later. Waiting
sequences join while there is room for the whole of their text so far. Drafted rows are not planned here: they take
what is left and are the first to go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from understudy.engine.sequence import Sequence
from understudy.kv.pool import BlockPool


class Share(NamedTuple):
    """The known rows that one sequence computes in a step."""

    sequence: Sequence
    num_known: int
    reaches_end: bool
    """Whether the next word can be drawn after this step's rows."""


class Scheduler:
    """Waiting and running sequences."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        page_tokens: int,
        max_rows: int,
        max_sequences: int,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._max_rows = max_rows
        self._max_sequences = max_sequences
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def plan(self) -> list[Share]:
        """Reserve room for as many known rows as the budget allows, and say whose they are."""
        shares: list[Share] = []
        budget = self._max_rows
        index = 0
        while index < len(self.running):  # `running` shrinks from the end when a sequence is preempted
            sequence = self.running[index]
            num_pending = sequence.num_pending
            num_known = min(num_pending, budget)
            if num_known and self._reserve(sequence, num_known):
                shares.append(Share(sequence, num_known, num_known == num_pending))
                budget -= num_known
            index += 1
        while budget and self.has_joiner:
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            found = 0 if sequence.scores_prompt else sequence.cache.adopt_prefix(sequence.tokens)
            if not sequence.num_preemptions:
                sequence.cached_tokens = found
            num_known = min(sequence.num_pending, budget)
            if not self._reserve(sequence, num_known):
                break
            shares.append(Share(sequence, num_known, num_known == sequence.num_pending))
            budget -= num_known
        return shares

    @property
    def has_joiner(self) -> bool:
        """Whether a waiting sequence could join in the next step, if there are rows for it."""
        return bool(self.waiting) and self._may_join(self.waiting[0])

    def remove(self, sequence: Sequence) -> None:
        """Let go of a sequence that ended."""
        sequence.cache.release()
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _reserve(self, sequence: Sequence, num_rows: int) -> bool:
        """Make room, taking blocks from the youngest; False if the sequence itself had to give way."""
        while not sequence.cache.reserve(num_rows):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.cache.release()
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._on_preempt(sequence)

    def _may_join(self, sequence: Sequence) -> bool:
        """Whether there is room for its text so far and one block more, so that it does not leave at once."""
        wanted = len(sequence.tokens) // self._page_tokens + 1
        return len(self.running) < self._max_sequences and (
            not self.running or wanted + len(self.running) <= self._pool.num_available
        )

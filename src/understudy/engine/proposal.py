"""What was proposed in a step, and what proposing it took."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from understudy.control.classes import Line
from understudy.core.draft import EMPTY, Draft
from understudy.engine.sequence import Sequence

_NO_WORDS: Mapping[int, tuple[int, float]] = MappingProxyType({})


class Proposal(NamedTuple):
    """All that was proposed for one sequence, and the part of it that is verified."""

    drafts: tuple[Draft, ...] = ()
    """What each drafter proposed, as it stated it."""
    bought: Draft = EMPTY
    scouts: Draft = EMPTY
    """Rows that a drafter learns from. They are no draft: whatever they say, they are forgotten after the pass."""
    words: Mapping[int, tuple[int, float]] = _NO_WORDS
    """What stands in the drafts in place of words that nobody had seen, and what it turned out to be."""

    def has_rows(self) -> bool:
        """Whether anything is computed for it."""
        return bool(self.bought.tokens or self.scouts.tokens)

    @property
    def num_rows(self) -> int:
        """What is computed for it."""
        return len(self.bought) + len(self.scouts)

    def with_words(self, words: Mapping[int, tuple[int, float]]) -> Proposal:
        """The same with what was named ahead in its place: at once in what is verified, see `spelled` for the rest."""
        return Proposal(self.drafts, self.bought.with_words(words), self.scouts, words)

    def spelled(self) -> tuple[Draft, ...]:
        """What each drafter proposed, in words."""
        return tuple(draft.with_words(self.words) for draft in self.drafts) if self.words else self.drafts


@dataclass(frozen=True, slots=True)
class Reading:
    """What it took to read texts that a drafter had not read yet, the same for each of them."""

    sequences: Items[Sequence]
    seconds: float
    """Of all together."""


@dataclass(frozen=True, slots=True)
class DraftingTime:
    """What proposing took in one step."""

    spent_s: float = 0.0
    """In all."""
    asked_s: Mapping[str, Mapping[Line, float]] = field(default_factory=dict)
    """Of that, asking, by drafter and line, without what was read."""
    ready_s: float = 0.0
    """When the last guess is expected to be there, by the clock, if nobody waited for it."""
    passes_s: Mapping[str, float] = field(default_factory=dict)
    """Of what asking took, by drafter that costs time, what its passes are expected to take."""
    readings: tuple[Reading, ...] = ()
    """What was read of texts, in this step and for many."""


NO_TIME = DraftingTime()

"""What a race comes to: numbers by workload class and over all prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.core.request import SpeculationCounts
from understudy.race.lanes import Heat, Lane


@dataclass(slots=True)
class Total:
    """All that one side of a race has said, and its time."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the lane's own clock, prompts included."""
        return self.tokens / max(self.seconds, 1e-9)

    def add(self, lane: Lane) -> None:
        """Count a lane that is through."""
        self.tokens += len(lane.token_ids)
        self.seconds += lane.clock_s


@dataclass(slots=True)
class Tally:
    """The sum of some heats."""

    num_prompts: int = 0
    num_different: int = 0
    """Prompts whose two answers are not the same."""
    plain: Total = field(default_factory=Total)
    speculative: Total = field(default_factory=Total)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, heats: Iterable[Heat]) -> Tally:
        """Sum up heats that are through."""
        tally = cls()
        for heat in heats:
            tally.num_prompts += 1
            tally.num_different += not heat.is_same
            tally.plain.add(heat.plain)
            tally.speculative.add(heat.speculative)
            tally.counts.add(heat.speculative.counts)
            tally.accepted_by_drafter.update(heat.speculative.accepted_by_drafter)
        return tally

    @property
    def speed_up(self) -> float:
        """How many times faster the speculative lane was."""
        return self.speculative.tokens_per_s / max(self.plain.tokens_per_s, 1e-9)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that one pass of the target came to, with drafts."""
        return self.speculative.tokens / max(1, self.counts.cycles)

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "prompts": self.num_prompts,
            "tokens": self.plain.tokens,
            "plain_s": round(self.plain.seconds, 3),
            "speculative_s": round(self.speculative.seconds, 3),
            "plain_tokens_per_s": round(self.plain.tokens_per_s, 3),
            "speculative_tokens_per_s": round(self.speculative.tokens_per_s, 3),
            "speed_up": round(self.speed_up, 3),
            "drafted": self.counts.drafted,
            "accepted": self.counts.accepted,
            "accepted_by_drafter": dict(self.accepted_by_drafter),
            "cycles": self.counts.cycles,
            "tokens_per_cycle": round(self.tokens_per_cycle, 3),
            "same_text": self.num_different == 0,
        }


def by_class(heats: Sequence[Heat]) -> dict[str, Tally]:
    """Sum up the heats of each workload class, in the order in which the classes came."""
    names = dict.fromkeys(heat.question.prompt_class for heat in heats)
    return {name: Tally.of(heat for heat in heats if heat.question.prompt_class == name) for name in names}

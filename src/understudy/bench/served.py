"""What one arm did with one unit of work: plain data, whether it came from our engine or over the network.

All times are seconds on the unit's own clock, which starts with the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from understudy.core.events import Cycle
from understudy.core.request import SpeculationCounts

ALL = "all"
"""The class that sums up all others; no prompts may call theirs so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request came to, and when."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """None where a server tells only the text."""
    finish_reason: str | None = None
    num_tokens: int = 0
    arrived_s: float
    """When it was submitted or, in an open loop, when it was due: waiting to be sent is the server's fault."""
    first_s: float | None = None
    """When its first token was there."""
    last_s: float | None = None
    ended_s: float
    counts: SpeculationCounts | None = None
    """None where a server does not tell."""
    error: str | None = None

    @property
    def said(self) -> tuple[str, tuple[int, ...] | None, str | None]:
        """All that must be equal under every arm."""
        return self.text, self.token_ids, self.finish_reason

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else 1000 * (self.first_s - self.arrived_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first; a single token has none."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return 1000 * (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def request_ms(self) -> float:
        """The whole time of the request."""
        return 1000 * (self.ended_s - self.arrived_s)


@dataclass(slots=True)
class StepTime:
    """Where the time of an engine's steps went."""

    num_steps: int = 0
    draft_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    num_keys: int = 0
    """Tokens whose keys and values the passes read: their texts so far, and their own rows."""

    def count(self, cycle: Cycle) -> None:
        """Count one step."""
        self.num_steps += 1
        self.draft_s += cycle.draft_s
        self.forward_s += cycle.forward_s
        self.sample_s += cycle.sample_s
        self.num_keys += cycle.context + cycle.num_rows

    def add(self, other: StepTime) -> None:
        """Count another one's steps as well."""
        self.num_steps += other.num_steps
        self.draft_s += other.draft_s
        self.forward_s += other.forward_s
        self.sample_s += other.sample_s
        self.num_keys += other.num_keys


@dataclass(frozen=True, slots=True)
class Served:
    """The answers of a unit, in the order of its questions."""

    answers: Sequence[Answer]
    steps: StepTime = field(default_factory=StepTime)
    """Nothing in it where a server does not tell."""

    @property
    def said(self) -> list[tuple[str, tuple[int, ...] | None, str | None]]:
        """What each answer said."""
        return [answer.said for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def busy_s(self) -> float:
        """Time during which at least one request was unanswered. A closed loop is busy all the time."""
        return covered_s((answer.arrived_s, answer.ended_s) for answer in self.answers)

    @property
    def errors(self) -> list[str]:
        """What went wrong."""
        return [answer.error for answer in self.answers if answer.error is not None]


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans of time."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered

"""The seam between the engine and whatever proposes tokens ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from understudy.core.draft import Draft
from understudy.sampling.noise import NoiseKey


@dataclass(slots=True)
class Context:
    """What a drafter may know of a sequence. `tokens` only grows: a drafter's state is the length it has read."""

    sequence_id: int
    tokens: list[int]
    """Every committed token, the prompt first. The next token's position is len(tokens)."""
    num_prompt_tokens: int
    tenant: str
    temperature: float
    noise: NoiseKey


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a draft may reach."""

    max_depth: int
    max_rows: int


class Drafter(Protocol):
    """Three calls. A drafter that raises is left out of the step, and is switched off after repeated failures."""

    name: ClassVar[str]

    def start(self, context: Context) -> None:
        """Meet a sequence; its prompt is in `context.tokens`."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one draft for each context, within its budget; an empty one where there is nothing to say."""

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a sequence. `finished`: its answer is whole and may be learned from (not aborted, no error)."""

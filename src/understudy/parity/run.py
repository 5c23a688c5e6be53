"""Serve requests on an engine, and note both what it answered and what happened on the way.

The answer is what must be the same under every setting. What happened on the way (drafts, cache hits, preemptions)
must differ, or the setting has tested nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from understudy.core.events import Cycle, Event, Fallback
from understudy.core.request import FinishReason, Output, Request, SpeculationCounts, TokenLogprob
from understudy.engine.engine import Engine
from understudy.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything a user sees of an answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: tuple[TokenLogprob, ...]
    error: str | None


@dataclass(slots=True)
class Happenings:
    """What an engine did while it answered."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    num_cache_hits: int = 0
    """Requests that found some of their prompt in the prefix cache."""
    cached_tokens: int = 0
    preemptions: int = 0
    most_sequences: int = 0
    """Most sequences in one pass."""
    num_scout_rows: int = 0
    """Rows that a drafter learned from."""
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)
    """Words that a drafter had foreseen, by its name; where several had, by the first of them."""
    fallbacks: list[str] = field(default_factory=list)

    def listen(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Cycle):
            self.most_sequences = max(self.most_sequences, event.num_sequences)
            self.num_scout_rows += event.num_scout_rows
        elif isinstance(event, Fallback):
            self.fallbacks.append(f"{event.what}: {event.reason}")

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that ended."""
        self.counts.add(sequence.counts)
        self.num_cache_hits += sequence.cached_tokens > 0
        self.cached_tokens += sequence.cached_tokens
        self.preemptions += sequence.num_preemptions


def serve(
    engine: Engine,
    requests: Iterable[Request],
    happenings: Happenings,
    *,
    concurrency: int,
    on_answer: Callable[[], None],
) -> dict[str, Answer]:
    """Serve requests of one choice each, at most `concurrency` at once; return the answers by request id."""
    waiting = deque(requests)
    running: dict[str, Sequence] = {}
    outputs: dict[str, list[Output]] = {}
    answers: dict[str, Answer] = {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            request = waiting.popleft()
            (running[request.request_id],) = engine.submit(request)
            outputs[request.request_id] = []
        for output in engine.step():
            outputs[output.request_id].append(output)
            happenings.accepted_by_drafter.update(source for source in output.sources if source)
            if output.finish_reason is not None:
                sequence = running.pop(output.request_id)
                happenings.add(sequence)
                answers[output.request_id] = _answer(sequence, outputs.pop(output.request_id))
                on_answer()
    return answers


def _answer(sequence: Sequence, outputs: list[Output]) -> Answer:
    return Answer(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        num_prompt_tokens=len(sequence.tokens) - sequence.num_generated,
        num_completion_tokens=sequence.num_generated,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        error=outputs[-1].error,
    )

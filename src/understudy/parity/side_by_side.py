"""Speculation off and on, in turn, on the same prompts: the same text, and how fast each was.

What makes it fair: both engines share the weights; runs alternate, so that a disturbance of the machine hits both;
neither keeps a prefix cache; and each repetition has a tenant of its own, so that no drafter has ever seen the answer
that it is about to draft. The time is the whole time of an answer, its prompt included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.assembly import Target, build_engine
from understudy.config import EngineConfig
from understudy.core.events import EventSink, log_fallbacks
from understudy.core.request import Request, SamplingParams, Speculation, SpeculationCounts
from understudy.engine.engine import Engine
from understudy.parity.run import Answer, Happenings, serve

REPETITIONS = 2
_LEAST_ROOM_TOKENS = 2080
"""Room for measuring what context costs, where the prompts themselves are short."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt under a name."""

    name: str
    prompt_ids: tuple[int, ...]


@dataclass(slots=True)
class Side:
    """All runs of one side."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers by the time of all runs."""
        return sum(len(answer.token_ids) for answer in self.answers) / max(self.seconds, 1e-9)


@dataclass(slots=True)
class Comparison:
    """Both sides of one question."""

    question: Question
    off: Side = field(default_factory=Side)
    on: Side = field(default_factory=Side)

    @property
    def same(self) -> bool:
        """Whether all runs of both sides gave the same answer, in every field."""
        return all(answer == self.off.answers[0] for answer in (*self.off.answers, *self.on.answers))

    @property
    def speed_up(self) -> float:
        """How many times faster speculation was."""
        return self.on.tokens_per_s / max(self.off.tokens_per_s, 1e-9)

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "prompt": self.question.name,
            "same": self.same,
            "text": self.off.answers[0].text,
            "tokens": len(self.off.answers[0].token_ids),
            "off_tokens_per_s": round(self.off.tokens_per_s, 3),
            "on_tokens_per_s": round(self.on.tokens_per_s, 3),
            "speed_up": round(self.speed_up, 3),
            "drafted": self.on.counts.drafted,
            "accepted": self.on.counts.accepted,
        }


def side_by_side(
    target: Target,
    questions: Sequence[Question],
    sampling: SamplingParams,
    *,
    drafters: tuple[str, ...],
    draft_tree: int = 1,
    emit: EventSink = log_fallbacks,
    watch: Callable[[str], None] = lambda text: None,
) -> Iterator[Comparison]:
    """Yield each question's comparison as soon as it is there. `sampling` must name its seed."""
    watch("measuring what a row costs")
    off, on = engine_pair(
        target,
        [question.prompt_ids for question in questions],
        max_tokens=sampling.max_tokens,
        drafters=drafters,
        draft_tree=draft_tree,
        emit=emit,
    )
    engines = {"off": off, "on": on}
    for question in questions:
        comparison = Comparison(question)
        sides = {"off": comparison.off, "on": comparison.on}
        for repetition in range(REPETITIONS):
            for name, side in sides.items():
                watch(f"{question.name}: speculation {name}, run {repetition + 1} of {REPETITIONS}")
                request = Request(
                    request_id=f"{question.name}-{name}-{repetition}",
                    prompt_ids=question.prompt_ids,
                    sampling=sampling,
                    speculation=Speculation(enabled=name == "on"),
                    tenant=f"{question.name}-{repetition}",
                    workload_class=question.name,
                )
                _run(engines[name], request, side)
        yield comparison


def engine_pair(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    drafters: tuple[str, ...],
    draft_tree: int = 1,
    emit: EventSink = log_fallbacks,
) -> tuple[Engine, Engine]:
    """Build an engine without and one with drafters, on the same weights, warm, with room for any of the prompts."""
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    room = max(min(longest, target.decoder.config.max_positions), _LEAST_ROOM_TOKENS)
    configs = (
        EngineConfig(drafters=names, draft_tree=draft_tree, prefix_cache=False, kv_tokens=room)
        for names in ((), drafters)
    )
    off, on = (build_engine(target, config, emit=emit) for config in configs)
    warm_up = Request(request_id="warm-up", prompt_ids=prompts[0][:8], sampling=SamplingParams(max_tokens=2))
    for engine in (off, on):  # the first pass of an engine touches its memory: it counts for neither
        _run(engine, warm_up, Side())
    return off, on


def _run(engine: Engine, request: Request, side: Side) -> None:
    happenings = Happenings()
    started = time.perf_counter()
    answers = serve(engine, [request], happenings, concurrency=1, on_answer=lambda: None)
    side.seconds += time.perf_counter() - started
    side.answers.append(answers[request.request_id])
    side.counts.add(happenings.counts)

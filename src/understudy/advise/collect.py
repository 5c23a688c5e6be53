"""Runs a target once over prompts and keeps what it said: all that is needed to score any drafter afterwards.

Words do not depend on drafts or on who shares a pass, so the run is made as fast as it can be: many at once, with
speculation where that pays. Every request has a tenant of its own, so that no drafter has seen the answer that it
drafts, as in `bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from understudy.advise.transcript import Transcript
from understudy.bench.engines import room_tokens
from understudy.bench.workloads import Plan, Question
from understudy.config import DEFAULT_DRAFTERS, EngineConfig
from understudy.core.events import Cycle, Event
from understudy.core.request import Output, Request

if TYPE_CHECKING:
    from understudy.assembly import Target
    from understudy.engine.engine import Engine

Watcher = Callable[[int, int], None]
"""Told how many answers there are and how many are wanted."""


@dataclass(slots=True)
class Collected:
    """What the target said, and what the steps of it took."""

    transcripts: list[Transcript] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    num_wanted: int = 0
    num_failed: int = 0
    """Answers that ended in an error; they are left out."""
    seconds: float = 0.0
    interrupted: bool = False

    def hear(self, event: Event) -> None:
        """Take an event of the engine."""
        if isinstance(event, Cycle):
            self.cycles.append(event)


def collect(
    target: Target,
    questions: Mapping[str, Sequence[Question]],
    *,
    temperatures: Sequence[float] = (0.0,),
    at_once: int = 8,
    budget_s: float,
    watcher: Watcher | None = None,
) -> Collected:
    """Ask the questions of all classes in turn, until all were asked or the time is up; one round is always asked.

    An interruption ends it with what there is.
    """
    from understudy.assembly import build_engine

    plan = Plan(questions=questions, temperatures=temperatures, concurrencies=(at_once,))
    config = EngineConfig(
        drafters=DEFAULT_DRAFTERS,
        weights=target.weights,
        prefix_cache=False,
        kv_tokens=room_tokens(target, plan),
        max_sequences=at_once,
    )
    collected = Collected()
    engine = build_engine(target, config, emit=collected.hear)
    rounds = [_requests(row, temperatures) for row in _in_turn(questions)]
    collected.num_wanted = sum(map(len, rounds))
    started_s = time.monotonic()
    asking = _asking(rounds, lambda: time.monotonic() - started_s < budget_s)
    try:
        _serve(engine, asking, collected, at_once, watcher)
    except KeyboardInterrupt:
        collected.interrupted = True
    collected.seconds = time.monotonic() - started_s
    return collected


def _in_turn(questions: Mapping[str, Sequence[Question]]) -> Iterator[list[Question]]:
    """The first of each class, then the second of each."""
    for row in zip_longest(*questions.values()):
        yield [question for question in row if question is not None]


def _requests(questions: Sequence[Question], temperatures: Sequence[float]) -> list[Request]:
    return [
        Request(
            request_id=f"{question.name} at {temperature:g}",
            prompt_ids=question.prompt_ids,
            sampling=question.sampling(temperature),
            tenant=f"{question.name} at {temperature:g}",
            workload_class=question.prompt.prompt_class,
        )
        for temperature in temperatures
        for question in questions
    ]


def _asking(rounds: Sequence[Sequence[Request]], has_time: Callable[[], bool]) -> Iterator[Request]:
    for number, requests in enumerate(rounds):
        for request in requests:
            if number and not has_time():
                return
            yield request


def _serve(
    engine: Engine, asking: Iterator[Request], collected: Collected, at_once: int, watcher: Watcher | None
) -> None:
    running: dict[str, tuple[Request, list[int], int]] = {}
    while True:
        while len(running) < at_once and (request := next(asking, None)) is not None:
            (sequence,) = engine.submit(request)
            running[request.request_id] = (request, [], sequence.context.noise.seed)
        if not running:
            return
        for output in engine.step():
            running[output.request_id][1].extend(output.token_ids)
            if output.finish_reason is not None:
                _keep(collected, *running.pop(output.request_id), output)
                if watcher is not None:
                    watcher(len(collected.transcripts), collected.num_wanted)


def _keep(collected: Collected, request: Request, answer_ids: list[int], seed: int, last: Output) -> None:
    if last.finish_reason not in ("stop", "length") or not answer_ids:
        collected.num_failed += 1
        return
    collected.transcripts.append(Transcript(request=request, answer_ids=tuple(answer_ids), seed=seed))

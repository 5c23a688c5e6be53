"""An arm that is our own engine, stepped in this thread.

What makes arms comparable: they share the weights; none keeps a prefix cache; and every request of every repetition
has a tenant of its own, so that no drafter has seen the answer that it is about to draft.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from understudy.bench.record import ArmFacts
from understudy.bench.served import Answer, Served, StepTime
from understudy.bench.workloads import Unit
from understudy.core.events import Cycle, Event, Fallback, Notice
from understudy.core.request import Output, Request, Speculation

if TYPE_CHECKING:
    from understudy.engine.engine import Engine
    from understudy.engine.sequence import Sequence as RunningSequence

_WARM_UP_PROMPT_TOKENS = 32
_WARM_UP_TOKENS = 16


@dataclass(slots=True)
class Listener:
    """Hears an engine: what its steps cost, and what a reader of the numbers must know."""

    steps: StepTime = field(default_factory=StepTime)
    notes: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Cycle):
            self.steps.count(event)
        elif isinstance(event, Fallback):
            self.notes.append(f"{event.what}: {event.reason}")
        elif isinstance(event, Notice):
            self.notes.append(f"{event.what}: {event.text}")


@dataclass(slots=True)
class EngineArm:
    """An engine under a name. `listener` is what it emits to."""

    facts: ArmFacts
    engine: Engine
    listener: Listener

    @property
    def name(self) -> str:
        """What a row calls it."""
        return self.facts.name

    def warm_up(self, unit: Unit) -> None:
        """Let the engine touch its memory, and load all that is compiled: drafts are forced, on a text that repeats."""
        question = unit.questions[0]
        start = question.prompt_ids[:_WARM_UP_PROMPT_TOKENS]
        request = Request(
            request_id="warm-up",
            prompt_ids=(*start, *start),
            sampling=replace(question, max_tokens=_WARM_UP_TOKENS).sampling(unit.temperature),
            speculation=Speculation(forced=True),
            tenant="warm-up",
            workload_class="warm-up",
        )
        self.engine.submit(request)
        while self.engine.has_work:
            self.engine.step()

    def serve(self, unit: Unit) -> Served:
        """Answer all questions of a unit."""
        self.listener.steps = StepTime()
        answers = serve(self.engine, unit)
        return Served(answers, self.listener.steps)


@dataclass(slots=True)
class _Running:
    sequence: RunningSequence
    place: int
    arrived_s: float
    outputs: list[Output] = field(default_factory=list)
    first_s: float | None = None


def serve(
    engine: Engine,
    unit: Unit,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[Answer]:
    """Submit what is due, step, and sleep when there is nothing to do; the answers are in the questions' order."""
    requests = [_request(unit, place) for place in range(len(unit.questions))]
    running: dict[str, _Running] = {}
    answers: dict[int, Answer] = {}
    num_sent = 0
    started = clock()
    while len(answers) < len(requests):
        due_s: float | None = None
        while num_sent < len(requests):
            now_s = clock() - started
            due_s = unit.arrivals.due_s(num_sent, now_s=now_s, num_running=len(running))
            if due_s is None or due_s > now_s:
                break
            (sequence,) = engine.submit(requests[num_sent])
            running[requests[num_sent].request_id] = _Running(sequence, num_sent, due_s)
            num_sent += 1
        if running:
            _step(engine, running, answers, lambda: clock() - started)
        else:
            assert due_s is not None, "nothing runs, and nothing will arrive"
            sleep(max(0.0, due_s - (clock() - started)))
    return [answers[place] for place in range(len(requests))]


def _step(engine: Engine, running: dict[str, _Running], answers: dict[int, Answer], now: Callable[[], float]) -> None:
    outputs = engine.step()
    now_s = now()
    for output in outputs:
        request = running[output.request_id]
        request.outputs.append(output)
        if request.first_s is None and output.token_ids:
            request.first_s = now_s
        if output.finish_reason is not None:
            answers[request.place] = _answer(running.pop(output.request_id), now_s)


def _answer(request: _Running, now_s: float) -> Answer:
    last = request.outputs[-1]
    token_ids = tuple(token for output in request.outputs for token in output.token_ids)
    return Answer(
        text="".join(output.text for output in request.outputs),
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        num_tokens=len(token_ids),
        arrived_s=request.arrived_s,
        first_s=request.first_s,
        last_s=now_s,
        ended_s=now_s,
        counts=request.sequence.counts,
        error=last.error,
    )


def _request(unit: Unit, place: int) -> Request:
    question = unit.questions[place]
    return Request(
        request_id=f"unit-{unit.number}-{place}",
        prompt_ids=question.prompt_ids,
        sampling=question.sampling(unit.temperature),
        tenant=f"unit-{unit.number}-{place}",
        workload_class=question.prompt.prompt_class,
    )

"""An arm that is our own engine, stepped in this thread.

What makes arms comparable: they share the weights; none keeps a prefix cache; and every request of every repetition
has a tenant of its own, so that no drafter has seen the answer that it is about to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from understudy.bench.in_step import Serving, serve_in_step
from understudy.bench.record import ArmFacts
from understudy.bench.served import Served, StepTime
from understudy.bench.workloads import Unit
from understudy.core.events import Cycle, Event, Fallback, Notice
from understudy.core.request import Request, Speculation

if TYPE_CHECKING:
    from understudy.engine.engine import Engine

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

    def begin(self, unit: Unit) -> Serving:
        """Begin with a unit, on a clock of its own."""
        self.listener.steps = StepTime()
        requests = [_request(unit, place) for place in range(len(unit.questions))]
        return Serving(self.engine, requests, unit.arrivals)

    def serve(self, unit: Unit) -> Served:
        """Answer all questions of a unit, with nobody in between."""
        return in_step([self], unit)[self.name]


def in_step(arms: Sequence[EngineArm], unit: Unit) -> dict[str, Served]:
    """Let all arms answer a unit side by side, step by step; for engines whose steps leave nothing under way."""
    servings = [arm.begin(unit) for arm in arms]
    serve_in_step(servings)
    return {arm.name: Served(serving.answers, arm.listener.steps) for arm, serving in zip(arms, servings, strict=True)}


def _request(unit: Unit, place: int) -> Request:
    question = unit.questions[place]
    return Request(
        request_id=f"unit-{unit.number}-{place}",
        prompt_ids=question.prompt_ids,
        sampling=question.sampling(unit.temperature),
        tenant=f"unit-{unit.number}-{place}",
        workload_class=question.prompt.prompt_class,
    )

"""Engines that answer the same requests side by side, each on a clock of its own.

Engines that computed at the same time would slow each other down; engines that take turns of seconds see different
machines, since others use the same memory and cores. So they take turns of a few steps: always the one whose clock is
behind, and a clock counts only what its own engine takes. Whatever slows the machine down for longer than that falls on
all of them alike, and two equal engines come to the same time within a percent. After every single step they could not
change: what a small draft reads lies in the processor's cache only if its own engine computed last.

Nobody sleeps until a request arrives: the clock of an engine that has nothing to do is set forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.bench.arrivals import Arrivals
from understudy.bench.served import Answer
from understudy.core.request import Output, Request

if TYPE_CHECKING:
    from understudy.engine.engine import Engine
    from understudy.engine.sequence import Sequence as RunningSequence

SLICE_S = 0.05
"""How much of its own time an engine has before the next one's turn; a step that was begun is ended."""


@dataclass(slots=True)
class _Running:
    sequence: RunningSequence
    place: int
    arrived_s: float
    outputs: list[Output] = field(default_factory=list)
    first_s: float | None = None


class Serving:
    """One engine on its way through some requests."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        arrivals: Arrivals,
        *,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock_s = 0.0
        """What the engine has taken, and has waited for requests to arrive."""
        self._engine = engine
        self._requests = requests
        self._arrivals = arrivals
        self._now = now
        self._num_sent = 0
        self._running: dict[str, _Running] = {}
        self._answers: dict[int, Answer] = {}

    @property
    def is_done(self) -> bool:
        """Whether everything is answered."""
        return len(self._answers) == len(self._requests)

    @property
    def answers(self) -> Sequence[Answer]:
        """In the order of the requests, when all are there."""
        return [self._answers[place] for place in range(len(self._requests))]

    def advance(self) -> None:
        """Submit what is due and make one step; where there is nothing to do, go on to when there is."""
        started = self._now()
        next_s = self._submit()
        if not self._running:
            assert next_s is not None, "nothing runs, and nothing will arrive"
            self.clock_s = max(self.clock_s, next_s)
            return
        outputs = self._engine.step()
        self.clock_s += self._now() - started
        for output in outputs:
            request = self._running[output.request_id]
            request.outputs.append(output)
            if request.first_s is None and output.token_ids:
                request.first_s = self.clock_s
            if output.finish_reason is not None:
                self._answers[request.place] = _answer(self._running.pop(output.request_id), self.clock_s)

    def _submit(self) -> float | None:
        """Give the engine what is due; returns when the next one will be, if that is known."""
        while self._num_sent < len(self._requests):
            due_s = self._arrivals.due_s(self._num_sent, now_s=self.clock_s, num_running=len(self._running))
            if due_s is None or due_s > self.clock_s:
                return due_s
            request = self._requests[self._num_sent]
            (sequence,) = self._engine.submit(request)
            self._running[request.request_id] = _Running(sequence, self._num_sent, due_s)
            self._num_sent += 1
        return None


def serve_in_step(servings: Sequence[Serving]) -> None:
    """Let all come to their end: always the one that is behind, for a slice of its time; of equals, the first."""
    while waiting := [serving for serving in servings if not serving.is_done]:
        serving = min(waiting, key=lambda one: one.clock_s)
        until_s = serving.clock_s + SLICE_S
        while serving.clock_s < until_s and not serving.is_done:
            serving.advance()


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

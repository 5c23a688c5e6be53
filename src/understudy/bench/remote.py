"""An arm that is any server with OpenAI's chat completions, streaming.

A connection is opened before the clock of its request starts in a closed loop, so that the network's handshake is not
taken for the model's time.
"""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.bench.arrivals import Timed
from understudy.bench.record import ArmFacts
from understudy.bench.served import Answer, Served
from understudy.bench.workloads import Question, Unit
from understudy.client import MOST_ERROR_CHARACTERS, REMEDY, Endpoint, RequestFailed, Said, listen
from understudy.errors import ConfigError

_WARM_UP_TOKENS = 2


@dataclass(slots=True)
class RemoteArm:
    """A server under a name."""

    facts: ArmFacts
    endpoint: Endpoint
    model: str
    notes: set[str] = field(default_factory=set)
    """What was unusual about its answers."""
    _leaving: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """What a row calls it."""
        return self.facts.name

    def warm_up(self, unit: Unit) -> None:
        """Ask once, and fail clearly if that does not work."""
        question = replace(unit.questions[0], max_tokens=_WARM_UP_TOKENS)
        answer = self._answer(question, unit.temperature, time.perf_counter(), None)
        if answer.error is not None:
            raise ConfigError(f"{answer.error}.", REMEDY)

    def serve(self, unit: Unit) -> Served:
        """Ask all questions of a unit, each in a thread of its own."""
        started = time.perf_counter()
        due_s = unit.arrivals.times_s if isinstance(unit.arrivals, Timed) else None
        at_once = unit.arrivals.most_at_once or len(unit.questions)
        self._leaving.clear()
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            asked = [
                pool.submit(self._answer, question, unit.temperature, started, due_s[place] if due_s else None)
                for place, question in enumerate(unit.questions)
            ]
            try:
                return Served([future.result() for future in asked])
            except KeyboardInterrupt:  # what is being answered is waited for; nothing more is asked
                self._leaving.set()
                raise

    def _answer(self, question: Question, temperature: float, started: float, due_s: float | None) -> Answer:
        """Ask one question, at its time if it has one."""

        def now() -> float:
            return time.perf_counter() - started

        if self._leaving.wait(max(0.0, (due_s or 0.0) - now())):
            return Answer(arrived_s=now(), ended_s=now(), error="it was not asked any more")

        connection = None
        arrived_s = due_s if due_s is not None else now()
        try:
            connection = self.endpoint.connect()
            arrived_s = due_s if due_s is not None else now()
            response = self.endpoint.send(connection, "/chat/completions", self._body(question, temperature))
            said = listen(response, now)
        except (RequestFailed, OSError, http.client.HTTPException, ValueError) as error:
            reason = self.endpoint.without_key(str(error))[:MOST_ERROR_CHARACTERS] or type(error).__name__
            return Answer(arrived_s=arrived_s, ended_s=now(), error=reason)
        finally:
            if connection is not None:
                connection.close()
        if said.num_tokens is None:
            self.notes.add(
                f"{self.name}: the server sends no usage; its chunks were counted as tokens, "
                "so tokens_per_s and tpot_ms are wrong where a chunk holds several"
            )
        return _as_answer(said, arrived_s, now())

    def _body(self, question: Question, temperature: float) -> dict[str, Any]:
        prompt = question.prompt
        messages = [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.text}]
        return {
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": question.max_tokens,
            "seed": question.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.endpoint.extra,
        }


def _as_answer(said: Said, arrived_s: float, ended_s: float) -> Answer:
    return Answer(
        text=said.text,
        finish_reason=said.finish_reason,
        num_tokens=len(said.pieces) if said.num_tokens is None else said.num_tokens,
        arrived_s=arrived_s,
        first_s=said.first_s,
        last_s=said.last_s,
        ended_s=ended_s,
        counts=said.counts,
    )

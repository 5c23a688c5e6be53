"""An arm that is any server with OpenAI's chat completions, streaming.

A connection is opened before the clock of its request starts in a closed loop, so that the network's handshake is not
taken for the model's time. Tokens are counted by the server, in the `usage` of the last chunk: a chunk may carry
several. If a server has vLLM's block `metrics.speculative_decoding`, acceptance is read from it.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from understudy.bench.arrivals import Timed
from understudy.bench.record import ArmFacts
from understudy.bench.served import Answer, Served
from understudy.bench.workloads import Question, Unit
from understudy.core.request import SpeculationCounts
from understudy.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""How long a server may say nothing at all."""
_WARM_UP_TOKENS = 2
_MOST_ERROR_BYTES = 2000
_MOST_ERROR_CHARACTERS = 400
_REMEDY = "Check the URL (it ends in /v1 with most servers) and that the server is running."


class RequestFailed(Exception):
    """One request got no answer; the reason is in words."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and how it is asked."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that every request carries besides the usual ones."""

    @property
    def parts(self) -> SplitResult:
        """The URL, taken apart and checked."""
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            known = False
        if "@" in self.url or "?" in self.url or "#" in self.url:  # the URL is shown, and is written into the record
            raise ConfigError(
                "This is no URL of a server: it has a user, a password, a query or a fragment, which may be secret.",
                "Write it as http://host:port/v1, and name a key with --api-key-env.",
            )
        if not known:
            raise ConfigError(f"{self.url!r} is no URL of a server.", "Write it as http://host:port/v1.")
        return parts

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        parts = self.parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            raise RequestFailed(f"{self.url} cannot be reached: {error.strerror or error}") from None
        connection.sock.settimeout(SILENCE_TIMEOUT_S)
        return connection

    def send(self, connection: http.client.HTTPConnection, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Send a request, and take the head of its answer."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        payload = None if body is None else json.dumps(body).encode()
        place = self.parts.path.rstrip("/") + path
        connection.request("GET" if body is None else "POST", place, payload, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            told = response.read(_MOST_ERROR_BYTES).decode(errors="replace")
            said = self.without_key(" ".join(told.split()))
            raise RequestFailed(f"{self.url}{path} answered {response.status}: {said}"[:_MOST_ERROR_CHARACTERS])
        return response

    def without_key(self, text: str) -> str:
        """Take the key out of what a server says: some repeat it, and it must not get into a record."""
        return text.replace(self.api_key, "(the key)") if self.api_key else text


def find_model(endpoint: Endpoint, wanted: str | None) -> str:
    """Check that a server is there, and say which model to ask for: the wanted one, or the only one that it has."""
    connection = None
    try:
        connection = endpoint.connect()
        if wanted is not None:
            return wanted
        listed = json.loads(endpoint.send(connection, "/models").read())
        names = [str(model["id"]) for model in listed["data"]]
    except RequestFailed as error:
        raise ConfigError(f"{error}.", _REMEDY) from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        raise ConfigError(f"{endpoint.url} does not list its models.", "Name one with --model.") from None
    finally:
        if connection is not None:
            connection.close()
    if len(names) != 1:
        raise ConfigError(f"{endpoint.url} has {len(names)} models.", f"Choose with --model: {', '.join(names)}.")
    return names[0]


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
            raise ConfigError(f"{answer.error}.", _REMEDY)

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
            said = _listen(response, now)
        except (RequestFailed, OSError, http.client.HTTPException, ValueError) as error:
            reason = self.endpoint.without_key(str(error))[:_MOST_ERROR_CHARACTERS] or type(error).__name__
            return Answer(arrived_s=arrived_s, ended_s=now(), error=reason)
        finally:
            if connection is not None:
                connection.close()
        if said.num_tokens is None:
            self.notes.add(
                f"{self.name}: the server sends no usage; its chunks were counted as tokens, "
                "so tokens_per_s and tpot_ms are wrong where a chunk holds several"
            )
        return said.answer(arrived_s, now())

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


@dataclass(slots=True)
class _Said:
    """A streamed answer as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int | None = None
    first_s: float | None = None
    last_s: float | None = None
    counts: SpeculationCounts | None = None

    def take(self, chunk: Mapping[str, Any], now_s: float) -> None:
        """Take one chunk."""
        if chunk.get("error"):
            raise RequestFailed(f"the server broke off: {chunk['error']}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))
            if text:
                self.pieces.append(text)
                self.first_s = now_s if self.first_s is None else self.first_s
                self.last_s = now_s
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = chunk.get("usage") or {}
        if isinstance(usage.get("completion_tokens"), int):
            self.num_tokens = usage["completion_tokens"]
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding")
        if isinstance(speculation, dict):
            self.counts = _counts(speculation)

    def answer(self, arrived_s: float, ended_s: float) -> Answer:
        """Give the whole."""
        return Answer(
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            num_tokens=len(self.pieces) if self.num_tokens is None else self.num_tokens,
            arrived_s=arrived_s,
            first_s=self.first_s,
            last_s=self.last_s,
            ended_s=ended_s,
            counts=self.counts,
        )


def _listen(response: http.client.HTTPResponse, now: Callable[[], float]) -> _Said:
    said = _Said()
    ended = False
    for data in _events(response):
        ended = data == "[DONE]"
        if ended:
            break
        try:
            said.take(json.loads(data), now())
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise RequestFailed(f"the server sent {data[:60]!r}, which is no chunk") from None
    if not ended or said.finish_reason is None:
        raise RequestFailed("the stream ended before the answer did")
    return said


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of server-sent events, as they come."""
    lines: list[str] = []
    while line := response.readline():
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            lines.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and lines:
            yield "\n".join(lines)
            lines = []
    if lines:  # some servers leave the last empty line out
        yield "\n".join(lines)


def _counts(block: Mapping[str, Any]) -> SpeculationCounts | None:
    """Read vLLM's block: how many steps accepted 0, 1, … drafted tokens. None if it is not of that form."""
    histogram, drafted = block.get("acceptance_histogram"), block.get("num_draft_tokens")
    steps = block.get("num_spec_steps")
    if not isinstance(histogram, list) or not all(type(count) is int for count in histogram):
        return None
    if type(drafted) is not int or type(steps) is not int:
        return None
    above = [sum(histogram[position:]) for position in range(len(histogram) + 1)]
    accepted = sum(above[1:])
    return SpeculationCounts(
        cycles=steps,
        drafted=drafted,
        accepted=accepted,
        rejected=max(0, drafted - accepted),
        rows=drafted,
        reached_by_position=above[: len(histogram) - 1],
        matched_by_position=above[1 : len(histogram)],
    )

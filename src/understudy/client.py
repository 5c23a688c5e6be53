"""A client of OpenAI's chat completions, streaming, with nothing but the standard library.

Tokens are counted by the server, in the `usage` of the last chunk: a chunk may carry several. If a server has vLLM's
block `metrics.speculative_decoding`, acceptance is read from it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from understudy.core.request import SpeculationCounts
from understudy.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""How long a server may say nothing at all."""
_MOST_ERROR_BYTES = 2000
MOST_ERROR_CHARACTERS = 400
REMEDY = "Check the URL (it ends in /v1 with most servers) and that the server is running."


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
            raise RequestFailed(f"{self.url}{path} answered {response.status}: {said}"[:MOST_ERROR_CHARACTERS])
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
        raise ConfigError(f"{error}.", REMEDY) from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        raise ConfigError(f"{endpoint.url} does not list its models.", "Name one with --model.") from None
    finally:
        if connection is not None:
            connection.close()
    if len(names) != 1:
        raise ConfigError(f"{endpoint.url} has {len(names)} models.", f"Choose with --model: {', '.join(names)}.")
    return names[0]


@dataclass(slots=True)
class Said:
    """A streamed answer as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int | None = None
    first_s: float | None = None
    last_s: float | None = None
    counts: SpeculationCounts | None = None

    def take(self, chunk: Mapping[str, Any], now_s: float) -> str:
        """Take one chunk, and give its text."""
        if chunk.get("error"):
            raise RequestFailed(f"the server broke off: {chunk['error']}")
        num_before = len(self.pieces)
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
        return "".join(self.pieces[num_before:])

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


def listen(
    response: http.client.HTTPResponse, now: Callable[[], float], on_text: Callable[[str], None] = lambda text: None
) -> Said:
    """Read a streamed answer to its end; `on_text` hears every piece of text as it comes."""
    said = Said()
    ended = False
    for data in _events(response):
        ended = data == "[DONE]"
        if ended:
            break
        try:
            text = said.take(json.loads(data), now())
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise RequestFailed(f"the server sent {data[:60]!r}, which is no chunk") from None
        if text:
            on_text(text)
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

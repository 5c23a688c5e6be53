"""When requests arrive.

closed    a new request is sent when one of `concurrency` ends: the server's speed sets the pace
open      requests arrive at given times, whether the server keeps up or not: drawn (Poisson) or from a trace

In an open loop a request's time runs from when it was due. Were it to run from when it was sent, a server that falls
behind would be asked later, and its delay would vanish from its own numbers.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from understudy.errors import ConfigError

TimeUnit = Literal["ms", "s"]


class Arrivals(Protocol):
    """Says when each request of a unit is due."""

    @property
    def most_at_once(self) -> int | None:
        """How many may be unanswered at once; None if that is left to the server."""

    def due_s(self, place: int, *, now_s: float, num_running: int) -> float | None:
        """When the request at `place` is due; None: not before another one has ended."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Always `concurrency` requests at once, until there are no more."""

    concurrency: int

    @property
    def most_at_once(self) -> int | None:
        """Never more than that."""
        return self.concurrency

    def due_s(self, place: int, *, now_s: float, num_running: int) -> float | None:
        """Now, if there is a free place."""
        return now_s if num_running < self.concurrency else None


@dataclass(frozen=True, slots=True)
class Timed:
    """Each request at its own time, in rising order."""

    times_s: Sequence[float]

    @property
    def most_at_once(self) -> int | None:
        """As many as come."""
        return None

    def due_s(self, place: int, *, now_s: float, num_running: int) -> float | None:
        """Whatever is running: at its time."""
        return self.times_s[place]


@dataclass(frozen=True, slots=True)
class Poisson:
    """Draws sequences of `count` arrivals, `rate` per second on average and independent of each other."""

    rate: float
    count: int
    seed: int

    def __call__(self, unit_number: int) -> Sequence[float]:
        """Give the times of a unit, which are the same for all arms; the first is 0."""
        draw = random.Random(f"{self.seed}/{unit_number}")
        times = [0.0]
        while len(times) < self.count:
            times.append(times[-1] + draw.expovariate(self.rate))
        return times


@dataclass(frozen=True, slots=True)
class Recorded:
    """The same arrivals for every unit."""

    times_s: Sequence[float]

    def __call__(self, unit_number: int) -> Sequence[float]:
        """Give the times of a unit."""
        return self.times_s


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace."""

    time_s: float
    prompt_class: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None


def read_trace(path: str | Path, *, unit: TimeUnit, count: int) -> list[TraceLine]:
    """Read the first `count` requests of a trace: JSON lines with a `timestamp`, as in the Mooncake traces.

    A line may also have `class`, `prompt` (or `text_input`) and `output_length`. Times are counted from the first.
    """
    file = Path(path)
    try:
        written = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{file} cannot be read: {reason}.", "Give a file of JSON lines.") from None
    numbered = [(number, text) for number, text in enumerate(written.split("\n"), start=1) if text.strip()]
    lines = [_trace_line(text, f"{file}, line {number}", unit) for number, text in numbered[:count]]
    if not lines:
        raise ConfigError(f"{file} holds no requests.", 'Write one object per line: {"timestamp": 0}.')
    lines.sort(key=lambda line: line.time_s)
    first_s = lines[0].time_s
    return [TraceLine(line.time_s - first_s, line.prompt_class, line.prompt, line.max_tokens) for line in lines]


def _trace_line(written: str, where: str, unit: TimeUnit) -> TraceLine:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        _refuse(where, "this is not JSON")
    if not isinstance(value, dict):
        _refuse(where, "this is no object")
    time = value.get("timestamp")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
        _refuse(where, f"timestamp is {str(time)[:60]!r}")
    most = value.get("output_length")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        _refuse(where, f"output_length is {str(most)[:60]!r}")
    prompt = _text(value, "prompt", where) or _text(value, "text_input", where)
    return TraceLine(time / 1000 if unit == "ms" else float(time), _text(value, "class", where), prompt, most)


def _text(value: dict[str, Any], name: str, where: str) -> str | None:
    text = value.get(name)
    if text is not None and (not isinstance(text, str) or not text):
        _refuse(where, f"{name} is {str(text)[:60]!r}")
    return text


def _refuse(where: str, what: str) -> NoReturn:
    raise ConfigError(f"{where}: {what}.", 'Write one object per line, with a "timestamp" of at least 0.')

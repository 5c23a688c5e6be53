"""Engines that say what a test wants, at the pace that it wants, on a clock that it can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from understudy.core.request import Output, Request, SamplingParams, SpeculationCounts
from understudy.race.lanes import Heat, Lane, Question


class Clock:
    """Time that passes only when somebody lets it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Step:
    """What one step says, as (text, source) of each token, and how long it takes."""

    words: Sequence[tuple[str, str]] = (("word ", ""),)
    seconds: float = 0.01


class FakeEngine:
    """Says its steps one after the other; the token ids are places in the list of all its words."""

    def __init__(self, steps: Sequence[Step], clock: Clock, *, submit_s: float = 0.0) -> None:
        self._steps = list(steps)
        self._clock = clock
        self._submit_s = submit_s
        self._texts = [text for step in steps for text, _ in step.words]
        self._said = 0
        self.counts = SpeculationCounts()

    def token_bytes(self, token: int) -> bytes:
        return self._texts[token].encode("utf-8", "surrogatepass")

    def submit(self, request: Request) -> list[Any]:
        self._clock.now_s += self._submit_s
        return [SimpleNamespace(counts=self.counts, num_left=request.sampling.max_tokens)]

    def step(self) -> list[Output]:
        step = self._steps.pop(0)
        self._clock.now_s += step.seconds
        texts, sources = zip(*step.words, strict=True)
        ids = tuple(range(self._said, self._said + len(texts)))
        self._said += len(texts)
        self.counts.cycles += 1
        self.counts.accepted += sum(source != "" for source in sources)
        self.counts.drafted += len(sources)
        reason = None if self._steps else "length"
        return [Output("race", 0, ids, "".join(texts), finish_reason=cast(Any, reason), sources=sources)]


def lane_of(steps: Sequence[Step], clock: Clock, *, submit_s: float = 0.0) -> Lane:
    """A lane on a fake engine."""
    engine: Any = FakeEngine(steps, clock, submit_s=submit_s)
    sampling = SamplingParams(max_tokens=max(1, sum(len(step.words) for step in steps)))
    return Lane(engine, Request(request_id="race", prompt_ids=(1,), sampling=sampling), engine, now=clock)


def heat_of(plain: Lane, speculative: Lane, *, prompt_class: str = "code", excerpt: str = "Say something.") -> Heat:
    """A heat of two lanes."""
    return Heat(1, Question(prompt_class, excerpt, (1,)), plain, speculative)


def finished_heat(words: Sequence[tuple[str, str]], **about: str) -> Heat:
    """A heat in which both lanes have said these words, the speculative one in a single step."""
    clock = Clock()
    plain = lane_of([Step([(text, "")]) for text, _ in words], clock)
    speculative = lane_of([Step(words)], clock)
    for lane in (plain, speculative):
        lane.run_until(1e9)
    return heat_of(plain, speculative, **about)

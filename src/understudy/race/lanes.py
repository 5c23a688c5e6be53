"""What runs in a race: two lanes that answer the same prompt, one plainly and one with drafts.

Two lanes that computed at the same time would slow each other down. So they take turns on one machine, in short
slices, and each has a clock that counts only its own time. Both clocks stay about level while both run, so what the
lanes have said when they are shown is what they would have said by then, each alone.

Speculation sees every prompt fresh: there is no prefix cache, and each prompt is a tenant of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from understudy.core.request import FinishReason, Output, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.engine.engine import Engine
from understudy.text.detokenize import Detokenizer
from understudy.text.tokenizer import Tokenizer

SLICE_S = 0.05
"""How much of its own time a lane has before the other one's turn; a step that was begun is ended."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its workload class."""

    prompt_class: str
    excerpt: str
    """How the prompt begins, for the screen."""
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, and the drafter that had foreseen it; empty if only the target said it."""

    text: str
    source: str


class Lane:
    """One engine on its way through one answer."""

    def __init__(
        self, engine: Engine, request: Request, tokenizer: Tokenizer, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock_s = 0.0
        """Seconds that this lane has computed, the prompt included."""
        self.token_ids: list[int] = []
        self.text = ""
        self.pieces: list[Piece] = []
        """The text again, token by token; the last piece is what the end of the text released."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._engine = engine
        self._now = now
        self._detokenizer = Detokenizer(tokenizer)
        started = now()
        (self._sequence,) = engine.submit(request)
        self.clock_s += now() - started
        self.max_tokens = self._sequence.num_left

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the lane's own clock."""
        return len(self.token_ids) / max(self.clock_s, 1e-9)

    @property
    def counts(self) -> SpeculationCounts:
        """What speculation did so far."""
        return self._sequence.counts

    @property
    def accepted_by_drafter(self) -> Counter[str]:
        """Tokens that a drafter had foreseen, by its name."""
        return Counter(piece.source for piece in self.pieces if piece.source)

    def run_until(self, limit_s: float) -> None:
        """Compute until the lane's clock has passed the limit or the answer is complete."""
        while not self.is_finished and self.clock_s < limit_s:
            started = self._now()
            outputs = self._engine.step()
            self.clock_s += self._now() - started
            for output in outputs:
                self._take(output)

    def _take(self, output: Output) -> None:
        """Give each token the text that it made certain; a character of several tokens is the last one's."""
        for place, (token, source) in enumerate(zip(output.token_ids, output.sources, strict=True), start=1):
            ends_text = output.finish_reason == "stop" and place == len(output.token_ids)
            self.pieces.append(Piece("" if ends_text else self._detokenizer.add(token), source))
        self.token_ids.extend(output.token_ids)
        self.text += output.text
        self.finish_reason, self.error = output.finish_reason, output.error
        if self.is_finished:
            self.pieces.append(Piece(self._detokenizer.finish(), ""))


@dataclass(frozen=True, slots=True)
class Heat:
    """One prompt, answered in both lanes."""

    number: int
    """Counted from 1."""
    question: Question
    plain: Lane
    speculative: Lane

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Both lanes, the plain one first."""
        return self.plain, self.speculative

    @property
    def is_same(self) -> bool:
        """Whether both lanes said the same and ended for the same reason."""
        one, other = ((lane.token_ids, lane.text, lane.finish_reason, lane.error) for lane in self.lanes)
        return one == other


def next_limit(clocks_s: Sequence[float]) -> float:
    """Up to where the lanes that still run may compute now: a slice beyond the clock that is behind.

    A lane whose last step took it further than that waits until the other has caught up.
    """
    return min(clocks_s) + SLICE_S


def run_race(
    engines: tuple[Engine, Engine],
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    sampling: SamplingParams,
    *,
    on_frame: Callable[[Heat], None],
) -> Iterator[Heat]:
    """Yield each prompt's heat when both lanes are through; `on_frame` sees it after every turn.

    The engines are one without and one with drafters, and keep no prefix cache. `sampling` must name its seed.
    """
    assert sampling.seed is not None, "each lane would draw a seed of its own"
    for number, question in enumerate(questions, start=1):
        lanes = [
            Lane(
                engine,
                Request(
                    request_id=f"race-{number}",
                    prompt_ids=question.prompt_ids,
                    sampling=sampling,
                    speculation=Speculation(enabled=engine is engines[1]),
                    tenant=f"race-{number}",
                    workload_class=question.prompt_class,
                ),
                tokenizer,
            )
            for engine in engines
        ]
        heat = Heat(number, question, *lanes)
        run_heat(heat, on_frame)
        yield heat


def run_heat(heat: Heat, on_frame: Callable[[Heat], None]) -> None:
    """Let the lanes take turns until both are through."""
    on_frame(heat)
    while running := [lane for lane in heat.lanes if not lane.is_finished]:
        limit_s = next_limit([lane.clock_s for lane in running])
        for lane in running:
            lane.run_until(limit_s)
        on_frame(heat)

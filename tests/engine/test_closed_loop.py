"""Tails of a closed loop: nobody waits much longer because those beside him are drafted for.

On a machine the 99th percentile of some hundred answers moves by several percent from run to run, since it is luck
which prompts are read beside which answers. Here a pass takes what its rows cost, on a clock of the test's own, so that
thousands of answers take seconds. The loop, its staggered beginnings and what is timed are those of `understudy bench`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.control.worlds import Clock
from tests.engine.engines import new_engine, run_alone, tiny_target
from tests.engine.scripted import Book, Scripted
from understudy.bench.in_step import Serving
from understudy.bench.prompts import Prompt
from understudy.bench.served import Answer
from understudy.bench.workloads import Plan, Question
from understudy.control.cost import CostModel, Load
from understudy.core.draft import EMPTY, Draft
from understudy.core.events import Cycle, Event
from understudy.core.request import Request
from understudy.drafters.base import Budget, Context
from understudy.engine.engine import Engine

PASS_S = {1: 3.6e-3, 2: 3.9e-3, 4: 4.7e-3, 8: 6.0e-3, 16: 9.2e-3, 32: 13e-3, 64: 20e-3, 128: 33e-3, 256: 55e-3}
"""By rows, much as the embedded model takes on two cores: a long prompt costs as much as a dozen words."""
ASKING_S = 80e-6
NUM_WORDS = 48
SPELL = 6
"""Places in a row for which there is a guess, or none, as where a text repeats another."""
MOST_TPOT, MOST_REQUEST, MOST_TTFT = 1.05, 1.05, 1.03


@dataclass(frozen=True)
class Kind:
    """A kind of traffic."""

    at_once: int
    num_prompt_tokens: int
    """Of a usual prompt; they have from six to fifteen tenths of it."""
    offered: float
    """The share of places with a guess, in the mean over texts that differ much."""
    rate: float
    """How often guesses are right, likewise."""
    num_prompts: int = 45

    @property
    def has_long_prompts(self) -> bool:
        return self.num_prompt_tokens > 100

    def __str__(self) -> str:
        return f"{self.at_once} at once, prompts of {self.num_prompt_tokens}, {self.offered:.0%} offered"


GAINING = Kind(4, 300, 0.6, 0.9)
KINDS = (GAINING, Kind(4, 300, 0.4, 0.8), Kind(4, 60, 0.4, 0.85), Kind(8, 300, 0.6, 0.9), Kind(8, 60, 0.6, 0.9))


class InSpells(Scripted):
    """Guesses in spells, for some texts often and well, for others seldom or badly, and knows how well."""

    name: ClassVar[str] = "suffix"

    def __init__(self, book: Book, vocab_size: int, kind: Kind, clock: Clock) -> None:
        super().__init__(book, random.Random(0), vocab_size)
        self._kind = kind
        self._clock = clock

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        self._clock.now += ASKING_S
        return super().propose(contexts, budgets)

    def draft(self, context: Context, budget: Budget) -> Draft:
        text, place = context.noise.seed, len(context.tokens)
        offered, rate = self._luck(text)
        if random.Random(f"{text}: spell {place // SPELL}").random() > offered:
            return EMPTY
        words = self.book.next_tokens(context, min(budget.max_depth, budget.max_rows))
        wrong = [random.Random(f"{text}: word {place + ahead}").random() > rate for ahead in range(len(words))]
        tokens = [(word + is_wrong) % self.vocab_size for word, is_wrong in zip(words, wrong, strict=True)]
        return Draft.chain(tokens, confidence=[rate] * len(tokens), source=self.name) if tokens else EMPTY

    def _luck(self, text: int) -> tuple[float, float]:
        """How often there is a guess for a text, and how often it is right."""
        draw = random.Random(f"{text}: luck")
        offered = min(0.95, draw.gammavariate(1.0, self._kind.offered))
        return offered, draw.betavariate(6 * self._kind.rate, 6 * (1 - self._kind.rate))


class Loop:
    """One kind of traffic, answered plainly and with drafts that others gain by."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind = kind
        self.seed = seed
        self._target = tiny_target("llama")
        self._vocab_size = self._target.decoder.config.vocab_size
        self._book = Book()
        self.num_accepted = 0
        questions = [self._question(number) for number in range(kind.num_prompts)]
        self._plan = Plan(questions={"rag": questions}, temperatures=(1.0,), concurrencies=(kind.at_once,))

    def _question(self, number: int) -> Question:
        """A prompt, and how much is said to it: one answer in four ends early."""
        draw = random.Random(f"{self.seed}: question {number}")
        num_tokens = int(self.kind.num_prompt_tokens * draw.uniform(0.6, 1.5))
        num_words = NUM_WORDS if draw.random() < 0.75 else draw.randint(NUM_WORDS // 2, NUM_WORDS)
        question = Question(
            name=str(number),
            prompt=Prompt("rag"),
            prompt_ids=tuple(draw.randrange(3, 60) for _ in range(num_tokens)),
            seed=1000 * self.seed + number,
            max_tokens=num_words,
        )
        (answer,) = run_alone(self._new_engine((), Clock()), self._request(question, "alone"))
        self._book.write(question.seed, 0, [*question.prompt_ids, *answer.token_ids])
        return question

    def _request(self, question: Question, name: str) -> Request:
        return Request(
            request_id=name,
            prompt_ids=question.prompt_ids,
            sampling=question.sampling(1.0),
            tenant=name,
            workload_class="rag",
        )

    def _new_engine(self, drafters: Sequence[Scripted], clock: Clock) -> Engine:
        engine = new_engine(
            self._target,
            drafters=drafters,
            cost=CostModel(PASS_S),
            emit=self._hear,
            clock=clock,
            num_blocks=256,
            prefix_cache=False,
        )
        launch, truth = engine._runner.launch, CostModel(PASS_S)

        def launch_in_time(works: Sequence[Any]) -> Any:
            rows = sum(len(work.known) + len(work.draft) for work in works)
            clock.now += truth.step_s(Load(rows, 0, 0))
            return launch(works)

        vars(engine._runner)["launch"] = launch_in_time
        return engine

    def _hear(self, event: Event) -> None:
        if isinstance(event, Cycle):
            self.num_accepted += event.num_accepted

    def serve(self, num_rounds: int, *, is_plain: bool) -> list[Answer]:
        """The answers that count, of so many rounds: not those that only get a loop going."""
        clock = Clock()
        drafters = [] if is_plain else [InSpells(self._book, self._vocab_size, self.kind, clock)]
        engine = self._new_engine(drafters, clock)
        answers: list[Answer] = []
        for number in range(num_rounds):
            (unit,) = self._plan.round(number)
            requests = [self._request(one, f"{number}-{place}") for place, one in enumerate(unit.questions)]
            serving = Serving(engine, requests, unit.arrivals, now=clock)
            while not serving.is_done:
                serving.advance()
            answers += serving.answers[unit.num_starting :]
        return answers


@dataclass(frozen=True)
class Tails:
    """Shares of plain."""

    ttft: float
    tpot: float
    request: float
    mean_request: float


def tails_of(loops: Sequence[Loop], num_rounds: int) -> Tails:
    """Serve both ways and compare; the words must be the same."""
    plain: list[Answer] = []
    drafted: list[Answer] = []
    for loop in loops:
        plain += loop.serve(num_rounds, is_plain=True)
        drafted += loop.serve(num_rounds, is_plain=False)
        assert loop.num_accepted > num_rounds, "nothing was drafted"
    assert [answer.said for answer in drafted] == [answer.said for answer in plain]

    def ratio(name: str, share: float) -> float:
        values = [[getattr(answer, name) for answer in answers] for answers in (drafted, plain)]
        times = [np.percentile([one for one in column if one is not None], share) for column in values]
        return float(times[0] / times[1])

    means = [np.mean([answer.request_ms for answer in answers]) for answers in (drafted, plain)]
    return Tails(ratio("ttft_ms", 50), ratio("tpot_ms", 99), ratio("request_ms", 99), float(means[0] / means[1]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nobody_waits_much_longer_for_what_others_gain(kind: Kind) -> None:
    """Beside long prompts the time per word of hundreds of answers is luck (1.051 for one kind): see the long form."""
    tails = tails_of([Loop(kind, seed=1)], 320 // kind.at_once)
    assert tails.request <= MOST_REQUEST, tails
    assert tails.ttft <= MOST_TTFT, tails
    assert tails.tpot <= MOST_TPOT or kind.has_long_prompts, tails
    assert tails.mean_request < 1.005, tails


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_that_come_sooner_are_held_against_those_who_bring_them(seed: int) -> None:
    """Few prompts meet the same others again and again; requests were 1.06 and 1.075 of plain before (DECISIONS 94)."""
    tails = tails_of([Loop(replace(GAINING, num_prompts=9), seed)], 120)
    assert tails.request <= 1.03, tails
    assert tails.mean_request < 0.995, tails


@functools.cache
def long_run(kind: Kind) -> Tails:
    """Thousands of answers."""
    return tails_of([Loop(kind, seed) for seed in range(2, 8)], 512 // kind.at_once)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_request_takes_much_longer_of_thousands(kind: Kind) -> None:
    tails = long_run(kind)
    assert tails.request <= MOST_REQUEST, tails
    assert tails.ttft <= MOST_TTFT, tails


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_word_takes_much_longer_of_thousands_of_answers(kind: Kind) -> None:
    tails = long_run(kind)
    assert tails.tpot <= MOST_TPOT, tails

"""A drafter is swapped for a bad one under load: it is soon off, no word changes, and it is on again with the good one.

The words are a tiny model's, the time is made up: a pass takes what its rows cost on a clock of the test's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.engines import Answer, new_engine, run_alone
from tests.engine.scripted import Book, Scripted
from understudy.assembly import Target
from understudy.control.cost import CostModel
from understudy.core.draft import Draft
from understudy.core.events import Cycle, Decided, Event
from understudy.core.request import Request, SamplingParams
from understudy.drafters.base import Budget, Context
from understudy.engine.engine import Engine

NUM_WORDS = 96
NUM_QUESTIONS = 6
GOOD_CYCLES, BAD_CYCLES = 250, 250
MOST_CYCLES_UNTIL_OFF = 50


class Swapped(Scripted):
    """Right in four of five words until it is swapped for one that never is, and just as sure of itself."""

    is_good = True

    def draft(self, context: Context, budget: Budget) -> Draft:
        words = self.book.next_tokens(context, min(budget.max_depth, budget.max_rows))
        wrong = [not self.is_good or self.rng.random() < 0.2 for _ in words]
        tokens = [(word + is_wrong) % self.vocab_size for word, is_wrong in zip(words, wrong, strict=True)]
        return Draft.chain(tokens, confidence=[0.8] * len(tokens), source=self.name)


class Bench:
    """An engine under steady load, on a clock that passes and asking move forward."""

    def __init__(self, target: Target, concurrency: int) -> None:
        self.target = target
        self.concurrency = concurrency
        self.now = 0.0
        self.book = Book()
        self.plain = [self._answer(number) for number in range(NUM_QUESTIONS)]
        self.drafter = Swapped(self.book, random.Random(0), target.decoder.config.vocab_size)
        self.events: list[Event] = []
        cost = CostModel({1: 0.02, 33: 0.02 * 1.64})
        self.engine = new_engine(
            target, drafters=[self.drafter], cost=cost, emit=self.events.append, clock=lambda: self.now
        )
        self._slow_down(self.engine)
        self.answers: dict[str, Answer] = {}
        self.num_asked = 0

    def _request(self, number: int, request_id: str) -> Request:
        sampling = SamplingParams(temperature=0.8, max_tokens=NUM_WORDS, seed=number, ignore_eos=True)
        return Request(
            request_id=request_id, prompt_ids=(5, 6, 7, 8 + number), sampling=sampling, workload_class="chat"
        )

    def _answer(self, number: int) -> Answer:
        answer = run_alone(new_engine(self.target), self._request(number, "plain"))[0]
        self.book.write(number, 0, [5, 6, 7, 8 + number, *answer.token_ids])
        return answer

    def _slow_down(self, engine: Engine) -> None:
        """Let a pass take what its rows cost."""
        launch = engine._runner.launch

        def launch_in_time(works: Sequence[Any]) -> Any:
            rows = sum(len(work.known) + len(work.draft) for work in works)
            self.now += 0.02 * (1.0 + 0.02 * (rows - 1))
            return launch(works)

        vars(engine._runner)["launch"] = launch_in_time

    def run(self, num_cycles: int, until: str = "") -> int:
        """Serve for so many cycles, or until the breaker is in a state; how many it took."""
        for cycle in range(num_cycles):
            if until and self.state == until:
                return cycle
            while self.engine.num_live_requests < self.concurrency:
                request_id = f"{self.num_asked % NUM_QUESTIONS}-{self.num_asked}"
                self.engine.submit(self._request(self.num_asked % NUM_QUESTIONS, request_id))
                self.answers[request_id] = Answer()
                self.num_asked += 1
            for output in self.engine.step():
                self.answers[output.request_id].extend(output)
        return num_cycles

    @property
    def state(self) -> str:
        breakers = self.engine.explain().breakers
        return breakers[0].state if breakers else "on"

    def check_words(self) -> None:
        for request_id, answer in self.answers.items():
            assert answer.begins(self.plain[int(request_id.split("-")[0])])


@pytest.mark.parametrize("concurrency", [1, 4])
def test_swapped_drafter_is_soon_off_and_comes_back(llama: Target, concurrency: int) -> None:
    bench = Bench(llama, concurrency)
    bench.run(GOOD_CYCLES)
    assert bench.state == "on"
    bench.drafter.is_good = False
    assert bench.run(BAD_CYCLES, until="off") <= MOST_CYCLES_UNTIL_OFF
    bench.events.clear()
    bench.run(BAD_CYCLES)
    cycles = [event for event in bench.events if isinstance(event, Cycle)]
    spent_s = sum(cycle.forward_s + cycle.draft_s for cycle in cycles)
    plain_s = sum(0.02 * (1.0 + 0.02 * (cycle.num_sequences - 1)) for cycle in cycles)
    assert spent_s < 1.03 * plain_s, "off is nearly free, with all the looks and probes"
    bench.drafter.is_good = True
    num_cycles = bench.run(600, until="on")
    assert num_cycles <= 300
    bench.run(50)
    cycles = [event for event in bench.events if isinstance(event, Cycle)][-50:]
    assert sum(cycle.num_accepted for cycle in cycles) > 25 * concurrency, "and it is used again"
    bench.check_words()
    assert sum(answer.finish_reason == "length" for answer in bench.answers.values()) > 10 * concurrency
    reasons = [event.reason for event in bench.events if isinstance(event, Decided) and event.what == "breaker"]
    assert any("a probe gained" in reason for reason in reasons)

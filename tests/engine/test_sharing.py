"""Texts that share their steps are left alone where drafts bring them too little, and one that is alone never is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tests.engine.engines import FixedCost, new_engine, run_alone, steps
from tests.engine.recorder import Recorder
from tests.engine.scripted import Book, Scripted
from understudy.assembly import Target
from understudy.control import sharing
from understudy.core.draft import EMPTY, Draft
from understudy.core.events import Cycle, Decided, Event
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context
from understudy.engine.engine import Engine

COST = FixedCost({1: 1.0, 4: 1.1, 16: 1.4, 64: 2.0, 256: 5.0})
TRIAL, REST = 64, 256
NUM_WORDS = 60


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "TRIAL_STEPS", TRIAL)
    monkeypatch.setattr(sharing, "REST_STEPS", REST)


class Every(Scripted):
    """Knows the next two words in every n-th place, and is right."""

    name: ClassVar[str] = "every"

    def __init__(self, book: Book, places: int) -> None:
        super().__init__(book, random.Random(0), 304)
        self.places = places
        self.num_asked = 0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        self.num_asked += 1
        return super().propose(contexts, budgets)

    def draft(self, context: Context, budget: Budget) -> Draft:
        if len(context.tokens) % self.places:
            return EMPTY
        words = self.book.next_tokens(context, min(2, budget.max_depth))
        return Draft.chain(words, confidence=[0.99] * len(words), source=self.name) if words else EMPTY


def ask(number: int, name: str, *, forced: bool = False) -> Request:
    return Request(
        request_id=f"{name}-{number}",
        prompt_ids=(5, 6, 7, 8 + number),
        sampling=SamplingParams(temperature=1.0, max_tokens=NUM_WORDS, seed=number, ignore_eos=True),
        workload_class="code",
        speculation=Speculation(forced=forced),
    )


class Place:
    """Four texts at a time, again and again."""

    def __init__(self, target: Target, places: int, *more: Any) -> None:
        book = Book()
        self.plain: list[tuple[int, ...]] = []
        for number in range(4):
            (answer,) = run_alone(new_engine(target), ask(number, "plain"))
            self.plain.append(tuple(answer.token_ids))
            book.write(number, 0, [*ask(number, "plain").prompt_ids, *answer.token_ids])
        self.drafter = Every(book, places)
        self.events: list[Event] = []
        self.engine: Engine = new_engine(
            target, drafters=[self.drafter, *more], cost=COST, emit=self.events.append, prefix_cache=False
        )
        self._num_served = 0

    def serve(self, numbers: Sequence[int], *, forced: bool = False) -> list[Cycle]:
        """Answer so many at once, and return the steps that no prompt was in; the words must be the plain ones."""
        self._num_served += 1
        first = len(self.events)
        sequences = [self.engine.submit(ask(number, f"{self._num_served}", forced=forced))[0] for number in numbers]
        for _ in steps(self.engine):
            pass
        for number, sequence in zip(numbers, sequences, strict=True):
            assert tuple(sequence.tokens[4:]) == self.plain[number]
        return [e for e in self.events[first:] if isinstance(e, Cycle) and not e.num_prompt_rows]

    @property
    def decisions(self) -> list[str]:
        return [one.outcome for one in self.events if isinstance(one, Decided) and one.what == "sharing"]


def rows(cycles: Sequence[Cycle]) -> int:
    return sum(cycle.num_draft_rows for cycle in cycles)


def test_what_gains_little_is_asked_no_more_beside_others_until_it_is_tried_again(llama: Target) -> None:
    recorder = Recorder(1)
    place = Place(llama, 40, recorder)
    for _ in range(2):
        place.serve(range(4))
    assert place.decisions == ["off"]
    num_asked, num_seen = (place.drafter.num_asked, recorder.num_asked), len(recorder.seen)
    resting = place.serve(range(4))
    assert not rows(resting)
    assert (place.drafter.num_asked, recorder.num_asked) == num_asked
    assert {cycle.reason for cycle in resting} >= {"drafts bring too little where texts share their steps"}
    assert len(recorder.seen) == num_seen, "what nobody guesses from is not shown"
    for _ in range(REST // NUM_WORDS + 1):
        place.serve(range(4))
    assert place.decisions[:2] == ["off", "probing"]
    assert place.drafter.num_asked > num_asked[0]


def test_a_text_that_is_left_alone_beside_others_is_drafted_for_when_they_are_gone(llama: Target) -> None:
    place = Place(llama, 40)
    for _ in range(2):
        place.serve(range(4))
    assert place.decisions == ["off"]
    assert rows(place.serve([0]))
    assert not rows(place.serve(range(3)))
    assert rows(place.serve(range(4), forced=True)), "a proof is asked for whatever it brings"


def test_what_gains_much_goes_on(llama: Target) -> None:
    place = Place(llama, 3)
    served = [place.serve(range(4)) for _ in range(4)]
    assert not place.decisions
    assert rows(served[-1]) >= rows(served[0]) > 40

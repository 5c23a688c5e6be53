"""Every token carries the name of the drafter that had foreseen it, and none where only the target said it."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from tests.engine import scripted
from tests.engine.engines import new_engine, run_alone, steps, tiny_target
from tests.engine.scripted import Book
from understudy import LLM, EngineConfig
from understudy.assembly import Target
from understudy.control.breaker import Tally
from understudy.control.classes import Line
from understudy.core.draft import Draft
from understudy.core.request import Output, Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context, Drafter
from understudy.engine.engine import Engine

PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 24
SAMPLING = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True)


class First(scripted.Scripted):
    """Foresees the next token, and nothing more."""

    name: ClassVar[str] = "first"

    def draft(self, context: Context, budget: Budget) -> Draft:
        return self.chain(self.book.next_tokens(context, min(1, budget.max_depth)))


class Third(scripted.Scripted):
    """Foresees three tokens, beside a wrong one."""

    name: ClassVar[str] = "third"

    def draft(self, context: Context, budget: Budget) -> Draft:
        right = self.book.next_tokens(context, min(3, budget.max_depth))
        if not right:
            return self.chain([])
        wrong = (right[0] + 1) % self.vocab_size
        return self.tree([wrong, *right], [-1, -1, *range(1, len(right))])


@pytest.fixture(scope="module")
def book(llama: Target) -> Book:
    book = Book()
    (answer,) = run_alone(new_engine(llama), Request(request_id="plain", prompt_ids=PROMPT, sampling=SAMPLING))
    book.write(3, 0, [*PROMPT, *answer.token_ids])
    return book


def engine_with(target: Target, book: Book, *kinds: type[scripted.Scripted]) -> Engine:
    vocab_size = target.decoder.config.vocab_size
    drafters: list[Drafter] = [kind(book, random.Random(0), vocab_size) for kind in kinds]
    return new_engine(target, drafters=drafters)


def said(target: Target, book: Book, *kinds: type[scripted.Scripted]) -> list[Output]:
    """The outputs of one request under these drafters."""
    return said_by(engine_with(target, book, *kinds))


def said_by(engine: Engine) -> list[Output]:
    (sequence,) = engine.submit(
        Request(request_id="a", prompt_ids=PROMPT, sampling=SAMPLING, speculation=Speculation(forced=True))
    )
    outputs = [output for step in steps(engine) for output in step]
    assert sequence.counts.accepted == sum(source != "" for output in outputs for source in output.sources)
    return outputs


def test_without_drafts_every_token_is_the_target_s_own(llama: Target, book: Book) -> None:
    outputs = said(llama, book)
    assert [output.sources for output in outputs] == [("",)] * NUM_TOKENS


def test_the_last_token_of_a_cycle_is_the_target_s_own(llama: Target, book: Book) -> None:
    first, *rest = said(llama, book, Third)
    assert first.sources == ("",), "nothing is drafted before the first word"
    assert {output.sources for output in rest[:-1]} == {("third", "third", "third", "")}
    assert sum(len(output.sources) for output in (first, *rest)) == NUM_TOKENS


def test_the_drafter_that_named_a_token_first_is_its_source(llama: Target, book: Book) -> None:
    _, *rest = said(llama, book, First, Third)
    assert {output.sources for output in rest[:-1]} == {("first", "third", "third", "")}


def test_who_had_a_word_that_another_named_first_is_told_so(
    llama: Target, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter is judged by the words that it had, whoever's row they came with."""
    engine = engine_with(llama, book, First, Third)
    shared = {"first": 0, "third": 0}

    def count(line: Line, drafter: str, tally: Tally) -> None:
        shared[drafter] += tally.num_shared

    monkeypatch.setattr(engine._drafting.controller, "count", count)
    sources = [source for output in said_by(engine) for source in output.sources]
    assert shared == {"first": 0, "third": sources.count("first")}
    assert shared["third"] > 0


def test_a_completion_carries_them_all() -> None:
    llm = LLM(target=tiny_target("llama"), config=EngineConfig(num_threads=1, kv_tokens=512))
    repeating = [5, 6, 7, 8] * 6
    bias = {5: 50.0}  # a text that repeats itself, so that something is foreseen
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=bias, seed=1)
    (result,) = llm.generate([repeating], sampling, speculation=Speculation(forced=True))
    (completion,) = result.completions
    assert len(completion.sources) == len(completion.token_ids) == 12
    assert completion.sources.count("suffix") == completion.speculation.accepted > 0
    assert set(completion.sources) == {"suffix", ""}

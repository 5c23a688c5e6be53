"""Nothing that a drafter does changes a word or stops the engine, and whatever fails is reported and switched off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tests.engine import scripted
from tests.engine.cases import Library, Question
from tests.engine.engines import Answer, FixedCost, new_engine, run_alone, steps
from tests.engine.scripted import BROKEN, NOTHING, ODD_CONFIDENCE, Book, Scripted
from understudy.assembly import Target
from understudy.core.events import Event, Fallback
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context, Drafter
from understudy.drafters.ngram import NgramDrafter
from understudy.drafters.suffix import SuffixDrafter
from understudy.engine.engine import Engine

HARMLESS = (
    scripted.Wrong,
    scripted.Right,
    scripted.RandomTrees,
    scripted.Mixed,
    scripted.OutOfVocabulary,
    scripted.OverLong,
    scripted.Duplicates,
    *ODD_CONFIDENCE,
)
"""Wrong, senseless or greedy, but well-formed: nothing to report."""

FAILING = (scripted.Raising, *NOTHING, *BROKEN)
"""Every proposal is a failure."""

PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 16


class Scene:
    """One prompt at each temperature, with its plain answers and a book of them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.book = Book()
        self.vocab_size = target.decoder.config.vocab_size
        self.questions = [self._question(seed, temperature) for seed, temperature in enumerate((0.0, 1.0))]

    def _question(self, seed: int, temperature: float) -> Question:
        sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, n=2)
        answers = run_alone(new_engine(self.target), Request(request_id="plain", prompt_ids=PROMPT, sampling=sampling))
        for choice, answer in enumerate(answers):
            self.book.write(seed, choice, [*PROMPT, *answer.token_ids])
        return Question(PROMPT, sampling, "", answers)

    def drafter(self, kind: type[Scripted]) -> Drafter:
        return kind(self.book, random.Random(0), self.vocab_size)

    def play(self, drafters: Sequence[Drafter], *, forced: bool = True) -> tuple[Engine, list[Fallback]]:
        """Ask all questions at once, twice, and compare the answers; return the engine and what it reported."""
        events: list[Event] = []
        engine = new_engine(self.target, drafters=drafters, emit=events.append)
        for _ in range(2):
            self._ask_all(engine, Speculation(forced=forced))
        engine.check()
        assert engine.num_free_blocks == 64
        return engine, [event for event in events if isinstance(event, Fallback)]

    def _ask_all(self, engine: Engine, speculation: Speculation) -> None:
        answers = [[Answer() for _ in question.answers] for question in self.questions]
        for index, question in enumerate(self.questions):
            engine.submit(question.request(str(index), speculation))
        for outputs in steps(engine):
            for output in outputs:
                answers[int(output.request_id)][output.choice].extend(output)
        assert answers == [question.answers for question in self.questions]


@pytest.fixture(scope="module")
def scene(llama: Target) -> Scene:
    """The questions, answered plainly."""
    return Scene(llama)


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("kind", HARMLESS, ids=lambda kind: kind.__name__)
def test_well_formed_nonsense_changes_no_word_and_is_no_failure(
    scene: Scene, kind: type[Scripted], forced: bool
) -> None:
    engine, fallbacks = scene.play([scene.drafter(kind)], forced=forced)
    assert fallbacks == []
    assert len(engine._drafting._asking.active) == 1


@pytest.mark.parametrize("kind", FAILING, ids=lambda kind: kind.__name__)
def test_failing_drafter_changes_no_word_and_is_switched_off_after_three_failures(
    scene: Scene, kind: type[Scripted]
) -> None:
    engine, fallbacks = scene.play([scene.drafter(kind)])
    assert len(fallbacks) == 4
    assert all(event.what == "drafter scripted" for event in fallbacks)
    assert all("left out of this step" in event.reason for event in fallbacks[:3])
    assert "switched off after 3 failures in a row" in fallbacks[3].reason
    assert engine._drafting._asking.active == []


class WellNamed(scripted.Right):
    """A good drafter beside a bad one."""

    name: ClassVar[str] = "good"


@pytest.mark.parametrize("kind", FAILING, ids=lambda kind: kind.__name__)
def test_failing_drafter_does_not_spoil_the_one_beside_it(scene: Scene, kind: type[Scripted]) -> None:
    good = scene.drafter(WellNamed)
    engine, fallbacks = scene.play([scene.drafter(kind), good])
    assert {event.what for event in fallbacks} == {"drafter scripted"}
    assert good in engine._drafting._asking.active
    (sequence, *_) = engine.submit(scene.questions[0].request("again", Speculation(forced=True)))
    for _ in steps(engine):
        pass
    assert sequence.counts.accepted == NUM_TOKENS - 2, "all but the first word and the bonus"


def test_failures_of_many_short_requests_add_up(scene: Scene) -> None:
    """Each request meets a single failure, and a start and a stop that succeed in between."""
    events: list[Event] = []
    engine = new_engine(scene.target, drafters=[scene.drafter(scripted.Raising)], emit=events.append)
    for _ in range(4):
        run_alone(engine, Request(request_id="r", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=3, seed=0)))
    assert sum("switched off" in event.reason for event in events if isinstance(event, Fallback)) == 1


def test_failures_that_are_not_in_a_row_do_not_switch_a_drafter_off(scene: Scene) -> None:
    class EveryOther(scripted.Right):
        calls = 0

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
            self.calls += 1
            if self.calls % 3:
                raise ValueError("two times in three")
            return super().propose(contexts, budgets)

    drafter = scene.drafter(EveryOther)
    engine, fallbacks = scene.play([drafter])
    assert engine._drafting._asking.active == [drafter]
    assert len(fallbacks) > 3
    assert all("left out of this step: ValueError: two times in three" in event.reason for event in fallbacks)


def test_sometimes_raising_changes_no_word(scene: Scene) -> None:
    _, fallbacks = scene.play([scene.drafter(scripted.SometimesRaising)])
    assert any("ZeroDivisionError: the understudy stumbles" in event.reason for event in fallbacks)


def test_raising_when_a_sequence_starts_or_stops_changes_no_word(scene: Scene) -> None:
    _, fallbacks = scene.play([scene.drafter(scripted.RaisingOutside)])
    reasons = " ".join(event.reason for event in fallbacks)
    assert "OSError: no start" in reasons
    assert "switched off after 3 failures in a row" in reasons, "four sequences start before anything is proposed"


def test_raising_when_a_sequence_stops_still_gives_its_blocks_back(scene: Scene) -> None:
    engine = new_engine(scene.target, drafters=[scene.drafter(scripted.RaisingOutside)])
    request = Request(request_id="one", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=4, seed=0))
    assert len(run_alone(engine, request)[0].token_ids) > 0
    engine.submit(request)
    engine.step()
    engine.abort("one")
    engine.step()
    engine.check()
    assert not engine.has_work
    assert engine.num_free_blocks == 64


@pytest.mark.parametrize("inner", [SuffixDrafter(min_match=1), NgramDrafter(min_n=1)], ids=lambda inner: inner.name)
def test_drafter_that_missed_the_start_of_a_sequence_changes_no_word(scene: Scene, inner: Drafter) -> None:
    class Late(Scripted):
        """Hears of a sequence when it is asked to draft for it, and never that it ended."""

        def start(self, context: Context) -> None:
            if context.sequence_id == 0:
                raise RuntimeError("missed it")

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
            return inner.propose(contexts, budgets)

    engine, fallbacks = scene.play([scene.drafter(Late)])
    assert [event.reason for event in fallbacks] == ["left out of this step: RuntimeError: missed it"]
    assert len(engine._drafting._asking.active) == 1


def test_draft_is_refused_where_rows_are_dear(llama: Target) -> None:
    """The policy, not the drafter, decides: at a price of one step for each row nothing is bought."""
    rng = random.Random(0)
    library = Library(llama, rng)
    question = next(q for q in iter(library.question, None) if len(q.answers[0].token_ids) > 5)
    drafter = scripted.Right(library.book, rng, library.vocab_size)
    engine = new_engine(llama, drafters=[drafter], cost=FixedCost({1: 1.0, 2: 2.0}))
    sequences = engine.submit(question.request("r"))
    for _ in steps(engine):
        pass
    assert sum(sequence.counts.rows for sequence in sequences) == 0
    assert [list(s.tokens[len(question.prompt_ids) :]) for s in sequences] == [a.token_ids for a in question.answers]

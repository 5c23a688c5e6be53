"""Drafters are shown the hidden states of what was committed: every row once, in order, bit for bit, and no other.

Whatever is drafted beside, whoever is served, however little room there is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from tests.engine.cases import Library, Tally, play, random_case
from tests.engine.checks import SEED
from tests.engine.engines import PAGE, new_engine, run_alone, steps
from tests.engine.recorder import Floats, Recorder
from understudy.assembly import Target
from understudy.core.draft import Draft
from understudy.core.events import Event, Fallback
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import ALL_ON, OFF
from understudy.drafters.base import Budget, Context
from understudy.engine.engine import Engine
from understudy.kernels.interface import NORMED, FeatureBuffer

LEAST_CASES, MOST_CASES = 20, 200


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept until somebody is asked is told at once here, to be looked at."""
    monkeypatch.setattr("understudy.engine.showing._MOST_KEPT", 0)


def test_what_is_committed_is_shown_once_whatever_happens(target: Target) -> None:
    """Random cases with every drafter beside, until trees and cached prefixes came up; preemption has its own test."""
    seed = f"{SEED}-showing"
    rng = random.Random(seed)
    library = Library(target, rng, max_context=96)
    questions = [library.question() for _ in range(20)]
    tally, num_rows = Tally(), 0
    while tally.cases < LEAST_CASES or not (tally.prefix_hits and tally.off_line):
        assert tally.cases < MOST_CASES, f"{tally}, UNDERSTUDY_TEST_SEED={SEED}"
        case = random_case(library, questions, rng)
        recorder = Recorder(0, 2, NORMED)
        play(target, replace(case, drafters=[*case.drafters, recorder]), tally)
        try:
            recorder.check(target, may_skip=case.settings["prefix_cache"])
        except AssertionError as error:
            raise AssertionError(f"UNDERSTUDY_TEST_SEED={SEED}, case {tally.cases}: {error}\nin {case}") from error
        num_rows += sum(len(features) for shown in recorder.seen.values() for _, features in shown)
    assert num_rows > 1000


def ask(number: int = 0, *, length: int = 3 * PAGE + 5, **more: object) -> Request:
    sampling = SamplingParams(temperature=1.0, max_tokens=24, seed=number, ignore_eos=True)
    prompt = [(7 + 31 * place) % 300 for place in range(length - 1)]
    prompt_ids = (*prompt, 10 + number)
    return Request(request_id=str(number), prompt_ids=prompt_ids, sampling=sampling, **more)  # type: ignore[arg-type]


def test_a_prefix_from_the_cache_is_left_out_and_all_else_is_seen(llama: Target) -> None:
    recorder = Recorder(1)
    engine = new_engine(llama, drafters=[recorder])
    for number in (0, 1):
        run_alone(engine, ask(number))
    first, second = recorder.contexts.values()
    last = len(first.tokens) - 2  # the row of the last word but one; the text ended in the pass after it
    assert recorder.positions(first) == list(range(last))
    assert recorder.positions(second) == list(range(3 * PAGE, last))
    recorder.check(llama, may_skip=True)


def test_what_is_computed_again_is_not_seen_again(llama: Target) -> None:
    events: list[Event] = []
    recorder = Recorder(1)
    engine = new_engine(llama, drafters=[recorder], emit=events.append, num_blocks=5, prefix_cache=False)
    for number in range(3):
        engine.submit(ask(number, length=PAGE - 8))
    for _ in steps(engine):
        pass
    assert "Preempted" in {type(event).__name__ for event in events}
    for context in recorder.contexts.values():
        assert recorder.positions(context) == list(range(PAGE - 8 + 24 - 2))
    assert recorder.num_asked
    recorder.check(llama, may_skip=False)


def test_what_was_kept_is_told_in_few_pieces_when_somebody_is_asked(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.engine.showing._MOST_KEPT", 512)
    recorder = Recorder(1, NORMED)
    engine = new_engine(llama, drafters=[recorder], prefix_cache=False)
    rests = itertools.cycle([5, 4, 3, 2, 1, 0])
    monkeypatch.setattr(engine._drafting._worth, "num_resting", lambda kind, num_slept=0: next(rests))
    monkeypatch.setattr(engine._drafting, "_sleep", lambda sequences, num_steps: None)
    for number in range(3):
        engine.submit(ask(number))
    num_steps = sum(1 for _ in steps(engine))
    assert recorder.num_asked
    assert num_steps > 24
    for context in recorder.contexts.values():
        assert len(recorder.seen[context.sequence_id]) < num_steps / 3
        assert recorder.positions(context)[-1] > 3 * PAGE + 15
    recorder.check(llama, may_skip=False)


@pytest.mark.parametrize("most", [0, 40, 10**6])
def test_no_more_is_kept_than_a_bound(llama: Target, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("understudy.engine.showing._MOST_KEPT", most)
    recorder = Recorder(1)
    engine = new_engine(llama, drafters=[recorder], prefix_cache=False)
    monkeypatch.setattr(engine._drafting._worth, "num_resting", lambda kind, num_slept=0: 9)
    engine.submit(ask())
    kept = [engine._drafting.showing._num_kept for _ in steps(engine)]
    assert max(kept) <= most
    assert bool(recorder.seen) == (most < 10**6)
    if recorder.seen:
        recorder.check(llama, may_skip=False)


def test_each_drafter_sees_the_layers_that_it_asked_for(llama: Target) -> None:
    class Other(Recorder):
        name: ClassVar[str] = "other"

    recorders = [Recorder(NORMED, 0), Other(2), Other(2, 1, NORMED)]
    for pair in (recorders[:2], recorders[::2]):
        engine = new_engine(llama, drafters=pair)
        run_alone(engine, ask())
        for recorder in pair:
            recorder.check(llama, may_skip=False)
            for shown in recorder.seen.values():
                assert not any(features.flags.writeable for _, features in shown)
        for recorder in pair:
            recorder.seen.clear()


@pytest.mark.parametrize("speculation", [Speculation(enabled=False), Speculation(max_depth=0), Speculation(max_rows=0)])
def test_nothing_is_shown_of_a_text_that_is_not_drafted_for(
    llama: Target, speculation: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureBuffer, "take", None)  # whoever copies anything fails
    recorder = Recorder(1)
    (answer,) = run_alone(new_engine(llama, drafters=[recorder]), ask(speculation=speculation))
    assert len(answer.token_ids) == 24
    assert not recorder.seen
    with pytest.raises(TypeError):
        run_alone(new_engine(llama, drafters=[recorder]), ask())


class Knower(Recorder):
    """Guesses the next word, and is right."""

    def __init__(self, *layers: int, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(*layers)
        self._answers = answers

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        super().propose(contexts, budgets)
        return [Draft.chain(self._next(context.tokens), confidence=[0.9], source=self.name) for context in contexts]

    def _next(self, tokens: list[int]) -> list[int]:
        count = len(next(iter(self._answers)))
        return [self._answers[tuple(tokens[:count])][len(tokens) - count]]


class Hall:
    """Many texts at once, again and again, beside a drafter that sees; after 20 idle steps texts hide for 45."""

    def __init__(self, target: Target, patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
        patch.setattr("understudy.engine.showing._IDLE_STEPS", 20)
        patch.setattr("understudy.engine.showing._REST_STEPS", 45)
        self.recorder = recorder
        self.engine = new_engine(target, drafters=[recorder], prefix_cache=False)

    def shown(self, *requests: Request) -> list[bool]:
        """Answer them together, in some 24 steps; whether each was shown."""
        ids = [sequence.sequence_id for request in requests for sequence in self.engine.submit(request)]
        for _ in steps(self.engine):
            pass
        return [sequence_id in self.recorder.seen for sequence_id in ids]


def many(**more: object) -> list[Request]:
    return [ask(number, length=9, **more) for number in range(12)]


def test_where_many_are_served_and_nothing_is_guessed_texts_begin_hidden(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = Hall(llama, monkeypatch, Recorder(1))
    assert all(hall.shown(*many()))
    num_asked = hall.recorder.num_asked
    assert num_asked
    forced = replace(ask(12, length=9), speculation=Speculation(forced=True))
    named = replace(ask(13, length=9), speculation=Speculation(drafter="recorder"))
    *hidden, is_forced_shown, is_named_shown = hall.shown(*many(), forced, named)
    assert not any(hidden)
    assert is_forced_shown
    assert is_named_shown
    assert hall.recorder.num_asked - num_asked < 2 * 24, "nobody is asked about what he does not see"
    assert all(hall.shown(ask(0, length=9))), "few are always shown"
    assert all(hall.shown(*many(workload_class="another"))), "other classes may be guessed better"
    assert not any(hall.shown(*many()))
    assert all(hall.shown(*many())), "the rest is over"
    hall.recorder.check(llama, may_skip=False)


def test_a_hidden_text_is_seen_when_few_are_left(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(llama, monkeypatch, Recorder(1))
    hall.shown(*many())
    short = [replace(request, sampling=replace(request.sampling, max_tokens=8)) for request in many()[:10]]
    assert hall.shown(*short, *many()[10:]) == [False] * 10 + [True] * 2


def test_texts_whose_guesses_are_bought_are_not_hidden(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {request.prompt_ids: run_alone(new_engine(llama), request)[0].token_ids for request in many()}
    hall = Hall(llama, monkeypatch, Knower(1, answers=answers))
    for _ in range(6):
        assert all(hall.shown(*many()))


@pytest.mark.parametrize("how", ["switched off", "not wanted"])
def test_steps_in_which_nobody_may_guess_hide_nothing(llama: Target, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    hall = Hall(llama, monkeypatch, Recorder(1))
    hall.engine.switch(OFF if how == "switched off" else ALL_ON)
    for _ in range(2):
        assert not any(hall.shown(*many(speculation=Speculation(enabled=how == "switched off"))))
    hall.engine.switch(ALL_ON)
    assert all(hall.shown(*many()))


def test_few_texts_are_all_shown_whatever_was_bought_for_others(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(llama, monkeypatch, Recorder(1))
    assert all(hall.shown(ask(0, length=9))[0] for _ in range(10))
    hall.recorder.check(llama, may_skip=False)


def test_what_is_forced_says_nothing_of_what_asking_is_worth(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(llama, monkeypatch, Recorder(1))
    forced = replace(ask(0, length=9), speculation=Speculation(forced=True))
    for _ in range(4):
        assert hall.shown(forced) == [True]
    num_asked = hall.recorder.num_asked
    assert num_asked
    assert not hall.engine._drafting._worth._balances
    hall.shown(ask(1, length=9))
    assert hall.recorder.num_asked > num_asked


def test_nothing_is_shown_while_speculation_is_switched_off(llama: Target) -> None:
    recorder = Recorder(1)
    engine = new_engine(llama, drafters=[recorder])
    engine.submit(ask())
    for number, _ in enumerate(steps(engine)):
        engine.switch(OFF if 5 <= number < 9 else ALL_ON)
    (context,) = recorder.contexts.values()
    left_out = sorted(set(range(len(context.tokens) - 2)) - set(recorder.positions(context)))
    assert len(left_out) == 4
    assert left_out == list(range(left_out[0], left_out[0] + 4))
    assert recorder.num_behind <= 1, "one pass after it is on again it has seen the last computed row"


class Ill(Recorder):
    """Raises at whatever it is shown."""

    def see(self, context: Context, first: int, features: Floats) -> None:
        raise RuntimeError("the understudy cannot look")


def test_a_drafter_that_fails_to_look_changes_no_word(llama: Target) -> None:
    events: list[Event] = []
    engine = new_engine(llama, drafters=[Ill(1)], emit=events.append)
    assert run_alone(engine, ask()) == run_alone(new_engine(llama), ask())
    reasons = [event.reason for event in events if isinstance(event, Fallback)]
    assert any("cannot look" in reason for reason in reasons)
    assert any("switched off" in reason for reason in reasons)


def left_out(target: Target, recorder: Recorder) -> tuple[Engine, list[str]]:
    events: list[Event] = []
    engine = new_engine(target, drafters=[recorder], emit=events.append)
    return engine, [event.reason for event in events if isinstance(event, Fallback)]


@pytest.mark.parametrize("layers", [(3,), (0, -2)])
def test_layers_that_the_target_has_not_leave_a_drafter_out(llama: Target, layers: tuple[int, ...]) -> None:
    engine, reasons = left_out(llama, Recorder(*layers))
    assert len(reasons) == 1
    assert "of a target that has 2" in reasons[0]
    assert engine.drafter_names == []


def test_a_target_that_shows_nothing_leaves_a_drafter_out(llama: Target) -> None:
    recorder = Recorder(1)
    engine, reasons = left_out(replace(llama, is_row_invariant=False), recorder)
    assert len(reasons) == 1
    assert "hidden states" in reasons[0]
    assert run_alone(engine, ask(length=5)) == run_alone(new_engine(llama), ask(length=5))
    assert not recorder.seen

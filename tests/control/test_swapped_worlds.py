"""A drafter that turns bad is soon off, in worlds of all kinds, and on again when it is good again."""

from __future__ import annotations

import itertools

import pytest

from tests.control.random_worlds import boasts, honest
from tests.control.worlds import Class, Priced, Run, World, suddenly

BAD_AT, GOOD_AT = 600, 1000
MOST_UNTIL_OFF = 50
MOST_UNTIL_ON = 400
"""It rests longer each time that a probe has lost."""


def cycles_until(good: float, row_cost: float, concurrency: int, *, is_honest: bool) -> tuple[int, int]:
    """Cycles from the swap until it is off, and from the way back until it is on."""
    states = honest if is_honest else boasts
    known = Class("code", suddenly(good, 0.02, at=BAD_AT, until=GOOD_AT), states=states)
    run = Run(World((known,), seed=5, num_texts=10_000, concurrency=concurrency, row_cost=row_cost))
    off = on = 0
    for step in run.steps():
        state = run.controller.explain().breakers[0].state if step.cycle else "on"
        if BAD_AT <= step.cycle < GOOD_AT and not off and state == "off":
            off = step.cycle - BAD_AT + 1
        if step.cycle >= GOOD_AT and state == "on":
            on = step.cycle - GOOD_AT + 1
        if on or step.cycle > GOOD_AT + 2 * MOST_UNTIL_ON:
            break
    return off, on


CASES = list(itertools.product((0.7, 0.8, 0.9, 0.97), (0.002, 0.02, 0.1), (1, 8), (True, False)))


@pytest.mark.parametrize(("good", "row_cost", "concurrency", "is_honest"), CASES[::5])
def test_off_within_fifty_cycles_and_on_again(good: float, row_cost: float, concurrency: int, is_honest: bool) -> None:
    off, on = cycles_until(good, row_cost, concurrency, is_honest=is_honest)
    assert 0 < off <= MOST_UNTIL_OFF
    assert 0 < on <= MOST_UNTIL_ON


@pytest.mark.full
@pytest.mark.parametrize(("good", "row_cost", "concurrency", "is_honest"), CASES)
def test_off_and_on_in_every_case(good: float, row_cost: float, concurrency: int, is_honest: bool) -> None:
    test_off_within_fifty_cycles_and_on_again(good, row_cost, concurrency, is_honest)


def test_reading_of_a_text_that_is_aborted_is_owed_all_the_same() -> None:
    run = Run(
        World((Class("code", lambda cycle: 0.9),), num_texts=16, concurrency=2, draft_cost=0.02, reading_cost=0.2)
    )
    steps = run.steps()
    assert isinstance(run.drafter, Priced)
    while not any(text.unpaid_s for text in run.running):
        next(steps)
    text = next(text for text in run.running if text.unpaid_s)
    unpaid_s = text.unpaid_s
    text.end("abort")
    run.drafting.stop(text)
    run.running.remove(text)
    step = next(steps)
    assert step.asked_s["code"] >= unpaid_s > 0.0
    assert text.unpaid_s == 0.0


def test_passes_that_take_longer_are_no_reading() -> None:
    """A draft model that has become slow is seen at once, and not spread over the words to come."""
    known = Class("code", lambda cycle: 0.8, num_words=2000)
    run = Run(World((known,), num_texts=1, draft_cost=0.05, slow_draft=suddenly(1.0, 40.0, at=200)))
    num_slow = 0
    for step in run.steps():
        num_slow += step.drafting_s > World.plain_s
        if step.cycle == 200:
            assert step.unpaid_s == 0.0
            assert step.asked_s["code"] == pytest.approx(step.drafting_s)
            assert step.drafting_s > World.plain_s
    assert num_slow <= 16, "and hardly ever asked again"

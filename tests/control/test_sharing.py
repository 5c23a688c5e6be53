"""Beside others a line is drafted for only while that brings something that could be noticed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from understudy.control.classes import Line
from understudy.control.sharing import LEAST_SHARE, REST_STEPS, TRIAL_STEPS, Sharing
from understudy.core.events import Decided, Event

CODE, CHAT = Line("code", 0), Line("chat", 0)
LITTLE, MUCH = 0.9 * LEAST_SHARE, 1.1 * LEAST_SHARE


def go_on(sharing: Sharing, lines: Sequence[Line], num_steps: int, **shares: float) -> frozenset[Line]:
    """So many steps of a millisecond, of which drafting saves the named line this share; who rests in the last one."""
    resting: frozenset[Line] = frozenset()
    for _ in range(num_steps):
        resting = sharing.resting(lines)
        for line in set(lines) - resting:
            passed_s = 1e-3 * lines.count(line) / len(lines)
            gained_s = shares.get(line.workload_class, 0.0) * passed_s
            sharing.observe(line, len(lines), passed_s=passed_s, gained_s=gained_s)
    return resting


def told() -> tuple[Sharing, list[Decided]]:
    events: list[Event] = []
    sharing = Sharing(events.append)
    return sharing, events  # type: ignore[return-value]


@pytest.mark.parametrize("num_texts", [2, 4, 8, 64])
def test_a_line_that_gains_little_beside_others_is_left_alone_and_tried_again(num_texts: int) -> None:
    sharing, events = told()
    lines = [CODE] * num_texts
    assert not go_on(sharing, lines, TRIAL_STEPS - 1, code=LITTLE)
    assert sharing.resting(lines) == {CODE}
    assert sharing.is_resting(CODE, num_texts)
    assert go_on(sharing, lines, REST_STEPS - 1) == {CODE}
    assert not go_on(sharing, lines, TRIAL_STEPS, code=MUCH)
    assert [(one.what, one.outcome) for one in events] == [("sharing", "off"), ("sharing", "probing")]
    assert events[0].subject == f"code at temperature 0, up to {num_texts} texts"
    assert "2.7%" in events[0].reason
    assert str(REST_STEPS) in events[0].reason


def test_one_that_gains_much_goes_on_and_is_looked_at_again_and_again() -> None:
    sharing, events = told()
    assert not go_on(sharing, [CODE] * 4, 5 * TRIAL_STEPS, code=MUCH)
    assert not events
    assert go_on(sharing, [CODE] * 4, TRIAL_STEPS, code=LITTLE), "what it gained before is not counted again"


def test_each_line_is_judged_by_itself_and_by_how_many_share_a_step() -> None:
    sharing, events = told()
    assert go_on(sharing, [CODE, CODE, CHAT], TRIAL_STEPS, code=MUCH, chat=LITTLE) == {CHAT}
    assert sharing.is_resting(CHAT, 4), "three or four"
    assert not sharing.is_resting(CHAT, 2)
    assert not sharing.is_resting(CHAT, 5)
    assert not sharing.is_resting(Line("chat", 2), 3)
    assert len(events) == 1


def test_a_text_that_is_alone_is_never_left_alone() -> None:
    sharing, events = told()
    assert not go_on(sharing, [CODE], 3 * TRIAL_STEPS, code=-1.0)
    assert not events
    assert not sharing.is_resting(CODE, 1)


def test_steps_that_were_slept_through_passed_and_gained_nothing() -> None:
    """One step in sixteen is awake and saves a fifth: that is little."""
    sharing, _ = told()
    for _ in range(TRIAL_STEPS // 16):
        resting = sharing.resting([CODE, CODE], num_slept=15, slept_s=15e-3)
        sharing.observe(CODE, 2, passed_s=1e-3, gained_s=0.2e-3)
    assert resting == {CODE}


def test_what_was_never_written_down_says_nothing() -> None:
    sharing, events = told()
    for _ in range(3 * TRIAL_STEPS):
        assert not sharing.resting([CODE, CODE])
    assert not events


def test_made_up_names_of_classes_take_no_memory() -> None:
    sharing, _ = told()
    for number in range(1000):
        sharing.resting([Line(f"class-{number}", 0)] * 2)
    assert len(sharing._kinds) < 50

"""Steps in which the cores were somebody else's are not held against drafts."""

from __future__ import annotations

import pytest

from tests.engine.engines import new_engine, steps, tiny_target
from understudy.control.planning import Worth
from understudy.core.request import Request, SamplingParams
from understudy.drafters.ngram import NgramDrafter
from understudy.engine.disturbance import Disturbance


def found(*steps_s: tuple[float, float], pause_s: float = 0.0, expected_s: float = 1.0) -> list[bool]:
    """Whether each step, of so many seconds in which the thread ran for so many, is left out."""
    wall = ran = 0.0
    disturbance = Disturbance(lambda: ran)
    left_out = []
    for passed_s, running_s in steps_s:
        wall += pause_s
        disturbance.begin(wall)
        wall, ran = wall + passed_s, ran + running_s
        left_out.append(disturbance.leaves_out(wall, expected_s))
    return left_out


def test_a_step_in_which_the_thread_did_not_run_is_left_out() -> None:
    usual = (0.004, 0.0039)
    assert found(usual, (0.040, 0.004), usual, (0.004, 0.0031), (0.004, 0.0029)) == [False, True, False, False, True]


def test_where_most_steps_are_like_that_all_of_them_count() -> None:
    left_out = found(*[(0.010, 0.004)] * 40)
    assert left_out[:3] == [True] * 3
    assert not any(left_out[6:])
    assert found(*[(0.010, 0.004)] * 40, *[(0.004, 0.004)] * 40, (0.010, 0.004))[-1], "until it is quiet again"


def test_after_a_pause_a_step_that_took_several_times_what_was_expected_is_left_out() -> None:
    slow, usual = (0.080, 0.080), (0.004, 0.004)
    assert found(slow, usual, slow, expected_s=0.004) == [True, False, True], "a process that begins is like one"
    steps_s = [usual] * 40 + [slow]
    assert not found(*steps_s, expected_s=0.004)[-1], "in the midst of work it counts"
    assert found(*steps_s, pause_s=2.0, expected_s=0.004)[-1]
    assert not found(*steps_s, pause_s=2.0, expected_s=0.030)[-1], "a long prompt takes its time"


def test_without_a_thread_to_look_at_every_step_counts() -> None:
    disturbance = Disturbance(None)
    disturbance.begin(0.0)
    assert not disturbance.leaves_out(100.0, 0.01)


def test_what_a_disturbed_ask_took_is_taken_back() -> None:
    worth = Worth()
    worth.take_back()
    worth.observe("chat", saved=0.1, spent=0.05)
    worth.observe("chat", saved=0.0, spent=9.0)
    assert not worth.asks("chat")
    worth.take_back()
    assert worth.asks("chat")
    worth.observe("chat", saved=0.0, spent=9.0)
    worth.take_back()
    worth.take_back()
    assert worth.asks("chat"), "only the last one"


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_an_engine_writes_no_disturbed_step_down(is_disturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(tiny_target("llama"), drafters=[NgramDrafter()])
    monkeypatch.setattr(engine._disturbance, "leaves_out", lambda now_s, expected_s: is_disturbed)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit(Request(request_id="r", prompt_ids=(5, 6, 7, 8) * 4, sampling=sampling))
    for _ in steps(engine):
        pass
    assert (engine.explain().num_steps == 0) == is_disturbed

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.conftest import TEXTS
from tests.race.fakes import Clock, Step, heat_of, lane_of
from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, load_target
from understudy.control.cost import CostModel
from understudy.core.request import SamplingParams
from understudy.parity.side_by_side import engine_pair
from understudy.race.lanes import SLICE_S, Heat, Question, next_limit, run_heat, run_race

paces = st.lists(st.floats(0.001, 0.4), min_size=1, max_size=40)
FRAME_S = 0.02


def test_the_limit_is_a_slice_beyond_the_lane_that_is_behind() -> None:
    assert next_limit([0.0, 0.0]) == SLICE_S
    assert next_limit([3.0, 1.0]) == 1.0 + SLICE_S
    assert next_limit([2.5]) == 2.5 + SLICE_S


@settings(max_examples=200, deadline=None)
@given(paces, paces, st.floats(0.0, 0.2))
def test_each_lane_pays_for_its_own_steps_and_nothing_else(
    plain_s: Sequence[float], speculative_s: Sequence[float], submit_s: float
) -> None:
    clock = Clock()
    plain = lane_of([Step(seconds=seconds) for seconds in plain_s], clock)
    speculative = lane_of([Step(seconds=seconds) for seconds in speculative_s], clock, submit_s=submit_s)
    num_frames = 0
    longest_s = max(*plain_s, *speculative_s, submit_s)

    def on_frame(heat: Heat) -> None:
        nonlocal num_frames
        num_frames += 1
        clock.now_s += FRAME_S  # drawing takes time, and no lane's
        if not (plain.is_finished or speculative.is_finished):
            assert abs(plain.clock_s - speculative.clock_s) <= SLICE_S + longest_s

    run_heat(heat_of(plain, speculative), on_frame)
    assert plain.clock_s == pytest.approx(sum(plain_s))
    assert speculative.clock_s == pytest.approx(submit_s + sum(speculative_s))
    assert clock.now_s == pytest.approx(plain.clock_s + speculative.clock_s + num_frames * FRAME_S)


def test_the_faster_lane_gets_ahead_at_its_true_pace() -> None:
    clock = Clock()
    plain = lane_of([Step(seconds=0.01)] * 90, clock)
    speculative = lane_of([Step([("a", "suffix"), ("b", "suffix"), ("c", "")], seconds=0.01)] * 30, clock)
    ratios: list[float] = []

    def on_frame(heat: Heat) -> None:
        if plain.token_ids and not speculative.is_finished:
            ratios.append(len(speculative.token_ids) / len(plain.token_ids))

    run_heat(heat_of(plain, speculative), on_frame)
    assert len(ratios) >= 5
    assert all(ratio == pytest.approx(3.0, rel=0.4) for ratio in ratios)


def test_a_lane_in_a_long_step_waits_for_the_other_to_catch_up() -> None:
    clock = Clock()
    plain = lane_of([Step(seconds=1.0), *[Step(seconds=0.01)] * 10], clock)
    speculative = lane_of([Step(seconds=0.1)] * 20, clock)
    said: list[tuple[int, int]] = []
    run_heat(heat_of(plain, speculative), lambda heat: said.append((len(plain.token_ids), len(speculative.token_ids))))
    assert (1, 9) in said
    assert (2, 9) not in said


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("race") / "tiny")
    return load_target(folder, num_threads=1)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_pieces_are_the_text_and_sources_are_what_was_accepted(
    target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Random words of a byte-level vocabulary: half characters, ends of text and all."""
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: CostModel({1: 1.0, 256: 1.0}))
    questions = [Question("chat", text[:20], tuple(target.tokenizer.encode(text))) for text in TEXTS]
    sampling = SamplingParams(temperature=temperature, max_tokens=60, seed=2)
    engines = engine_pair(
        target, [question.prompt_ids for question in questions], max_tokens=60, drafters=("suffix", "ngram")
    )
    heats = list(run_race(engines, target.tokenizer, questions, sampling, on_frame=lambda heat: None))
    accepted: Counter[str] = Counter()
    for heat in heats:
        assert heat.is_same
        for lane in heat.lanes:
            assert "".join(piece.text for piece in lane.pieces) == lane.text
            assert lane.accepted_by_drafter.total() == lane.counts.accepted
        assert heat.plain.counts.drafted == 0
        accepted += heat.speculative.accepted_by_drafter
    assert accepted["suffix"] > 0
    assert {heat.plain.finish_reason for heat in heats} >= {"length"}


def test_speculation_sees_every_prompt_fresh(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt again is no easier: nothing was learned from the answer, and no prefix was kept."""
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: CostModel({1: 1.0, 256: 1.0}))
    question = Question("chat", "", tuple(target.tokenizer.encode(TEXTS[0] * 3)))
    engines = engine_pair(target, [question.prompt_ids], max_tokens=30, drafters=("suffix",))
    sampling = SamplingParams(temperature=1.0, max_tokens=30, seed=4)
    heats = list(run_race(engines, target.tokenizer, [question] * 2, sampling, on_frame=lambda heat: None))
    assert heats[0].speculative.token_ids == heats[1].speculative.token_ids
    accepted = [heat.speculative.counts.accepted for heat in heats]
    assert accepted[0] > 0
    assert accepted[1] <= accepted[0] + 5, "one that remembered would foresee nearly all thirty"
    assert [heat.speculative._sequence.cached_tokens for heat in heats] == [0, 0]

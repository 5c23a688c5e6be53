"""The time of cycles, where it can be worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.advise.made_up import scored, transcript
from understudy.advise.arithmetic import CycleCost
from understudy.advise.arithmetic import speedup as by_arithmetic
from understudy.advise.scores import ScoredCycle, TimeModel, modelled_s
from understudy.advise.timing import (
    Costs,
    HostCost,
    PassProfile,
    SharedCost,
    expected_speedup,
    fit_host,
    measure_passes,
    plain_cycles,
    seconds_of,
)
from understudy.control.cost import CostModel, Load
from understudy.core.events import Cycle

FLAT = CostModel({1: 1.0, 1000: 1.0})
LINEAR = CostModel({1: 1.0, 1001: 101.0})
"""A tenth for each row but the first."""


def cycle(**changes: object) -> ScoredCycle:
    plain = ScoredCycle(context=10, rows=0, depth=0, accepted=0, emitted=1, asking_s=0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_step_is_the_sum_of_its_parts() -> None:
    cost = CostModel({1: 1.0, 11: 2.0}, per_key_s=0.01, per_read_s=0.001)
    costs = Costs(cost=cost, host=HostCost(0.05, 0.1, 0.02))
    two = [cycle(rows=3, emitted=2, asking_s=0.5), cycle(context=20)]
    # five rows, thirty keys, 4 * 10 + 20 reads; two sequences, one word beyond theirs
    assert costs.step_s(two) == pytest.approx(1.4 + 0.3 + 0.06 + 0.05 + 0.2 + 0.02 + 0.5)


def test_passes_of_a_draft_are_shared() -> None:
    costs = Costs(cost=FLAT, draft_cost=CostModel({1: 0.1, 2: 0.15, 40: 0.5}))
    one = cycle(rows=3, draft_passes=3, read_rows=1)
    two = cycle(rows=1, draft_passes=1, read_rows=1)
    assert costs.step_s([one]) == pytest.approx(1.0 + 3 * 0.1)
    assert costs.step_s([one, two]) == pytest.approx(1.0 + 0.15 + 2 * 0.1)
    assert costs.step_s([cycle(), cycle()]) == pytest.approx(1.0)
    reading = cycle(read_rows=40, draft_passes=1)  # the prompt, and nothing said yet
    assert costs.step_s([reading]) == pytest.approx(1.5)


def test_shared_pass_costs_what_all_rows_cost() -> None:
    cost = CostModel({1: 1.0, 2: 1.1, 8: 2.0}, per_key_s=0.01, per_read_s=0.001)
    shared = SharedCost.of(cost, 4)
    assert shared.step_s(Load.of([(2, 10)])) == pytest.approx(cost.step_s(Load.of([(2, 10)] * 4)))
    shared.observe(Load(2, 10, 20), 99.0)
    assert shared.step_s(Load.of([(2, 10)])) == pytest.approx(cost.step_s(Load.of([(2, 10)] * 4)))
    assert SharedCost.of(cost, 1).step_s(Load(8, 5, 40)) == pytest.approx(cost.step_s(Load(8, 5, 40)))


def test_plain_text_has_a_pass_for_each_word_but_the_first() -> None:
    text = transcript(num_tokens=4)
    assert [found.context for found in plain_cycles(text)] == [20, 21, 22]
    assert seconds_of([plain_cycles(text)], Costs(cost=FLAT), 1) == [3.0]


def test_lanes_share_steps_and_the_next_text_takes_a_place_that_is_free() -> None:
    texts = [plain_cycles(transcript(num_tokens=count)) for count in (5, 3, 3, 1)]
    costs = Costs(cost=LINEAR)
    alone = seconds_of(texts, costs, 1)
    assert alone == pytest.approx([4.0, 2.0, 2.0, 0.0])
    two = seconds_of(texts, costs, 2)
    assert sum(two) == pytest.approx(4 * 1.1), "four steps of two rows: the third text follows the second"
    assert two == pytest.approx([4 * 0.55, 2 * 0.55, 2 * 0.55, 0.0])
    assert sum(seconds_of(texts, costs, 8)) == pytest.approx(2 * 1.2 + 2 * 1.0)
    assert seconds_of([], costs, 2) == []
    assert seconds_of([[], []], costs, 1) == [0.0, 0.0]


def test_always_right_and_never_right() -> None:
    texts = [transcript(str(number)) for number in range(4)]
    costs = Costs(cost=FLAT)
    right = expected_speedup(scored(texts, 4, 4), costs)
    assert right is not None
    assert right.value == pytest.approx(5.0), "rows cost nothing and four words of each draft are right"
    assert right.low == right.high == pytest.approx(5.0), "the texts are all alike"
    wrong = expected_speedup(scored(texts, 4, 0), Costs(cost=LINEAR))
    assert wrong is not None
    # in the last cycles there is no room for a whole draft
    assert 1 / 1.4 <= wrong.value < 1 / 1.33
    assert expected_speedup(scored([transcript(num_tokens=1)], 4, 4), costs) is None


def test_batch_makes_rows_dearer() -> None:
    texts = [transcript(str(number)) for number in range(8)]
    found = scored(texts, 4, 1)
    gains = [expected_speedup(found, Costs(cost=LINEAR), concurrency=count) for count in (1, 4, 8)]
    values = [gain.value for gain in gains if gain is not None]
    assert len(values) == 3
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 4])
def test_arithmetic_and_simulation_agree(depth: int, batch: int) -> None:
    """Long texts with a right first word: acceptance by position is 1, then 0."""
    texts = [transcript(str(number), num_tokens=2001) for number in range(batch)]
    found = expected_speedup(scored(texts, depth, 1), Costs(cost=LINEAR), concurrency=batch)
    assert found is not None
    expected = by_arithmetic((1.0, 0.0), depth, CycleCost(row_cost=0.1, batch=batch))
    assert found.value == pytest.approx(expected, rel=0.01)


def test_time_model_of_the_replay_says_the_same_for_one_text_alone() -> None:
    texts = [transcript(str(number)) for number in range(3)]
    found = scored(texts, 3, 2, asking_s=0.01)
    costs = Costs(cost=LINEAR)
    model = TimeModel(LINEAR)
    assert sum(seconds_of([s.cycles for s in found.scores], costs, 1)) == pytest.approx(modelled_s(found.scores, model))


def test_measured_passes_are_those_of_the_machine_whatever_its_drift() -> None:
    dice = random.Random(5)
    speed = [1.0]

    def time_step(rows: int, context: int) -> float:
        speed[0] = max(0.5, min(2.0, speed[0] + dice.uniform(-0.05, 0.05)))
        return speed[0] * (0.010 + 0.001 * rows + 1e-6 * context + 2e-7 * rows * context)

    found = measure_passes(PassProfile(time_step, long_context=1000, most_rows=32), budget_s=0.0)
    one = found.rows_s[1]
    for rows in (2, 8, 16, 32):
        assert found.rows_s[rows] / one == pytest.approx((10 + rows) / 11, rel=0.1)
    assert max(found.rows_s) == 32
    assert found.per_key_s >= 0.0
    assert found.per_read_s > 0.0


def step(**changes: object) -> Cycle:
    plain = Cycle(
        num_sequences=1,
        num_prompt_rows=0,
        num_draft_rows=0,
        num_scout_rows=0,
        num_emitted=1,
        num_accepted=0,
        context=10,
        draft_s=0.001,
        forward_s=0.010,
        sample_s=0.0,
        total_s=0.0,
        reason="",
        num_rows=1,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_host_time_is_found_beside_outliers_and_prompts() -> None:
    truth = HostCost(0.00007, 0.00002, 0.00005)
    steps = [
        step(
            num_sequences=count,
            num_emitted=count * words,
            total_s=0.011 + truth.seconds(count, count * words),
        )
        for count in (1, 4)
        for words in (1, 2, 5)
        for _ in range(3)
    ]
    steps += [step(total_s=0.5), step(num_sequences=2, total_s=0.5), step(num_prompt_rows=7, total_s=9.0)]
    host = fit_host(steps)
    assert (host.step_s, host.sequence_s, host.word_s) == pytest.approx((0.00007, 0.00002, 0.00005))


def test_host_time_where_little_was_seen() -> None:
    assert fit_host([]) == HostCost()
    one_size = fit_host([step(total_s=0.0113)] * 3)
    assert one_size.seconds(1, 1) == pytest.approx(0.0003)
    assert one_size.word_s == 0.0
    # two texts took less than one: that is chance, and nothing takes less than no time
    falling = fit_host([step(total_s=0.0113), step(num_sequences=2, num_emitted=2, total_s=0.0112)])
    assert falling.sequence_s == 0.0
    assert falling.step_s == pytest.approx(0.00025)
    assert fit_host([step(total_s=0.011)]) == HostCost(), "and what took nothing costs nothing"

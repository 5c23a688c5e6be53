"""The formulas, against the published table and against a simulation that knows none of them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.advise.arithmetic import (
    CycleCost,
    best,
    break_even,
    sequences_displaced,
    speedup,
    stationary_depth,
    survival,
    table,
    words_per_cycle,
)

RATIOS = (0.02, 0.05, 0.10, 0.20, 0.30, 0.50)
BEST = {
    0.5: ((4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.15), (0, 1.00)),
    0.6: ((6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23), (1, 1.07)),
    0.7: ((8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37), (1, 1.13)),
    0.8: ((11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55), (2, 1.22)),
    0.9: ((19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87), (3, 1.38)),
}
"""Best depth and speed-up by acceptance, one for each cost ratio: worked out apart from this code."""

rates = st.floats(0.0, 1.0)
costs = st.builds(
    CycleCost,
    cost_ratio=st.floats(0.0, 2.0),
    row_cost=st.floats(0.0, 2.0),
    block_cost=st.floats(0.0, 2.0),
    batch=st.integers(1, 64),
)


@pytest.mark.parametrize("acceptance", BEST)
@pytest.mark.parametrize("column", range(len(RATIOS)))
def test_best_depth_is_the_published_one(acceptance: float, column: int) -> None:
    depth, gain = BEST[acceptance][column]
    point = best(acceptance, CycleCost(cost_ratio=RATIOS[column]))
    assert point.depth == depth
    assert point.speedup == pytest.approx(gain, abs=0.0051)


@pytest.mark.parametrize(
    ("row_cost", "gains"), [(0.1, (1.35, 1.75, 2.78)), (0.3, (1.11, 1.29, 1.71)), (1.0, (1.0, 1.0, 1.0))]
)
def test_rows_that_cost_time(row_cost: float, gains: tuple[float, ...]) -> None:
    cost = CycleCost(cost_ratio=0.05, row_cost=row_cost)
    for acceptance, gain in zip((0.5, 0.7, 0.9), gains, strict=True):
        assert best(acceptance, cost).speedup == pytest.approx(gain, abs=0.0051)


def test_block_that_is_drafted_in_one_pass() -> None:
    cost = CycleCost(block_cost=0.10)
    for acceptance, gain in zip((0.6, 0.7, 0.8, 0.9), (2.23, 2.86, 3.78, 5.18), strict=True):
        assert speedup(acceptance, 7, cost) == pytest.approx(gain, abs=0.0051)


@given(rates, st.integers(0, 20))
def test_constant_acceptance_has_a_closed_form(acceptance: float, depth: int) -> None:
    closed = depth + 1 if acceptance == 1.0 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    assert words_per_cycle(acceptance, depth) == pytest.approx(closed, rel=1e-6)


def test_words_per_cycle_are_what_a_simulation_counts() -> None:
    dice = random.Random(3)
    acceptance = (0.9, 0.5, 0.8)
    said = 0
    for _ in range(40_000):
        said += 1
        for rate in acceptance:
            if dice.random() >= rate:
                break
            said += 1
    assert words_per_cycle(acceptance, 3) == pytest.approx(said / 40_000, rel=0.01)


def test_last_known_place_goes_on() -> None:
    assert survival((0.8, 0.5), 4) == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert survival((), 2) == [0.0, 0.0]
    assert survival(0.5, 0) == []


@given(costs, st.integers(1, 16))
def test_break_even_divides_gain_from_loss(cost: CycleCost, depth: int) -> None:
    rate = break_even(cost, depth)
    if rate is None:
        assert speedup(1.0, depth, cost) <= 1.0
        return
    assert speedup(min(1.0, rate + 1e-6), depth, cost) >= 1.0
    assert rate < 1e-6 or speedup(rate - 1e-6, depth, cost) <= 1.0


@given(st.floats(0.001, 0.9), st.floats(0.0, 0.5))
def test_break_even_of_flat_verification_is_the_cost_ratio(ratio: float, row_cost: float) -> None:
    cost = CycleCost(cost_ratio=ratio, row_cost=row_cost)
    found = break_even(cost)
    if ratio + row_cost >= 1.0:
        assert found is None or found == pytest.approx(1.0)
    else:
        assert found == pytest.approx(ratio + row_cost, abs=1e-9)


@given(st.floats(0.05, 0.97), st.floats(0.005, 0.9))
def test_best_depth_lies_beside_the_stationary_point(acceptance: float, ratio: float) -> None:
    cost = CycleCost(cost_ratio=ratio)
    point = best(acceptance, cost, most_depth=400)
    assert abs(point.depth - stationary_depth(acceptance, cost)) <= 1.0


def test_stationary_point_at_the_ends() -> None:
    assert stationary_depth(1.0, CycleCost(cost_ratio=0.1)) == math.inf
    assert stationary_depth(0.5, CycleCost()) == math.inf
    assert stationary_depth(0.0, CycleCost()) == 0.0
    assert stationary_depth(0.1, CycleCost(cost_ratio=0.9)) == 0.0


@given(rates, costs)
def test_best_is_never_worse_than_plain(acceptance: float, cost: CycleCost) -> None:
    assert best(acceptance, cost).speedup >= 1.0


def test_batch_makes_a_slot_dearer_where_rows_cost_time() -> None:
    alone, full = (CycleCost(cost_ratio=0.1, row_cost=0.05, batch=batch) for batch in (1, 64))
    assert best(0.7, full).speedup < best(0.7, alone).speedup
    assert full.slot == pytest.approx(0.1 + 0.05 * 64 / (1 + 0.05 * 63))
    flat = [CycleCost(cost_ratio=0.1, batch=batch).slot for batch in (1, 64)]
    assert flat[0] == flat[1]


def test_table_begins_with_plain() -> None:
    points = table(0.6, CycleCost(cost_ratio=0.1), [0, 3])
    assert (points[0].words_per_cycle, points[0].speedup) == (1.0, 1.0)
    assert points[1].speedup == pytest.approx(1.67, abs=0.005)


def test_memory_of_a_draft_in_sequences() -> None:
    assert sequences_displaced(1 << 30, kv_bytes_per_token=1 << 16, context=4096) == 4.0

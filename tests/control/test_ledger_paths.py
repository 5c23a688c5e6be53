"""Hypothesis looks for a path past the ledgers' bound, and finds none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.ledger_paths import Move, Path, long_path
from understudy.control.ledger import ALLOWED, WINDOW_S, WindowLedger, WorstCases

COUNTS = st.tuples(st.integers(0, 16), st.integers(0, 16))
MOVES = st.lists(
    st.builds(
        Move,
        rows=COUNTS,
        right=COUNTS,
        slowness=st.one_of(st.just(1.0), st.floats(-1.0, 1.0), st.floats(1.0, 20.0)),
        asking=st.one_of(st.just(0.0), st.floats(0.0, 3.0)),
        is_priced=st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(moves=MOVES, times=st.integers(1, 8))
def test_no_path_leads_past_the_bound(moves: list[Move], times: int) -> None:
    path = Path()
    for move in moves * times:
        path.play(move)


@pytest.mark.full
@settings(deadline=None, max_examples=5000)
@given(moves=MOVES, times=st.integers(1, 12))
def test_no_path_leads_past_the_bound_at_length(moves: list[Move], times: int) -> None:
    path = Path()
    for move in moves * times:
        path.play(move)


def test_long_paths_are_refused_and_go_on() -> None:
    paths = [long_path(seed) for seed in range(6)]
    assert sum(path.num_bought for path in paths) > 50, "a ledger that permits nothing keeps any promise"
    assert sum(path.num_refused for path in paths) > 20


def test_window_by_hand() -> None:
    ledger = WindowLedger()
    ledger.add(plain_s=1.0, debt_s=0.0, step_s=1.0, is_drafted=False)
    assert ledger.allowance_s == pytest.approx(ALLOWED + 1.0)
    assert ledger.permits(3.0), "the first that is tried is the one cycle of the window"
    ledger.add(plain_s=1.0, debt_s=3.0, step_s=1.0, is_drafted=True)
    assert not ledger.permits(0.1)
    assert not ledger.is_over
    ledger.add(plain_s=1.0, debt_s=0.2, step_s=1.0, is_drafted=True)
    assert ledger.is_over
    ledger.add(plain_s=1.0, debt_s=-3.0, step_s=1.0, is_drafted=True)
    assert ledger.permits(2.5)
    assert ledger.num_refused == 1


def test_window_forgets_debt_and_most_of_its_credit() -> None:
    for debt_s, kept_s in ((5.0, 0.0), (-0.5, -0.5), (-50.0, -ALLOWED * WINDOW_S)):
        ledger = WindowLedger()
        ledger.add(plain_s=WINDOW_S, debt_s=debt_s, step_s=0.1, is_drafted=True)
        assert (ledger.plain_s, ledger.debt_s, ledger.cycle_s) == (0.0, pytest.approx(kept_s), 0.0)


def test_worst_case_is_the_slowest_of_its_size_and_a_quarter_more() -> None:
    worst = WorstCases()
    assert worst.of(4, 1.0) == 1.25
    assert not worst.observe(4, predicted_s=1.0, seconds=1.2)
    assert worst.of(5, 2.0) == pytest.approx(1.2 * 1.25 * 2.0), "sizes are powers of two"
    assert worst.of(8, 1.0) == 1.25
    assert worst.observe(4, predicted_s=1.0, seconds=4.0), "an overrun"
    assert worst.num_overruns == 1
    assert worst.of(4, 1.0) == pytest.approx(5.0)
    for _ in range(2):
        worst.observe(8, predicted_s=WINDOW_S, seconds=WINDOW_S)
    assert worst.of(4, 1.0) == 1.25, "what is older than two windows is forgotten"

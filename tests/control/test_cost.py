"""What a pass costs: straight lines between measurements, corrected by live steps, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.control.cost import PROFILED_ROWS, CostModel, Load, profile, stepped


def at(rows: int, *, keys: int = 0, reads: int = 0) -> Load:
    return Load(rows, keys, reads)


def test_load_adds_up_sequences() -> None:
    assert Load.of([(1, 100), (5, 20), (3, 0)]) == Load(rows=9, keys=120, reads=200)
    assert Load.of([]) == Load(0, 0, 0)


def test_measured_counts_are_given_back() -> None:
    table = {1: 4.0, 2: 3.0, 8: 10.0}
    model = CostModel(dict(table))
    assert [model.step_s(at(rows)) for rows in table] == [4.0, 3.0, 10.0]


def test_between_two_counts_lies_a_straight_line() -> None:
    model = CostModel({1: 4.0, 2: 3.0, 8: 15.0, 10: 15.0})
    assert model.step_s(at(5)) == pytest.approx(9.0)
    assert model.step_s(at(9)) == pytest.approx(15.0)


def test_beyond_the_table_the_last_slope_goes_on() -> None:
    model = CostModel({1: 1.0, 4: 2.0, 8: 6.0})
    assert model.step_s(at(20)) == pytest.approx(18.0)


def test_beyond_a_table_that_falls_time_stays_as_it_was() -> None:
    model = CostModel({1: 4.0, 2: 1.0})
    assert model.step_s(at(100)) == pytest.approx(1.0)


def test_one_disturbed_entry_does_not_make_many_rows_free() -> None:
    model = CostModel({1: 1.0, 24: 9.0, 32: 8.75})
    assert model.step_s(at(1032)) == pytest.approx(8.75 + 1000 * 0.25)


def test_below_the_table_the_first_slope_goes_on() -> None:
    assert CostModel({2: 4.0, 4: 6.0}).step_s(at(1)) == pytest.approx(3.0)


def test_single_measurement_is_a_price_per_row() -> None:
    model = CostModel({2: 4.0})
    assert [model.step_s(at(rows)) for rows in (1, 2, 6)] == [2.0, 4.0, 12.0]


def test_where_rows_are_rounded_up_one_more_costs_a_whole_step() -> None:
    model = stepped(CostModel({1: 1.0, 4: 2.0, 16: 5.0}, per_key_s=0.01, per_read_s=0.001))
    assert [model.step_s(at(rows)) for rows in (1, 2, 3, 4, 5, 9, 16)] == [1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0]
    assert model.step_s(at(17)) > 5.0
    assert (model.per_key_s, model.per_read_s) == (0.01, 0.001)


def test_context_costs_per_key_and_per_read() -> None:
    model = CostModel({1: 1.0, 8: 2.0}, per_key_s=0.01, per_read_s=0.001)
    assert model.step_s(Load.of([(8, 100)])) == pytest.approx(2.0 + 1.0 + 0.8)


@settings(deadline=None)
@given(
    rows=st.integers(1, 400),
    table=st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1, max_size=6),
)
def test_a_pass_always_takes_some_time(rows: int, table: dict[int, float]) -> None:
    assert CostModel(table).step_s(at(rows)) > 0.0


def test_live_steps_are_soon_predicted() -> None:
    model = CostModel({1: 1.0, 4: 2.0, 8: 3.0})
    for _ in range(200):
        model.observe(at(4), 2.6)
    assert model.step_s(at(4)) == pytest.approx(2.6, rel=1e-3)
    assert model.step_s(at(8)) / model.step_s(at(1)) == pytest.approx(3.0), "the machine is slower as a whole"
    assert model.step_s(at(4)) / model.step_s(at(1)) < 2.1


def test_an_entry_that_was_measured_wrongly_is_put_right_in_time() -> None:
    model = CostModel({1: 1.0, 4: 2.0})
    for _ in range(2000):
        model.observe(at(1), 1.0)
        model.observe(at(4), 2.2)
    assert model.step_s(at(4)) / model.step_s(at(1)) == pytest.approx(2.2, rel=0.02)


def test_a_machine_that_becomes_slower_does_not_change_what_a_row_costs_beside_another() -> None:
    """Only single rows are computed for a while, at twice the time: eight rows did not become cheap."""
    model = CostModel({1: 1.0, 8: 1.5})
    for _ in range(100):
        model.observe(at(1), 2.0)
    assert 1.35 < model.step_s(at(8)) / model.step_s(at(1)) <= 1.5
    assert model.step_s(at(1)) == pytest.approx(2.0, rel=1e-3)


def test_live_steps_with_context_leave_the_price_of_context_alone() -> None:
    model = CostModel({1: 1.0}, per_key_s=0.01)
    for _ in range(2000):
        model.observe(Load.of([(1, 100)]), 2.5)
    assert model.step_s(Load.of([(1, 100)])) == pytest.approx(2.5, rel=1e-3)
    assert model.per_key_s == 0.01


@pytest.mark.parametrize(("seconds", "after"), [(1e9, 2**0.11), (0.0, 0.5**0.11)])
def test_one_odd_step_moves_little(seconds: float, after: float) -> None:
    model = CostModel({1: 1.0})
    model.observe(at(1), seconds)
    assert model.step_s(at(1)) == pytest.approx(after)


def test_steps_beyond_the_table_teach_nothing() -> None:
    model = CostModel({1: 1.0, 8: 2.0})
    model.observe(at(9), 100.0)
    assert (model.rows_s, model.drift) == ({1: 1.0, 8: 2.0}, 1.0)


def test_profile_finds_the_prices_of_a_made_up_machine() -> None:
    asked: list[tuple[int, int]] = []

    def time_step(rows: int, context: int) -> float:
        asked.append((rows, context))
        return 0.01 + 0.002 * rows + 1e-5 * context + 2e-6 * rows * context

    model = profile(time_step, long_context=1000)
    assert {rows for rows, _ in asked} == set(PROFILED_ROWS)
    assert model.per_key_s == pytest.approx(1e-5)
    assert model.per_read_s == pytest.approx(2e-6)
    for rows, context in ((1, 0), (5, 300), (20, 2000)):
        wanted = 0.01 + 0.002 * rows + 1e-5 * context + 2e-6 * rows * context
        assert model.step_s(Load.of([(rows, context)])) == pytest.approx(wanted)


def test_profile_takes_the_least_disturbed_of_its_repeats() -> None:
    calls: dict[tuple[int, int], int] = {}

    def time_step(rows: int, context: int) -> float:
        calls[rows, context] = calls.get((rows, context), 0) + 1
        return 1.0 if calls[rows, context] > 1 else 50.0

    model = profile(time_step, long_context=10, repeats=2)
    assert set(model.rows_s.values()) == {1.0}


def test_profile_goes_on_until_the_machine_is_calm() -> None:
    """Somebody else had the cores during the first sweeps: what is believed is what it takes without them."""
    num_points, calls = len(PROFILED_ROWS) + 2, 0

    def time_step(rows: int, context: int) -> float:
        nonlocal calls
        calls += 1
        return (10.0 - 2.0 * min(4, calls // num_points)) * (1.0 + rows / 10)

    model = profile(time_step, long_context=10)
    assert model.rows_s[1] == pytest.approx(2.0 * 1.1)
    assert calls // num_points == 6, "once more than it became faster"


def test_profile_of_a_machine_that_is_never_calm_comes_to_an_end() -> None:
    calls = 0

    def time_step(rows: int, context: int) -> float:
        nonlocal calls
        calls += 1
        return 0.99**calls

    profile(time_step, long_context=10)
    assert calls == 8 * (len(PROFILED_ROWS) + 2)


def test_machine_that_was_busy_while_it_was_profiled_is_soon_known() -> None:
    model = CostModel({1: 40.0, 4: 50.0})
    for _ in range(100):
        model.observe(at(1), 4.0)
    assert model.step_s(at(1)) == pytest.approx(4.0, rel=0.01)


def test_profile_does_not_believe_that_fewer_rows_take_longer() -> None:
    model = profile(lambda rows, context: {3: 9.0, 12: 7.0}.get(rows, 1.0 + rows / 10), long_context=10)
    assert model.rows_s[3] == model.rows_s[4]
    assert model.rows_s[12] == model.rows_s[16]


def test_profile_of_noise_gives_no_negative_price() -> None:
    model = profile(lambda rows, context: 1.0 if context else 2.0, long_context=100)
    assert model.per_key_s == 0.0
    assert model.per_read_s == 0.0


def test_nothing_wanders_without_bound() -> None:
    model = CostModel({1: 1.0, 8: 2.0}, per_key_s=1.0)
    for _ in range(2000):
        model.observe(Load(1, 50, 50), 1e-6)
    assert model.rows_s[1] == pytest.approx(0.8)
    assert model.drift == 1.0 / 32.0
    for _ in range(2000):
        model.observe(Load(1, 0, 0), 1e6)
    assert model.rows_s[1] == pytest.approx(1.25)
    assert model.drift == 32.0


def test_table_that_falls_is_followed_but_no_multiple_of_it() -> None:
    model = CostModel({1: 1.4, 32: 0.8}, row_factor=8.0)
    assert model.step_s(Load(32, 0, 0), Load(1, 0, 0)) == pytest.approx(0.8)
    model = CostModel({1: 1.0, 32: 2.0}, row_factor=8.0)
    assert model.step_s(Load(32, 0, 0), Load(1, 0, 0)) == pytest.approx(9.0)

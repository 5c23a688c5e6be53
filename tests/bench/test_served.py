import pytest

from tests.bench.made_up import answer
from understudy.bench.served import Served, StepTime, covered_s
from understudy.core.events import Cycle


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(5.0, 6.0), (0.0, 2.0)], 3.0),
        ([(0.0, 9.0), (1.0, 2.0), (8.0, 10.0)], 10.0),
    ],
)
def test_overlapping_time_is_counted_once(spans: list[tuple[float, float]], expected: float) -> None:
    assert covered_s(spans) == pytest.approx(expected)


def test_latencies_by_hand() -> None:
    """Due at 2 s, first token at 2.5 s, the last of five at 4.5 s."""
    one = answer(start_s=2.0, first_s=2.5, last_s=4.5, ended_s=4.6)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(500)
    assert one.request_ms == pytest.approx(2600)


def test_what_was_never_said_has_no_latency() -> None:
    assert answer(first_s=None).ttft_ms is None
    assert answer(first_s=None).tpot_ms is None
    assert answer(num_tokens=1).tpot_ms is None


def test_a_unit_sums_up_its_answers() -> None:
    served = Served([answer(seconds=2.0), answer(seconds=2.0, start_s=1.0), answer(start_s=9.0, error="gone")])
    assert served.num_tokens == 15
    assert served.busy_s == pytest.approx(4.0)
    assert served.errors == ["gone"]


def test_step_times_add_up() -> None:
    cycle = Cycle(1, 0, 0, 0, 1, 0, 8, draft_s=1.0, forward_s=2.0, sample_s=3.0, total_s=6.0, reason="", num_rows=2)
    steps = StepTime()
    steps.count(cycle)
    steps.count(cycle)
    steps.add(StepTime(1, 10.0, 10.0, 10.0, 5))
    assert steps == StepTime(3, 12.0, 14.0, 16.0, 25), "both passes attend to 8 tokens and to their own 2"

import math

import pytest

from understudy.bench.statistics import Pair, percentile, speedup, speedup_estimate


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),  # in any order
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8),  # place 3.8 of 0 to 4
        ([1.0, 2.0, 3.0], 0.0, 1.0),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
    ],
)
def test_percentiles_by_hand(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None


def test_the_speedup_is_the_ratio_of_total_times_and_no_mean_of_ratios() -> None:
    pairs = [Pair(2.0, 10, 1.0, 10), Pair(3.0, 10, 3.0, 10)]
    assert speedup(pairs) == pytest.approx(5.0 / 4.0)  # the mean of ratios would be 1.5


def test_with_different_tokens_it_is_the_ratio_of_speeds() -> None:
    assert speedup([Pair(1.0, 10, 1.0, 30)]) == pytest.approx(3.0)


@pytest.mark.parametrize("pair", [Pair(1.0, 0, 1.0, 10), Pair(1.0, 10, 1.0, 0), Pair(0.0, 10, 1.0, 10)])
def test_no_speedup_of_nothing(pair: Pair) -> None:
    assert speedup([pair]) is None
    assert speedup_estimate([pair]) is None
    assert speedup_estimate([]) is None


def test_a_single_pair_has_the_point_for_an_interval() -> None:
    estimate = speedup_estimate([Pair(3.0, 8, 2.0, 8)])
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (1.5, 1.5, 1.5)


def test_the_interval_of_two_pairs_goes_from_one_to_the_other() -> None:
    """A quarter of the resamples takes the first twice, a quarter the second twice: both are inside of 95 %."""
    estimate = speedup_estimate([Pair(1.0, 8, 1.0, 8), Pair(2.0, 8, 1.0, 8)])
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (1.5, 1.0, 2.0)


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    """Alternating ratios 1 and 2 with equal arm times: the ratio is a mean, of deviation 0.5 / sqrt(n)."""
    n = 400
    estimate = speedup_estimate([Pair(1.0 + i % 2, 8, 1.0, 8) for i in range(n)])
    assert estimate is not None
    half = 1.96 * 0.5 / math.sqrt(n)
    assert estimate.low == pytest.approx(1.5 - half, abs=0.01)
    assert estimate.high == pytest.approx(1.5 + half, abs=0.01)


def test_the_interval_repeats() -> None:
    pairs = [Pair(1.0 + i / 7, 8, 1.0, 8) for i in range(7)]
    assert speedup_estimate(pairs) == speedup_estimate(pairs)

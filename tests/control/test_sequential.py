"""Whoever looks after every observation is misled no more often than was said, and a true effect is found."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.control import peeking
from understudy.control.sequential import ConfidenceSequence, TwoArms, ratio, sample_ratio_evidence

NUM_RUNS, COUNT = 1000, 4000


def test_interval_is_that_of_the_likelihood_ratio() -> None:
    """Solved for the mean in closed form; here the martingale itself is computed at both ends."""
    generator = np.random.default_rng(1)
    sequence, x = ConfidenceSequence(tuned_for=50, burn_in=0), generator.standard_normal(80) + 3.0
    for value in x:
        sequence.add(float(value))
    c = 50 / peeking.TUNING
    for mean in sequence.interval(0.02):
        total, squares = float((x - mean).sum()), float(((x - mean) ** 2).sum())
        martingale = math.sqrt(c / (80 + c)) * (squares / (squares - total**2 / (80 + c))) ** 40
        assert martingale == pytest.approx(50.0)


def test_nothing_is_said_before_the_burn_in_or_of_observations_that_are_all_alike() -> None:
    sequence = ConfidenceSequence(tuned_for=20, burn_in=12)
    for count in range(11):
        sequence.add(float(count % 2))
    assert sequence.interval() == (-math.inf, math.inf)
    assert sequence.speedup() is None
    sequence.add(1.0)
    assert -1.0 < sequence.interval()[0] < sequence.mean < sequence.interval()[1] < 2.0
    alike = ConfidenceSequence()
    for _ in range(1000):
        alike.add(0.5)
    assert alike.interval() == (-math.inf, math.inf)


def test_speedup_of_log_ratios() -> None:
    generator = np.random.default_rng(2)
    sequence = ConfidenceSequence()
    for value in generator.normal(math.log(1.5), 0.1, 60):
        sequence.add(float(value))
    speedup = sequence.speedup()
    assert speedup is not None
    assert speedup.low < 1.5 < speedup.high < 1.6
    assert 1.45 < speedup.estimate < 1.55
    assert speedup.num_windows == 60
    assert ratio(math.inf) == math.inf
    assert ratio(1e9) > 1e300


def test_few_normal_observations_mislead_no_more_often_than_said() -> None:
    """Exact from the second observation on: 20,000 runs of 200, without a burn-in."""
    x = np.random.default_rng(3).standard_normal((20_000, 200))
    for tuned_for in (10, 100):
        mean, half = peeking.means_and_half_widths(x, tuned_for=tuned_for)
        share = float((np.abs(mean) > half).any(axis=1).mean())
        print(f"tuned for {tuned_for}: {share:.2%} of runs misled within 200 looks")
        assert 0.02 < share <= 0.05


def test_the_usual_interval_misleads_whoever_peeks() -> None:
    """What all this is for: the test below can fail."""
    x = np.random.default_rng(4).standard_normal((NUM_RUNS, COUNT))
    n = np.arange(1.0, COUNT + 1.0)
    usual = 1.96 / np.sqrt(n)
    assert (np.abs(np.cumsum(x, axis=1) / n) > usual)[:, 30:].any(axis=1).mean() > 0.3


@pytest.mark.parametrize("share", [0.5, 0.05, 0.01])
def test_thousand_runs_without_an_effect(share: float) -> None:
    """At most 5 % of them see one, ever, although every one of 4,000 observations is looked at."""
    generator = np.random.default_rng(round(1000 * share))
    x = peeking.log_times(generator, (NUM_RUNS, COUNT))
    treated = generator.random(x.shape) < share
    looks = peeking.two_arms(x, treated, share=share)
    print(f"share {share:.0%}: {looks.false_alarms:.1%} false alarms in {NUM_RUNS} runs of {COUNT} looks")
    assert looks.false_alarms <= 0.05


def test_true_speedup_of_ten_per_cent_is_found() -> None:
    generator = np.random.default_rng(5)
    x = peeking.log_times(generator, (NUM_RUNS, COUNT))
    treated = generator.random(x.shape) < 0.5
    looks = peeking.two_arms(x - math.log(1.1) * treated, treated, share=0.5)
    needed = looks.first_below_zero()
    middle, most = np.median(needed), np.quantile(needed, 0.95)
    print(f"a speed-up of 10 % was found after {middle:.0f} requests (median), {most:.0f} (95 % of the runs)")
    assert np.isfinite(needed).all()
    assert middle < 800
    # where it was found, the interval held the truth
    last_low, last_high = looks.low[:, -1], looks.high[:, -1]
    assert ((last_low < -math.log(1.1)) & (-math.log(1.1) < last_high)).mean() > 0.95


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_class_says_what_the_thousand_runs_were_told(share: float) -> None:
    generator = np.random.default_rng(6)
    x = peeking.log_times(generator, (3, COUNT))
    treated = generator.random(x.shape) < share
    looks = peeking.two_arms(x, treated, share=share)
    for run in range(3):
        arms = TwoArms(share=share)
        for place in range(COUNT):
            arms.add(bool(treated[run, place]), float(x[run, place]))
            low, high = arms.interval()
            assert low == pytest.approx(looks.low[run, place], rel=1e-7, abs=1e-9)
            assert high == pytest.approx(looks.high[run, place], rel=1e-7, abs=1e-9)


def test_a_drift_that_comes_with_the_share_is_no_effect() -> None:
    """Later observations are slower and come under another share: means by arm would differ by a lot."""
    generator = np.random.default_rng(7)
    low, high = 0.0, 0.0
    for share, level in ((0.1, 0.0), (0.5, 1.0)):
        arms = TwoArms(share=share)
        for _ in range(2000):
            arms.add(bool(generator.random() < share), float(generator.normal(level, 0.2)))
        low, high = arms.interval()
        assert low < 0.0 < high
    assert high - low < 0.1


def test_strata_narrow_the_interval() -> None:
    generator = np.random.default_rng(8)
    mixed, apart = TwoArms(), TwoArms()
    for _ in range(2000):
        name, level = (("code", 0.0), ("chat", 2.0))[int(generator.random() < 0.5)]
        in_treatment, x = bool(generator.random() < 0.5), float(generator.normal(level, 0.2))
        mixed.add(in_treatment, x)
        apart.add(in_treatment, x, stratum=name)
    wide, narrow = (arms.interval()[1] - arms.interval()[0] for arms in (mixed, apart))
    assert narrow < wide / 3


def test_state_survives_as_json() -> None:
    generator = np.random.default_rng(9)
    arms = TwoArms(share=0.25, burn_in=5)
    other: TwoArms | None = None
    for place in range(400):
        if place == 200:
            other = TwoArms.from_state(json.loads(json.dumps(arms.state())))
        in_treatment, x = bool(generator.random() < 0.25), float(generator.standard_normal())
        for each in (arms, other):
            if each is not None:
                each.add(in_treatment, x, stratum=str(place % 3))
    assert other == arms
    again = ConfidenceSequence.from_state(json.loads(json.dumps(arms.scores.state())))
    assert again == arms.scores


def test_strata_are_limited() -> None:
    arms = TwoArms()
    for place in range(10_000):
        arms.add(place % 2 == 0, float(place % 7), stratum=str(place))
    assert len(arms.expected) <= 65


def evidence_of(treated: peeking.Flags, share: float) -> float:
    """The most that was ever seen, looking after every unit."""
    num_treated, most = 0, -math.inf
    for place, is_treated in enumerate(treated):
        num_treated += bool(is_treated)
        most = max(most, sample_ratio_evidence(place + 1 - num_treated, num_treated, share=share))
    return most


@pytest.mark.parametrize("share", [0.5, 0.01])
def test_lots_that_are_in_order_raise_no_alarm(share: float) -> None:
    generator = np.random.default_rng(10)
    alarms = [evidence_of(generator.random(1500) < share, share) > math.log(20) for _ in range(200)]
    assert sum(alarms) <= 10


def test_units_that_go_missing_are_noticed() -> None:
    """A tenth of the treated never arrive: of twenty such worlds, nearly all are noticed within 15,000 units."""
    generator = np.random.default_rng(11)
    needed = []
    for _ in range(20):
        treated = generator.random(20_000) < 0.5
        arrived = treated[~treated | (generator.random(20_000) < 0.9)]
        num_treated = np.cumsum(arrived)
        looks = (sample_ratio_evidence(n - int(num_treated[n - 1]), int(num_treated[n - 1]), share=0.5)
                 for n in range(1, 15_001))  # fmt: skip
        needed.append(next((n for n, seen in enumerate(looks, 1) if seen > math.log(1000)), math.inf))
    print(f"a tenth of one arm missing was noticed after {np.median(needed):.0f} units (median)")
    assert sum(math.isfinite(n) for n in needed) >= 18
    assert min(needed) > 200

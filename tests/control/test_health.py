from __future__ import annotations

import random

import pytest

from understudy.control.health import Health


def watch(health: Health, rate: float, num_cycles: int, rng: random.Random) -> list[tuple[int, str]]:
    """Cycles of four drafted words, and the alarms that they raised."""
    alarms = []
    for cycle in range(num_cycles):
        alarm = health.observe(drafted=4, accepted=sum(rng.random() < rate for _ in range(4)))
        if alarm is not None:
            alarms.append((cycle, alarm.kind))
    return alarms


@pytest.mark.parametrize(
    ("before", "after", "kind"), [(0.8, 0.05, "fall"), (0.6, 0.0, "fall"), (0.1, 0.9, "rise"), (0.3, 1.0, "rise")]
)
def test_sudden_change_is_told_once_and_soon(before: float, after: float, kind: str) -> None:
    for seed in range(20):
        rng, health = random.Random(seed), Health()
        assert watch(health, before, 200, rng) == []
        alarms = watch(health, after, 200, rng)
        assert [alarm for _, alarm in alarms] == [kind]
        assert alarms[0][0] < 15


def test_false_alarms_are_rare() -> None:
    rng = random.Random(0)
    num_alarms = sum(len(watch(Health(), rate, 2000, rng)) for rate in (0.05, 0.2, 0.5, 0.8, 0.95) for _ in range(8))
    assert num_alarms <= 4, "in 320,000 drafted words"


def test_slow_change_is_no_alarm() -> None:
    rng, health = random.Random(0), Health()
    for percent in range(90, 30, -1):
        assert watch(health, percent / 100, 30, rng) == []


def test_nothing_drafted_says_nothing() -> None:
    health = Health()
    assert all(health.observe(drafted=0, accepted=0) is None for _ in range(100))
    assert all(health.observe(drafted=4, accepted=0) is None for _ in range(100)), "never good is not suddenly bad"

"""A trial goes on where nothing speaks against it, back where something does, and says why."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.control import peeking
from tests.control.test_experiment import experiment
from understudy.control.trial import OBSERVATIONS_OF_A_KEY, Observation, Trial
from understudy.control.verdict import Comparison, Snapshot, Verdict, verdict
from understudy.core.request import Speculation

HALF = (0.5, 1.0)
UNKNOWN = Comparison(1.0, 0.0, math.inf)


def snapshot(**values: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "stage": 0,
        "num_control": 100,
        "num_treatment": 100,
        "sample_ratio_evidence": 0.0,
        "time_per_token": UNKNOWN,
        "first_token": UNKNOWN,
        "failures": Comparison(0.0, -math.inf, math.inf),
        "num_with_company": 0,
        "num_observations": 200,
    }
    return Snapshot(**fields | values)


@pytest.mark.parametrize(
    ("values", "action", "words"),
    [
        ({"num_treatment": 7}, "stay", "7 of the 30 requests that each arm needs."),
        ({}, "advance", "No harm was seen at 1%: time per token is 1.000 (too few yet for an interval)"),
        ({"time_per_token": Comparison(1.1, 1.01, 1.2)}, "roll back", "Harm: time per token is 1.100 (1.010 to 1.200)"),
        ({"first_token": Comparison(1.1, 1.01, 1.2)}, "roll back", "first token is 1.100 (1.010 to 1.200)"),
        ({"first_token": Comparison(1.04, 1.01, 1.07)}, "advance", "No harm"),  # no chance, but allowed
        ({"first_token": Comparison(1.3, 0.99, 1.7)}, "advance", "No harm"),  # may be chance
        ({"failures": Comparison(0.02, 0.001, 0.04)}, "roll back", "failures rose by 0.020 (0.001 to 0.040), 0.01 is"),
        ({"failures": Comparison(0.02, -0.001, 0.04)}, "advance", "No harm"),
        ({"sample_ratio_evidence": 7.0}, "stop", "100 of 200 requests were treated, 50.0% where the lot sends 1.0%"),
        ({"stage": 3, "time_per_token": Comparison(1.0, 0.9, 1.1)}, "stay", "Not yet shown to be at most 1.05"),
        ({"stage": 3, "time_per_token": Comparison(1.0, 0.96, 1.04)}, "done", "Shown to be at most 1.05"),
        ({"stage": 3, "time_per_token": Comparison(0.9, 0.85, 0.95)}, "done", "The treatment is faster."),
    ],
)
def test_verdicts(values: dict[str, Any], action: str, words: str) -> None:
    found = verdict(experiment(), snapshot(**values))
    assert found.action == action
    assert words in found.reason
    assert "company" not in found.reason


def test_company_is_named_where_most_had_some() -> None:
    crowded = snapshot(num_with_company=101)
    assert "101 of 200 requests had company, so this is an estimate of the mixed batch" in (
        verdict(experiment(), crowded).reason
    )
    assert "company" not in verdict(experiment(unit="window"), crowded).reason
    assert "company" not in verdict(experiment(), replace(crowded, num_with_company=100)).reason


class World:
    """Requests that come one after another, and what each of them came to."""

    def __init__(self, seed: int, count: int, *, stalls: float = 0.01) -> None:
        self.generator = np.random.default_rng(seed)
        self.times = peeking.log_times(self.generator, (1, count), stalls=stalls)[0].tolist()
        self.firsts = peeking.log_times(self.generator, (1, count), stalls=stalls)[0].tolist()
        self.failed = (self.generator.random(count) < 0.002).tolist()
        self.salt = str(seed)

    def run(
        self,
        trial: Trial,
        change: Callable[[Observation], Observation | None] = lambda seen: seen,
        *,
        begin: int = 0,
        end: int | None = None,
        requests_of_a_key: int = 1,
    ) -> list[Verdict]:
        """Let a trial see them, and look after each, until it ends; `change` is what the treatment does."""
        found: list[Verdict] = []
        for number in range(begin, len(self.times) if end is None else end):
            if trial.status != "running":
                break
            unit = str(number // requests_of_a_key)
            seen: Observation | None = Observation(
                unit=unit,
                in_treatment=trial.treats(unit),
                stage=trial.stage,
                log_time_per_token=self.times[number],
                log_first_token=self.firsts[number],
                failures=float(self.failed[number]),
                has_company=number % 4 != 0,
            )
            assert seen is not None
            if seen.in_treatment:
                seen = change(seen)
            if seen is not None:
                trial.observe(seen)
                found.append(trial.judge())
        return found


def slower(factor: float) -> Callable[[Observation], Observation]:
    def change(seen: Observation) -> Observation:
        assert seen.log_time_per_token is not None
        return replace(seen, log_time_per_token=seen.log_time_per_token + math.log(factor))

    return change


@pytest.mark.parametrize("num_runs", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_whole_trials_without_an_effect(num_runs: int) -> None:
    """All stages, three outcomes, a look after every request: at most 5 % are rolled back or stopped."""
    lengths, wrong = [], 0
    for run in range(num_runs):
        trial = Trial(experiment(salt=str(run)))
        lengths.append(len(World(run, 15_000).run(trial)))
        wrong += trial.status in ("rolled back", "stopped")
    print(f"{wrong} of {num_runs} trials without an effect were ended, after {np.median(lengths):.0f} looks (median)")
    assert wrong <= 0.05 * num_runs


def test_true_speedup_goes_through_all_stages() -> None:
    trial = Trial(experiment())
    found = World(1, 20_000).run(trial, slower(1 / 1.1))
    assert [verdict.action for verdict in found if verdict.action != "stay"] == ["advance"] * 3 + ["done"]
    assert trial.status == "done"
    assert trial.share == 1.0
    assert "had company" in trial.reason
    print(f"a trial of a speed-up of 10 % took {len(found)} requests: {trial.reason}")


def test_harm_is_rolled_back_for_everybody() -> None:
    trial = Trial(experiment(stages=HALF))
    World(2, 5000).run(trial, slower(1.3))
    assert trial.status == "rolled back"
    assert trial.share == 0.0
    assert not any(trial.treats(str(number)) for number in range(100))
    assert trial.reason.startswith("Harm: time per token is 1.")


def test_treatment_that_breaks_requests_is_rolled_back() -> None:
    trial = Trial(experiment(stages=HALF))
    generator = np.random.default_rng(0)
    World(3, 5000).run(trial, lambda seen: replace(seen, failures=float(generator.random() < 0.2)))
    assert trial.status == "rolled back"
    assert trial.reason.startswith("Guardrail: the share of failures rose by 0.")


def test_treatment_that_delays_the_first_token_is_rolled_back() -> None:
    trial = Trial(experiment(stages=HALF))
    World(4, 5000).run(trial, lambda seen: replace(seen, log_first_token=(seen.log_first_token or 0.0) + 0.4))
    assert trial.status == "rolled back"
    assert trial.reason.startswith("Guardrail: time to the first token is 1.")


def test_treated_requests_that_vanish_stop_a_trial() -> None:
    trial = Trial(experiment(stages=HALF, min_per_arm=10_000))
    generator = np.random.default_rng(1)
    World(5, 5000).run(trial, lambda seen: seen if generator.random() < 0.7 else None)
    assert trial.status == "stopped"
    assert trial.reason.startswith("Sample ratio mismatch:")


@pytest.mark.parametrize("unit", ["request", "key"])
def test_restart_in_the_middle_changes_no_verdict(unit: str) -> None:
    world, values = World(6, 6000), {"stages": (0.25, 0.5, 1.0), "unit": unit, "min_per_arm": 20}
    straight, restarted = Trial(experiment(**values)), Trial(experiment(**values))
    num_requests = 11 if unit == "key" else 1
    expected = world.run(straight, slower(1.2), requests_of_a_key=num_requests)
    found: list[Verdict] = []
    for begin in range(0, 6000, 501):
        end = min(6000, begin + 501)
        found += world.run(restarted, slower(1.2), begin=begin, end=end, requests_of_a_key=num_requests)
        restarted = Trial.from_state(json.loads(json.dumps(restarted.state())))
    assert found == expected
    assert restarted.status == straight.status == "rolled back"
    assert restarted.snapshot() == straight.snapshot()


def test_key_counts_once() -> None:
    """Keys that differ among themselves are no effect, though their requests are many."""
    wrong = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        trial = Trial(experiment(unit="key", stages=HALF, salt=str(seed), min_per_arm=1000))
        for key in range(80):
            level = float(generator.normal(0.0, 0.5))
            for _ in range(2 * OBSERVATIONS_OF_A_KEY):
                if trial.status == "running":
                    x = level + float(generator.normal(0.0, 0.1))
                    trial.observe(
                        Observation(unit=str(key), in_treatment=trial.treats(str(key)), stage=0, log_time_per_token=x)
                    )
                    trial.judge()
        wrong += trial.status != "running"
        assert trial.seen.num_control + trial.seen.num_treatment <= 80
    assert wrong <= 2


def test_observations_of_an_earlier_stage_and_of_a_pause_are_left_out() -> None:
    trial = Trial(experiment(stages=(0.1, 0.5, 1.0)))
    trial.advance("by hand")
    trial.observe(Observation(unit="1", in_treatment=True, stage=0, log_time_per_token=0.0))
    trial.set_status("paused", "by hand")
    trial.observe(Observation(unit="1", in_treatment=True, stage=1, log_time_per_token=0.0))
    assert trial.seen.num_observations == 0
    assert trial.share == 0.0
    trial.set_status("running", "by hand")
    trial.observe(Observation(unit="1", in_treatment=True, stage=1, log_time_per_token=0.0))
    assert trial.seen.num_observations == 1
    assert trial.share == 0.5


def test_state_of_another_making_is_refused() -> None:
    state = Trial(experiment(treatment=Speculation(enabled=False))).state()
    for change in ({"status": "odd"}, {"stage": 4}, {"stage": -1}):
        with pytest.raises(ValueError, match="a trial that is"):
            Trial.from_state({**state, **change})

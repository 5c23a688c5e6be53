"""Who is treated, and with what: by lot, for good, and never with more than the caller allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.control.experiment import Experiment, Guardrails, strictest
from understudy.control.trial import Trial
from understudy.core.request import Speculation
from understudy.core.switches import Switches
from understudy.errors import InvalidRequest

SPECULATIONS = st.builds(
    Speculation,
    enabled=st.booleans(),
    max_depth=st.integers(0, 64),
    max_rows=st.integers(0, 256),
    drafter=st.sampled_from([None, "suffix"]),
)


def experiment(**values: Any) -> Experiment:
    return Experiment(**{"name": "depth", "treatment": Speculation(max_depth=4), "salt": "salt"} | values)


@given(st.lists(st.text(max_size=8), min_size=1, max_size=50), st.text(min_size=1, max_size=8))
def test_who_is_treated_stays_treated(units: list[str], salt: str) -> None:
    trial = Trial(experiment(salt=salt))
    before = {unit: trial.treats(unit) for unit in units}
    while trial.status == "running":
        trial.advance("by hand")
        after = {unit: trial.treats(unit) for unit in units}
        assert all(after[unit] for unit in units if before[unit])
        before = after
    assert trial.status == "done"
    assert all(before.values())


def test_lot_sends_the_share_that_it_should() -> None:
    places = [experiment().place_of(f"request {number}") for number in range(50_000)]
    for share in (0.01, 0.05, 0.25, 0.5):
        found = sum(place < share for place in places) / len(places)
        assert found == pytest.approx(share, abs=4 * (share * (1 - share) / len(places)) ** 0.5)


def test_lots_of_two_experiments_have_nothing_in_common() -> None:
    first, second = experiment(salt="a"), experiment(salt="b")
    units = [str(number) for number in range(20_000)]
    both = sum(first.place_of(unit) < 0.5 and second.place_of(unit) < 0.5 for unit in units)
    assert both / len(units) == pytest.approx(0.25, abs=0.015)
    assert Experiment.from_state(first.state()).place_of("x") == first.place_of("x")


@given(SPECULATIONS, SPECULATIONS)
def test_treatment_allows_no_more_than_the_caller(wanted: Speculation, treatment: Speculation) -> None:
    allowed = strictest(wanted, treatment)
    assert allowed.enabled == (wanted.enabled and treatment.enabled)
    assert allowed.max_depth == min(wanted.max_depth, treatment.max_depth)
    assert allowed.max_rows == min(wanted.max_rows, treatment.max_rows)
    assert wanted.drafter is None or allowed.drafter == wanted.drafter
    assert treatment.drafter is None or allowed.drafter == treatment.drafter


def test_who_cannot_be_treated_is_no_control_either() -> None:
    only_suffix = experiment(treatment=Speculation(drafter="suffix"), workload_class="code")
    assert only_suffix.takes(Speculation(), "code")
    assert only_suffix.takes(Speculation(drafter="suffix"), "code")
    assert not only_suffix.takes(Speculation(), "chat")
    assert not only_suffix.takes(Speculation(drafter="ngram"), "code")
    assert not only_suffix.takes(Speculation(enabled=False), "code")
    assert not only_suffix.takes(Speculation(forced=True), "code")


def test_treatment_as_switches() -> None:
    drafters = ("suffix", "ngram", "model")
    assert experiment(unit="window").switches(drafters) == Switches(max_depth=4)
    off = experiment(unit="window", treatment=Speculation(enabled=False))
    assert off.switches(drafters) == Switches(enabled=False)
    only = experiment(unit="window", treatment=Speculation(drafter="suffix"))
    assert only.switches(drafters) == Switches(drafters_off=frozenset({"ngram", "model"}))


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"name": "No Name"}, "name"),
        ({"unit": "tenant"}, "unit"),
        ({"salt": ""}, "salt"),
        ({"stages": (0.5, 0.5, 1.0)}, "stages"),
        ({"stages": (0.5,)}, "stages"),
        ({"stages": (0.0, 1.0)}, "stages"),
        ({"stages": (0.5, 0.9)}, "stages"),
        ({"stages": (float("nan"), 1.0)}, "stages"),
        ({"min_per_arm": 1}, "min_per_arm"),
        ({"alpha": 0.0}, "alpha"),
        ({"treatment": Speculation(forced=True)}, "treatment"),
        ({"unit": "window", "workload_class": "code"}, "workload_class"),
        ({"unit": "window", "treatment": Speculation(max_rows=3)}, "treatment"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        experiment(**values)
    assert caught.value.parameter == parameter


def test_guardrails_are_checked_and_all_survives_as_json() -> None:
    with pytest.raises(InvalidRequest):
        Guardrails(worst_time_per_token=0.9)
    with pytest.raises(InvalidRequest):
        Guardrails(worst_error_rise=float("nan"))
    made = experiment(guardrails=Guardrails(worst_first_token=1.2), workload_class="code", stages=(0.1, 1.0))
    assert Experiment.from_state(json.loads(json.dumps(made.state()))) == made

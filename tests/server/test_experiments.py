"""Experiments of a server: who is treated, what is observed of them, what is decided, and the admin's routes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.control.test_experiment import experiment
from tests.control.test_windows import cycle
from tests.server.serving import Served, serve_fake
from understudy.core.backend import EngineLoad
from understudy.core.events import Decided
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import OFF, Switches
from understudy.errors import InvalidRequest
from understudy.server.exchange import Caller, Exchange, Outcome
from understudy.server.experiments import MOST_EXPERIMENTS, Experiments
from understudy.server.journal import Decision

PATH = "/admin/v1/experiments"
START = {"name": "depth", "treatment": {"max_depth": 2}, "why": "to see"}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Lab:
    """Experiments around a fake backend, on a clock of our own."""

    def __init__(self, folder: Path, **values: Any) -> None:
        self.served: Served = serve_fake(folder)
        self.board = self.served.service.switchboard
        self.decided: list[Decided] = []
        self.clock = Clock()
        self.experiments = self.make()
        self.generator = np.random.default_rng(0)
        self.trial = self.experiments.start(experiment(**values), who="me", why="to see") if values else None

    def make(self) -> Experiments:
        return Experiments(self.served.backend, self.board, decide=self.decided.append, now_s=self.clock)

    def request(
        self,
        number: int,
        *,
        outcome: Outcome = "finished",
        wanted: Speculation | None = None,
        tenant: str = "",
        slower: float = 1.0,
    ) -> Speculation:
        """One request from its making to its end; the treated ones are slower by a factor."""
        request_id, workload = f"request {number}", "code"
        wanted = wanted or Speculation()
        allowed = self.experiments.overlay(
            wanted, request_id=request_id, caller=Caller(tenant), workload_class=workload
        )
        request = Request(
            request_id=request_id, prompt_ids=(1,), workload_class=workload, sampling=SamplingParams(max_tokens=101)
        )
        exchange = Exchange(request, Caller(tenant), "chat", arrived_s=0.0, num_tokens=101, outcome=outcome)
        token_s = 0.01 * math.exp(self.generator.normal(0.0, 0.2)) * (slower if allowed != wanted else 1.0)
        exchange.admitted_s, exchange.first_s, exchange.last_s = 1.0, 1.1, 1.1 + 100 * token_s
        self.experiments.ended(exchange)
        return allowed

    def windows(self, count: int, *, slower: float = 1.0) -> None:
        """Cycles of a busy engine, until so many windows are over; treated windows are slower by a factor."""
        first = self.experiments.export()["num_windows"]
        while self.experiments.export()["num_windows"] < first + count:
            self.clock.now_s += 0.1
            factor = slower if "experiment" in self.board.settings else 1.0
            total_s = 0.01 * math.exp(self.generator.normal(0.0, 0.2)) * factor
            self.served.backend.sinks[-1](cycle(num_sequences=2, num_emitted=4, total_s=total_s))
            if self.trial is not None and self.trial.status != "running":
                return


def test_only_the_treated_are_changed_and_never_given_more(tmp_path: Path) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0), treatment=Speculation(max_depth=4))
    allowed = [lab.request(number) for number in range(400)]
    assert set(allowed) == {Speculation(), Speculation(max_depth=4)}
    assert 150 < allowed.count(Speculation(max_depth=4)) < 250
    assert {lab.request(n, wanted=Speculation(max_depth=2)) for n in range(50)} == {Speculation(max_depth=2)}
    assert {lab.request(n, wanted=Speculation(enabled=False)) for n in range(50)} == {Speculation(enabled=False)}


def test_off_is_found_to_be_slower_and_rolled_back(tmp_path: Path) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0), treatment=Speculation(enabled=False))
    assert lab.trial is not None
    number = 0
    while lab.trial.status == "running":
        lab.request(number, slower=1.5)
        number += 1
    assert lab.trial.status == "rolled back"
    assert 60 <= number < 300
    assert lab.request(number) == Speculation()
    assert [event.outcome for event in lab.decided] == ["running at 50%", "rolled back at 0%"]
    assert lab.decided[-1].reason.startswith("Harm: time per token is 1.")
    entry = lab.board.audit.entries[-1]
    assert (entry["who"], entry["source"], entry["after"]) == ("experiment depth", "experiment", "rolled back at 0%")


def test_what_says_nothing_of_an_arm_is_not_counted(tmp_path: Path) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0))
    assert lab.trial is not None
    not_counted: tuple[Outcome, ...] = ("cancelled", "refused", "overloaded")
    for number, outcome in enumerate(not_counted):
        lab.request(number, outcome=outcome)
    lab.request(9, wanted=Speculation(enabled=False))
    assert lab.trial.seen.num_observations == 0
    lab.request(10, outcome="error")
    lab.request(11)
    assert lab.trial.seen.num_observations == 2
    assert lab.trial.seen.time_per_token.expected["code"].count == 1
    lab.board.set("admin", OFF, who="me", why="off")  # now both arms are alike
    lab.request(12)
    assert lab.trial.seen.num_observations == 2


def test_company_is_counted_at_the_end(tmp_path: Path) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0))
    assert lab.trial is not None
    lab.request(1)
    lab.served.backend.load = EngineLoad(num_running=1)
    lab.request(2)
    lab.request(3)
    assert (lab.trial.seen.num_with_company, lab.trial.seen.num_observations) == (2, 3)
    assert "2 of 3 requests had company" in lab.trial.reason


def test_requests_of_a_key_share_their_arm(tmp_path: Path) -> None:
    lab = Lab(tmp_path, unit="key", stages=(0.5, 1.0))
    arms = [{lab.request(10 * key + n, tenant=str(key)) for n in range(10)} for key in range(30)]
    assert all(len(arm) == 1 for arm in arms)
    assert len(set.union(*arms)) == 2


def test_windows_switch_for_everybody_and_find_the_harm(tmp_path: Path) -> None:
    lab = Lab(tmp_path, unit="window", stages=(0.5, 1.0), treatment=Speculation(enabled=False))
    assert lab.trial is not None
    num_audited = len(lab.board.audit.entries)
    seen = set()
    for _ in range(30):
        lab.windows(1, slower=1.2)
        seen.add(lab.served.backend.switches)
        assert lab.request(1) == Speculation()  # no request is treated by itself
    assert seen == {Switches(), OFF}
    assert len(lab.board.audit.entries) == num_audited  # its windows are no flips by hand
    lab.windows(400, slower=1.2)
    assert lab.trial.status == "rolled back"
    assert lab.served.backend.switches == Switches()
    assert "experiment" not in lab.board.settings


def test_window_experiment_that_is_done_holds_until_it_is_stopped(tmp_path: Path) -> None:
    lab = Lab(tmp_path, unit="window", stages=(0.5, 1.0), treatment=Speculation(max_depth=3))
    assert lab.trial is not None
    lab.windows(2000, slower=0.9)
    assert lab.trial.status == "done"
    assert "The treatment is faster." in lab.trial.reason or "Shown to be at most 1.05" in lab.trial.reason
    lab.windows(1)
    assert lab.served.backend.switches == Switches(max_depth=3)
    with pytest.raises(InvalidRequest):
        lab.experiments.start(experiment(name="second", unit="window"), who="me", why="again")
    lab.experiments.act(lab.trial, "stop", who="me", why="enough")
    assert lab.served.backend.switches == Switches()
    lab.experiments.start(experiment(name="second", unit="window"), who="me", why="again")


def test_kill_switch_holds_over_windows(tmp_path: Path) -> None:
    lab = Lab(tmp_path, unit="window", stages=(0.5, 1.0), treatment=Speculation(max_depth=3))
    assert lab.trial is not None
    lab.board.set("admin", OFF, who="me", why="off")
    for _ in range(1000):
        lab.clock.now_s += 0.1
        lab.served.backend.sinks[-1](cycle())
        assert not lab.served.backend.switches.enabled
    assert lab.trial.seen.num_observations == 0


@pytest.mark.parametrize("unit", ["request", "window"])
def test_restart_goes_on_where_it_was(tmp_path: Path, unit: str) -> None:
    lab = Lab(tmp_path, unit=unit, stages=(0.5, 1.0), min_per_arm=500)
    assert lab.trial is not None
    lab.windows(20) if unit == "window" else [lab.request(number) for number in range(50)]
    kept = json.loads(json.dumps(lab.experiments.export()))
    after = lab.make()
    after.restore(kept)
    assert after.export() == lab.experiments.export()
    (trial,) = after.trials
    assert trial.snapshot() == lab.trial.snapshot()
    assert [trial.treats(str(n)) for n in range(100)] == [lab.trial.treats(str(n)) for n in range(100)]


def test_state_that_cannot_be_understood_is_forgotten_with_a_word(tmp_path: Path) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0))
    kept = lab.experiments.export()
    kept["trials"].insert(0, {"experiment": {"name": "odd"}})
    after = lab.make()
    after.restore(kept)
    assert [trial.experiment.name for trial in after.trials] == ["depth"]
    assert lab.decided[-1].outcome == "forgotten"


def test_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for number in range(MOST_EXPERIMENTS):
        lab.experiments.start(experiment(name=f"e{number}", workload_class=f"c{number}"), who="me", why="w")
    with pytest.raises(InvalidRequest, match="16 experiments already"):
        lab.experiments.start(experiment(name="more", workload_class="more"), who="me", why="w")
    lab.experiments.act(lab.experiments.trials[3], "stop", who="me", why="w")
    lab.experiments.start(experiment(name="more", workload_class="more"), who="me", why="w")
    names = [trial.experiment.name for trial in lab.experiments.trials]
    assert len(names) == MOST_EXPERIMENTS
    assert "e3" not in names


def test_error_of_ours_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, stages=(0.5, 1.0))
    assert lab.trial is not None
    monkeypatch.setattr(lab.trial, "observe", lambda seen: 1 / 0)
    lab.request(1)


# over HTTP


def test_treatment_reaches_the_engine(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    heard: list[Decision] = []
    served.service.journal.listeners.append(heard.append)
    assert served.client.get(PATH).json() == {"experiments": []}
    answer = served.post(PATH, **START, stages=[0.5, 1], workload_class="code")
    assert answer.status_code == 200
    view = answer.json()
    assert (view["status"], view["share"], view["time_per_token"]["low"]) == ("running", 0.5, None)
    for _ in range(30):
        served.chat(metadata={"workload_class": "code"})
    depths = {request.speculation.max_depth for request in served.backend.requests}
    assert depths == {2, Speculation().max_depth}
    assert served.client.get(PATH).json()["experiments"][0]["num_observations"] == 30
    served.chat(metadata={"workload_class": "math"})
    assert served.asked.speculation == Speculation()
    assert [(event.what, event.subject, event.reason) for event in heard] == [("experiment", "depth", "to see")]


def test_experiment_by_hand(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    served.post(PATH, **START, stages=[0.1, 0.5, 1])

    def act(action: str) -> Any:
        return served.post(f"{PATH}/depth", action=action, why="by hand")

    assert act("resume").status_code == 400
    assert (act("advance").json()["share"], act("pause").json()["share"]) == (0.5, 0.0)
    assert act("advance").json()["error"]["param"] == "action"
    assert act("resume").json()["share"] == 0.5
    assert (act("advance").json()["status"], act("stop").json()["share"]) == ("done", 0.0)
    assert act("stop").status_code == 400
    assert served.post(PATH, **START).json()["share"] == 0.01  # the name is free again
    history = served.service.switchboard.audit.entries
    assert [entry["after"] for entry in history][:3] == ["running at 10%", "running at 50%", "paused at 0%"]
    assert all(entry["who"] == "loopback" for entry in history)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"why": ""}, "why"),
        ({"name": "No"}, "name"),
        ({"stages": [0.5, 0.1, 1]}, "stages"),
        ({"stages": [0.5, 0.7]}, "stages"),
        ({"treatment": {"drafter": "nobody"}}, "treatment"),
        ({"treatment": {"forced": True}}, "treatment"),
        ({"unit": "window", "treatment": {"max_rows": 3}}, "treatment"),
        ({"unit": "week"}, "unit"),
        ({"guardrails": {"worst_first_token": 0.5}}, "guardrails"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_bad_input_is_refused_in_openais_shape(tmp_path: Path, change: dict[str, Any], parameter: str) -> None:
    answer = serve_fake(tmp_path).post(PATH, **START | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter


def test_one_for_the_same_requests_is_refused(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    assert served.post(PATH, **START).status_code == 200
    for change in ({}, {"name": "other"}, {"name": "other", "workload_class": "code"}):
        assert served.post(PATH, **START | change).status_code == 400
    assert served.post(PATH, **START | {"name": "other", "unit": "window"}).status_code == 200
    assert served.post(f"{PATH}/nobody", action="stop", why="w").status_code == 404

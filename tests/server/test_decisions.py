"""What was decided and how things stand: the journal, the route, and the numbers at /metrics."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.server.serving import serve_fake
from tests.server.watched import samples, value
from understudy.core.backend import BackendState
from understudy.core.control import BreakerView, ClassView, ControlView, Learned, LearnedRate, Speedup
from understudy.core.events import Decided
from understudy.core.switches import OFF
from understudy.server.journal import MOST_DECISIONS, Decision, Journal
from understudy.server.metrics import Metrics
from understudy.server.service import Service
from understudy.server.shadow import Tally

PATH = "/admin/v1/decisions"
VIEW = ControlView(
    classes=(
        ClassView(
            workload_class="code",
            plain_s=12.5,
            debt_s=-3.0,
            allowance_s=0.25,
            num_refused=2,
            max_depth=6,
            reason="acceptance 0.8",
        ),
    ),
    breakers=(
        BreakerView(
            workload_class="code",
            temperature="at temperature 0",
            drafter="suffix",
            state="on",
            reason="it pays",
            num_cycles=40,
            acceptance=0.8,
        ),
        BreakerView(
            workload_class="chat",
            temperature="about temperature 1",
            drafter="ngram",
            state="off",
            reason="new",
            num_cycles=0,
            acceptance=None,
        ),
    ),
    speedup=Speedup(estimate=1.4, low=1.1, high=math.inf, num_windows=3),
    num_steps=1000,
    num_overruns=1,
    learned=Learned(rates=(LearnedRate("position", "code", 0, "suffix", 1, 1.0, 2.0),)),
)


def test_journal_finds_by_part_and_subject_the_newest_first(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    heard: list[Decision] = []
    journal.listeners.append(heard.append)
    with caplog.at_level(logging.INFO, "understudy.server"):
        journal.add(Decided("breaker", "code, suffix", "off", "it lost 3 ms"), who="controller")
    assert caplog.messages == ["breaker: code, suffix off: it lost 3 ms (controller)"]
    journal.add(Decided("ledger", "code", "refused", "no allowance"), who="controller")
    journal.add(Decided("breaker", "codes", "on", "it pays"), who="controller")
    assert [made.subject for made in journal.find(limit=9)] == ["codes", "code", "code, suffix"]
    assert [made.subject for made in journal.find(limit=9, subject="code")] == ["code", "code, suffix"]
    assert [made.subject for made in journal.find(limit=9, subject="code, suffix")] == ["code, suffix"]
    assert [made.subject for made in journal.find(limit=1, what="breaker")] == ["codes"]
    assert [made.subject for made in heard] == ["code, suffix", "code", "codes"]
    journal.restore([Decision(1.0, "policy", "chat", "off", "advised", "controller")])
    assert [made.what for made in journal.find(limit=9)][-1] == "policy"


def test_journal_is_bounded() -> None:
    journal = Journal()
    for number in range(MOST_DECISIONS + 5):
        journal.add(Decided("rule", "code", str(number), ""), who="controller")
    found = journal.find(limit=2 * MOST_DECISIONS)
    assert (len(found), found[-1].outcome) == (MOST_DECISIONS, "5")


def test_route_says_how_things_stand_and_how_it_came_to_that(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, view=VIEW)
    for sink in served.backend.sinks:
        sink(Decided("breaker", "chat, ngram", "off", "0.1 of the guesses were right"))
    served.post("/admin/v1/speculation", enabled=False, why="an incident")
    served.service.shadows.tallies["code"] = Tally(num_same=3, num_timed=2, sum_log_speedup=2 * math.log(1.5))
    said = served.client.get(PATH).json()
    assert set(said) == {"now", "shadows", "decisions"}
    assert set(said["now"]) == {"classes", "breakers", "speedup", "num_steps", "num_overruns"}, (
        "nothing of what is learned"
    )
    assert said["now"]["speedup"] == {"estimate": 1.4, "low": 1.1, "high": None, "num_windows": 3}
    assert said["now"]["classes"][0]["debt_s"] == -3.0
    assert [breaker["state"] for breaker in said["now"]["breakers"]] == ["on", "off"]
    tally = {"count": 3, "same": 3, "different": 0, "num_timed": 2, "speedup": pytest.approx(1.5)}
    assert said["shadows"] == {"code": tally}
    flip, breaker = said["decisions"]
    assert (flip["what"], flip["subject"], flip["outcome"]) == ("switch", "admin", "off")
    assert (flip["reason"], flip["who"]) == ("an incident", "loopback")
    assert (breaker["subject"], breaker["who"]) == ("chat, ngram", "controller")
    age = datetime.now(UTC) - datetime.fromisoformat(breaker["time"])
    assert abs(age.total_seconds()) < 60


def test_route_chooses_among_decisions(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    for number in range(5):
        served.service.decide(Decided("rule", f"class-{number % 2}", "depth 4", "warm"), who="somebody")

    def subjects(query: str) -> list[str]:
        return [made["subject"] for made in served.client.get(f"{PATH}?{query}").json()["decisions"]]

    assert subjects("limit=3") == ["class-0", "class-1", "class-0"]
    assert subjects("subject=class-1&what=rule") == ["class-1", "class-1"]
    assert subjects("what=breaker") == []
    for query in ("limit=0", "limit=10001", "limit=x", "what=" + "a" * 65):
        assert served.client.get(f"{PATH}?{query}").status_code == 400


def test_engine_that_says_nothing_leaves_the_decisions(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    served.service.decide(Decided("policy", "code", "depth 2", "advised"))
    served.backend.state = BackendState("restarting", "it died")
    said = served.client.get(PATH).json()
    assert said["now"] is None
    assert len(said["decisions"]) == 1


def test_admin_clears_what_a_shadow_run_said_and_nothing_else(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    served.service.switchboard.set("parity", OFF, who="shadow run", why="other words")
    served.post("/admin/v1/speculation", enabled=False, why="an incident")
    said = served.client.delete("/admin/v1/speculation").json()
    assert set(said["sources"]) == {"parity"}, "without a source it is the admin's own word"
    assert said["sources"]["parity"]["who"] == "shadow run"
    assert served.post("/admin/v1/speculation", enabled=True, why="on!").json()["effective"]["enabled"] is False
    assert served.client.delete("/admin/v1/speculation?source=file").status_code == 400
    said = served.client.delete("/admin/v1/speculation?source=parity").json()
    assert (set(said["sources"]), said["effective"]["enabled"]) == ({"admin"}, True)
    assert said["history"][-1]["source"] == "parity"


def test_numbers_are_those_of_the_last_look(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, view=VIEW)
    metrics = Metrics()
    metrics.watch(served.service)
    with pytest.raises(KeyError):
        value(metrics, "understudy_live_speedup_ratio")
    asyncio.run(served.service.keeper.look())
    assert value(metrics, "understudy_live_speedup_ratio", bound="estimate") == 1.4
    assert value(metrics, "understudy_live_speedup_ratio", bound="low") == 1.1
    with pytest.raises(KeyError):
        value(metrics, "understudy_live_speedup_ratio", bound="high")
    assert value(metrics, "understudy_breaker_state", workload_class="code", drafter="suffix") == 0
    assert value(metrics, "understudy_breaker_state", workload_class="chat", drafter="ngram") == 2
    assert value(metrics, "understudy_ledger_debt_seconds", workload_class="code") == -3.0
    assert value(metrics, "understudy_ledger_overruns_total") == 1
    served.service.decide(Decided("breaker", "code, suffix", "off", ""))
    assert value(metrics, "understudy_decisions_total", what="breaker", outcome="off") == 1


def crowd(service: Service, num: int) -> ControlView:
    """As many names as one likes, some of which no label can hold."""
    for number in range(num):
        service.decide(Decided(f"What {number}", "x", f"{number} \n", ""))
    classes = [replace(VIEW.classes[0], workload_class=f"c {number}", debt_s=0.5) for number in range(num)]
    breakers = [replace(VIEW.breakers[0], workload_class=f"c {number}", drafter=f"d{number}") for number in range(num)]
    return ControlView(classes=tuple(classes), breakers=tuple(breakers))


def test_labels_are_bounded(tmp_path: Path) -> None:
    served = serve_fake(tmp_path)
    metrics = Metrics()
    metrics.watch(served.service)
    served.backend.view = crowd(served.service, 500)
    asyncio.run(served.service.keeper.look())
    found = [(name, dict(labels)) for name, labels in samples(metrics)]
    for name, label in (
        ("understudy_decisions_total", "what"),
        ("understudy_decisions_total", "outcome"),
        ("understudy_ledger_debt_seconds", "workload_class"),
        ("understudy_breaker_state", "workload_class"),
        ("understudy_breaker_state", "drafter"),
    ):
        assert 2 < len({labels[label] for sample, labels in found if sample == name}) <= 33, (name, label)
    assert value(metrics, "understudy_ledger_debt_seconds") == 250.0, "what has no label of its own is summed up"

"""The controller by itself: what it is told, what it says, and what it does about it."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.control.breaker import Tally
from understudy.control.classes import Line
from understudy.control.controller import PLANNING, Controller
from understudy.control.cost import CostModel, Load
from understudy.control.planning import AnswerLengths
from understudy.control.stats import AcceptanceStats
from understudy.core.control import ClassPolicy, Policy
from understudy.core.draft import Draft
from understudy.core.events import Decided

BASE = Load(1, 0, 0)
CHAT = Line("chat", 0)


class Scene:
    """A controller over steps of a second, with rows that take a tenth each."""

    def __init__(self, policy: Policy | None = None, exempt: frozenset[str] = frozenset()) -> None:
        self.events: list[Decided] = []
        self.stats = AcceptanceStats()
        self.lengths = AnswerLengths()
        self.cost = CostModel({1: 1.0, 101: 11.0})
        emit: Any = self.events.append
        self.controller = Controller(
            self.cost, self.stats, self.lengths, policy=policy, control_share=0.0, exempt=exempt, emit=emit
        )

    def step(
        self,
        right: int = 0,
        rows: int = 4,
        *,
        name: str = "chat",
        drafter: str = "ngram",
        forward_s: float | None = None,
        asking_s: float = 0.0,
        scouts: int = 0,
        band: int = 0,
    ) -> None:
        """One text of a class, that drafts."""
        load, line = Load(1 + rows + scouts, 0, 0), Line(name, band)
        if rows:
            self.controller.count(line, drafter, Tally(4, right, rows, min(right, rows)))
        if scouts:
            self.controller.count(line, drafter, Tally(num_scouts=scouts))
        self.controller.settle(
            {line: 1},
            base=BASE,
            load=load,
            forward_s=self.cost.step_s(load, BASE) if forward_s is None else forward_s,
            drafting_s={drafter: {line: asking_s}},
        )

    def view(self, name: str) -> Any:
        """How a class stands."""
        return next(known for known in self.controller.explain().classes if known.workload_class == name)


def test_debt_is_what_rows_and_asking_took_less_what_they_saved() -> None:
    scene = Scene()
    scene.step(right=2, rows=4, asking_s=0.25)
    assert scene.view("chat").debt_s == pytest.approx(0.4 + 0.25 - 2.0)
    assert scene.view("chat").plain_s == pytest.approx(3.0)
    assert scene.view("all").debt_s == pytest.approx(scene.view("chat").debt_s)


def test_rows_to_learn_from_are_owed_as_well() -> None:
    scene = Scene()
    scene.step(rows=0, scouts=15)
    assert scene.view("chat").debt_s == pytest.approx(1.5)
    assert scene.view("all").debt_s == pytest.approx(1.5)


def test_measured_time_counts_and_not_what_was_predicted() -> None:
    scene = Scene()
    scene.step(rows=4, forward_s=3.0)
    assert scene.view("chat").debt_s == pytest.approx(2.0)
    assert scene.controller.explain().num_overruns == 1
    assert any(event.outcome == "overrun" and "3000.0 ms" in event.reason for event in scene.events)


def test_who_owes_too_much_is_not_asked_and_not_given_rows() -> None:
    scene = Scene(exempt=frozenset({"forced"}))
    scene.step(rows=4, forward_s=3.0)
    controller = scene.controller
    assert not controller.asks(CHAT, "ngram")
    assert not controller.asks(CHAT, "forced"), "not even a drafter that has no breaker"
    assert not controller.permits_asking({"chat": 1}, 0.1)
    assert controller.refused({"chat": 2}, BASE, Load(3, 0, 0), {}) == {"chat"}
    assert [event.outcome for event in scene.events].count("refused") == 1, "told once"
    for _ in range(200):
        scene.step(rows=0)
    assert controller.asks(CHAT, "ngram"), "two percent of the plain time have paid for it"
    assert controller.refused({"chat": 2}, BASE, Load(3, 0, 0), {}) == set()


def test_who_owes_too_much_rests_without_being_asked_whether() -> None:
    scene = Scene()
    assert not scene.controller.begin([1])
    scene.step(rows=4, forward_s=3.0)
    assert scene.controller.begin([1]) == "more is owed than the ledger allows"


def test_nobody_is_asked_for_rows_that_there_is_no_room_for() -> None:
    scene = Scene()
    scene.step(rows=4, forward_s=1.9)
    controller = scene.controller
    assert controller.permits_asking({"chat": 1}, 0.05), "there is room for the asking"
    assert not controller.permits_asking({"chat": 1}, 0.05, base=BASE, load=Load(BASE.rows + 8, 0, 0))


def test_one_class_owes_and_another_does_not() -> None:
    scene = Scene()
    for _ in range(5):
        scene.step(right=4, rows=4, name="code")
    scene.step(rows=4, forward_s=3.0, name="chat")
    assert scene.controller.refused({"code": 2, "chat": 2}, Load(2, 0, 0), Load(6, 0, 0), {}) == {"chat"}


def test_classes_beyond_those_with_a_ledger_of_their_own_share_one() -> None:
    scene = Scene()
    for number in range(60):
        scene.step(rows=0, name=f"class-{number}")  # nothing was tried yet
    assert len(scene.controller.explain().classes) <= 33
    names = {f"new-{number}": 1 for number in range(4)}
    scene.controller.refused(names, Load(4, 0, 0), Load(8, 0, 0), dict.fromkeys(names, 3.0))
    tried_s = scene.controller._class("new-0").ledger.cycle_s
    assert tried_s > 12.0, "what they ask for together is weighed as one"


def test_asking_that_is_dear_counts_even_where_nothing_is_proposed() -> None:
    scene = Scene()
    for _ in range(20):
        scene.step(right=4, rows=4)  # credit, so that no ledger stands in the way
    for _ in range(100):
        scene.step(rows=0, asking_s=0.5)
    breaker = scene.controller.explain().breakers[0]
    assert breaker.state == "off"
    assert "lost" in breaker.reason


def test_finding_out_that_nobody_need_be_asked_is_owed_and_says_nothing_of_a_drafter() -> None:
    scene = Scene()
    for _ in range(5):
        scene.step(right=4, rows=4)
    before_s = scene.view("chat").debt_s
    for _ in range(30):
        scene.step(rows=0, drafter=PLANNING, asking_s=0.05)
    assert scene.view("chat").debt_s == pytest.approx(before_s + 1.5), "it took its time"
    assert [(breaker.drafter, breaker.state) for breaker in scene.controller.explain().breakers] == [("ngram", "on")]


def test_policy_that_says_off_is_obeyed_until_a_probe_says_otherwise() -> None:
    policy = Policy(classes={"chat": ClassPolicy(enabled=False, reason="measured last week")})
    scene = Scene(policy)
    controller = scene.controller
    looks = [number for number in range(100) if controller.asks(CHAT, "ngram")]
    assert looks == list(range(7, 100, 8)), "it is looked at, no more"
    assert "the policy says so: measured last week" in scene.view("chat").reason
    assert controller.asks(Line("code", 0), "ngram"), "others are not meant"
    for _ in range(8):
        scene.step(right=4)
    assert controller.asks(CHAT, "ngram")
    assert controller.explain().breakers[0].state == "on"
    assert [event.outcome for event in scene.events] == ["on"]


def test_what_loses_at_one_temperature_is_on_at_the_others() -> None:
    """A draft that is right at temperature 0 and wrong at 1.5 is no draft for which one has to choose."""
    scene = Scene()
    for _ in range(40):
        scene.step(right=4, band=0)
        scene.step(right=0, band=3)
    states = {(view.workload_class, view.temperature): view.state for view in scene.controller.explain().breakers}
    assert states == {("chat", "at temperature 0"): "on", ("chat", "far above temperature 1"): "off"}
    assert scene.events[-1].subject == "chat far above temperature 1, ngram"
    assert {view.workload_class for view in scene.controller.explain().classes} == {"all", "chat"}, (
        "one ledger for both"
    )


def test_policy_names_whom_to_ask_and_how_far() -> None:
    policy = Policy(classes={"chat": ClassPolicy(drafters=("suffix",), max_depth=2, reason="best in replay")})
    controller = Scene(policy).controller
    assert controller.asks(CHAT, "suffix")
    assert not controller.asks(CHAT, "ngram")
    assert controller.depth("chat", "suffix", 0.0) == 2
    reasons = {breaker.drafter: breaker.reason for breaker in controller.explain().breakers}
    assert reasons["ngram"] == "the policy asks suffix: best in replay"


def test_depth_begins_with_a_rule_and_ends_with_what_is_known() -> None:
    scene = Scene(exempt=frozenset({"forced"}))
    assert [scene.controller.depth("chat", "ngram", heat) for heat in (0.0, 0.6, 1.5)] == [4, 3, 1]
    assert scene.controller.depth("chat", "forced", 0.0) == 64
    for _ in range(40):
        scene.stats.observe("chat", Draft.chain([1], confidence=[0.5], source="ngram"), [1])
    assert scene.controller.depth("chat", "ngram", 0.0) == 64
    assert scene.controller.depth("chat", "ngram", 1.5) == 1, "at another temperature nothing is known"


def test_sudden_fall_forgets_and_probes() -> None:
    scene = Scene()
    for _ in range(60):
        scene.step(right=4)
        scene.stats.observe("chat", Draft.chain([1], confidence=[0.5], source="ngram"), [1])
    assert scene.stats.num_seen("chat", "ngram") > 40
    states = []
    for _ in range(30):
        scene.step(right=0)
        states.append(scene.controller.explain().breakers[0].state)
    health = [event for event in scene.events if event.what == "health"]
    assert [event.outcome for event in health] == ["sudden fall"]
    assert "fell from" in health[0].reason
    assert "it is probed" in health[0].reason
    assert scene.stats.num_seen("chat", "ngram") < 3
    assert "off" in states[:25], "the probe lost time"


def test_what_was_learned_survives() -> None:
    scene = Scene()
    for _ in range(15):
        scene.step(right=0)
    for _ in range(40):
        scene.stats.observe("chat", Draft.chain([1], confidence=[0.5], source="ngram"), [2])
    scene.lengths.observe("chat", 77)
    learned = scene.controller.explain().learned
    again = Scene()
    again.controller.recall(learned)
    assert again.controller.explain().learned == learned
    breaker = again.controller.explain().breakers[0]
    assert (breaker.state, breaker.reason) == ("off", learned.breakers[0].reason)
    assert again.controller.depth("chat", "ngram", 0.0) == scene.controller.depth("chat", "ngram", 0.0) == 64


def test_step_in_which_nobody_spoke_is_nothing() -> None:
    scene = Scene()
    scene.controller.count(CHAT, "ngram", Tally(4, 4, 4, 4))
    scene.controller.settle({}, base=BASE, load=BASE, forward_s=1.0, drafting_s={})
    assert scene.controller.explain().num_steps == 0
    scene.step(rows=0)
    assert scene.view("chat").debt_s == 0.0, "what was counted in it is dropped"

from dataclasses import dataclass, field

import pytest

from tests.bench.made_up import answer, plan
from understudy.bench.alternate import Measured, alternate, in_turn
from understudy.bench.served import Answer, Served
from understudy.bench.workloads import Unit


class FakeTime:
    """A clock that only moves when an arm says so."""

    now_s = 50.0

    def perf_counter(self) -> float:
        return self.now_s


CLOCK = FakeTime()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.bench.alternate.time", CLOCK)


@dataclass
class FakeArm:
    """Answers after a while, and writes down when it was its turn."""

    name: str
    diary: list[str]
    seconds: float = 1.0
    answers: list[Answer | type[BaseException]] = field(default_factory=list)
    warmed_up: int = 0

    def warm_up(self, unit: Unit) -> None:
        self.warmed_up += 1

    def serve(self, unit: Unit) -> Served:
        self.diary.append(f"{self.name}:{unit.prompt_class}")
        CLOCK.now_s += self.seconds
        said = self.answers.pop(0) if self.answers else answer()
        if isinstance(said, type):
            raise said
        return Served([said] * len(unit.questions))


class Watcher:
    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.expected_s: list[float] = []

    def at(self, what: str, *, elapsed_s: float, expected_s: float) -> None:
        assert what
        self.expected_s.append(expected_s)

    def finished(self, round_number: int, measured: Measured) -> None:
        self.rounds.append(round_number)


def run(arms: list[FakeArm], *classes: str, budget_s: float = 1e-9) -> Measured:
    return alternate(arms, plan(*classes), serve=in_turn, budget_s=budget_s, watcher=Watcher())


def test_one_round_is_always_run_and_who_begins_changes() -> None:
    diary: list[str] = []
    arms = [FakeArm("plain", diary), FakeArm("default", diary)]
    measured = run(arms, "code", "chat")
    assert diary == ["plain:code", "default:code", "default:chat", "plain:chat"]
    assert measured.num_rounds == 1
    assert measured.num_requests == 4
    assert [turn.unit.prompt_class for turn in measured.turns] == ["code", "chat"]
    assert [arm.warmed_up for arm in arms] == [1, 1]


def test_of_each_class_every_arm_begins_as_often() -> None:
    diary: list[str] = []
    arms = [FakeArm(name, diary, seconds=1.0) for name in ("plain", "a", "b")]
    measured = run(arms, "code", "chat", budget_s=6 * 6.0)
    assert measured.num_rounds == 6
    for name in ("code", "chat"):
        begun = [line for line in diary if line.endswith(name)][::3]
        assert [begun.count(f"{arm.name}:{name}") for arm in arms] == [2, 2, 2]


@pytest.mark.parametrize(("budget_s", "num_rounds"), [(0.1, 1), (7.9, 1), (8.0, 2), (39.0, 9), (40.0, 10)])
def test_the_budget_is_kept_in_whole_rounds(budget_s: float, num_rounds: int) -> None:
    arms = [FakeArm("plain", [], seconds=1.0), FakeArm("default", [], seconds=1.0)]
    measured = run(arms, "code", "chat", budget_s=budget_s)  # a round takes four seconds
    assert measured.num_rounds == num_rounds
    assert len(measured.turns) == 2 * num_rounds
    assert measured.seconds == pytest.approx(4.0 * num_rounds)


def test_a_first_round_longer_than_the_budget_corrects_what_is_expected() -> None:
    watcher = Watcher()
    arms = [FakeArm("plain", [], seconds=50.0)]
    alternate(arms, plan("code", "chat"), serve=in_turn, budget_s=10.0, watcher=watcher)
    assert watcher.rounds == [1]
    assert watcher.expected_s == [10.0, 10.0, 100.0], (
        "warming up, the first unit, and after it is known how long one is"
    )


def test_an_interruption_keeps_what_all_arms_have_served() -> None:
    diary: list[str] = []
    plain = FakeArm("plain", diary)
    measured = run([plain, FakeArm("default", diary, answers=[answer(), KeyboardInterrupt])], "code", "chat")
    assert measured.interrupted
    assert [turn.unit.prompt_class for turn in measured.turns] == ["code"]
    assert measured.num_rounds == 0


def test_a_turn_with_a_failure_is_left_out_for_all_arms() -> None:
    broken = FakeArm("default", [], answers=[answer(error="no answer")])
    measured = run([FakeArm("plain", []), broken], "code", "chat")
    assert [turn.unit.prompt_class for turn in measured.turns] == ["chat"]
    assert measured.errors == ["default: no answer"]
    assert measured.num_requests == 4


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        run([FakeArm("plain", [], answers=[ZeroDivisionError])])

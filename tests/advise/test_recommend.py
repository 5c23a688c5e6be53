"""Advice on made-up texts, of which it is known what pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advise.made_up import scored, transcript
from understudy.advise.recommend import Advice, make_policy, recommend
from understudy.advise.scores import Score
from understudy.advise.timing import Costs
from understudy.control.cost import CostModel
from understudy.control.policy_file import PolicyFile, read_policy, write_policy

FLAT = Costs(cost=CostModel({1: 1.0, 1000: 1.0}))
LINEAR = Costs(cost=CostModel({1: 1.0, 1001: 101.0}))
DEPTHS = (1, 2, 4, 8)


def texts(workload_class: str = "code", count: int = 6, temperature: float = 0.0) -> list:
    return [
        transcript(f"{workload_class}-{n}-{temperature}", workload_class=workload_class, temperature=temperature)
        for n in range(count)
    ]


def scores(found: list, num_right: int, *, drafter: str = "suffix") -> list[Score]:
    return [scored(found, depth, num_right, drafter=drafter) for depth in DEPTHS]


def the_only(advice: list[Advice]) -> Advice:
    (found,) = advice
    return found


def policy_of(advice: list[Advice], drafters: tuple[str, ...] = ("suffix",)) -> PolicyFile:
    return make_policy(advice, model="m", system_fingerprint="f", date="2026-11-15", drafters=drafters)


def test_drafter_that_is_always_right_is_advised_as_deep_as_it_goes() -> None:
    advice = recommend(scores(texts(), 99), FLAT, concurrencies=[1])
    found = the_only(advice)
    assert found.pays
    assert found.best is not None
    assert (found.best.drafter, found.best.depth) == ("suffix", 8)
    assert found.best.acceptance == 1.0
    assert found.best.break_even == pytest.approx(0.0, abs=1e-9), "rows that cost nothing need not earn anything"
    assert found.best.words_per_cycle > 6
    policy = policy_of(advice)
    assert policy.policy.of("code").enabled
    assert policy.policy.of("code").max_depth == 8


def test_drafter_that_is_never_right_is_advised_against() -> None:
    advice = recommend(scores(texts(), 0), LINEAR, concurrencies=[1, 4])
    for found in advice:
        assert not found.pays
        assert found.best is not None
        assert found.best.depth == 1, "the least harm"
        assert found.best.speedup.high < 1.0
        assert found.best.break_even == pytest.approx(0.1, rel=0.1) or found.concurrency > 1
        assert found.reason.startswith("do not speculate")
    policy = policy_of(advice)
    assert not policy.policy.of("code").enabled
    assert "do not speculate" in policy.policy.of("code").reason


def test_even_rows_that_are_free_do_not_make_a_wrong_draft_pay() -> None:
    found = the_only(recommend(scores(texts(), 0), FLAT, concurrencies=[1]))
    assert found.best is not None
    assert found.best.speedup.value == pytest.approx(1.0)
    assert not found.pays, "no gain is no reason"


def test_gain_that_may_be_chance_is_called_so() -> None:
    some = [*texts(count=1), *texts(count=5)]
    lucky = Score("all", "suffix", 4, (*scored(some[:1], 4, 4).scores, *scored(some[1:], 4, 0).scores))
    found = the_only(recommend([lucky], Costs(cost=CostModel({1: 1.0, 5: 1.05, 100: 9.0})), concurrencies=[1]))
    assert found.best is not None
    assert found.best.speedup.low < 1.0 < found.best.speedup.value
    assert not found.pays
    assert "may be chance" in found.reason


def test_depth_is_as_far_as_words_are_right() -> None:
    found = the_only(recommend(scores(texts(), 2), LINEAR, concurrencies=[1]))
    assert found.best is not None
    assert found.best.depth == 2


def test_better_drafter_wins_and_classes_are_apart() -> None:
    both = [*texts("code"), *texts("chat")]
    mixed = [
        *scores(both, 1, drafter="ngram"),
        *[_by_class(both, depth, {"code": 4, "chat": 0}) for depth in DEPTHS],
    ]
    advice = {found.workload_class: found for found in recommend(mixed, LINEAR, concurrencies=[1])}
    assert advice["code"].best is not None
    assert (advice["code"].best.drafter, advice["code"].best.depth) == ("suffix", 4)
    assert advice["chat"].best is not None
    assert (advice["chat"].best.drafter, advice["chat"].best.depth) == ("ngram", 1)
    policy = policy_of(list(advice.values())).policy
    assert policy.of("code").drafters is None, "it is the one that there is anyway"
    assert policy.of("chat").drafters == ("ngram",)


def _by_class(found: list, depth: int, num_right: dict[str, int]) -> Score:
    parts = [
        scored([text for text in found if text.workload_class == name], depth, right).scores
        for name, right in num_right.items()
    ]
    return Score("all", "suffix", depth, tuple(one for part in parts for one in part))


def test_class_is_on_if_it_pays_anywhere() -> None:
    steep = Costs(cost=CostModel({1: 1.0, 5: 1.2, 12: 1.2, 100: 60.0}))
    advice = recommend(scores(texts(count=24), 3), steep, concurrencies=[1, 16])
    assert [found.pays for found in advice] == [True, False]
    of_code = policy_of(advice).policy.of("code")
    assert of_code.enabled
    assert of_code.max_depth == 4


def test_temperatures_are_apart() -> None:
    cold, hot = texts(temperature=0.0), texts(temperature=1.0)
    mixed = [
        Score("all", "suffix", depth, (*scored(cold, depth, 4).scores, *scored(hot, depth, 0).scores))
        for depth in DEPTHS
    ]
    advice = recommend(mixed, LINEAR, concurrencies=[1])
    assert {found.temperature: found.pays for found in advice} == {0.0: True, 1.0: False}


def test_own_rule_that_is_as_good_is_left_alone() -> None:
    fixed = scores(texts(), 4)
    own = Score("all", "suffix", None, scored(texts(), 4, 4).scores)
    poor = Score("all", "suffix", None, scored(texts(), 1, 1).scores)
    advice = recommend(fixed, LINEAR, concurrencies=[1], own_rule={1: own, 8: poor})
    of_code = policy_of(advice).policy.of("code")
    assert of_code.enabled
    assert (of_code.max_depth, of_code.drafters) == (None, None)
    of_code = policy_of(recommend(fixed, LINEAR, concurrencies=[1], own_rule={1: poor})).policy.of("code")
    assert of_code.max_depth == 4


def test_answers_that_are_too_short_say_nothing() -> None:
    short = [transcript(str(n), num_tokens=1) for n in range(3)]
    found = the_only(recommend(scores(short, 4), FLAT, concurrencies=[1]))
    assert not found.pays
    assert "too short" in found.reason
    assert not policy_of([found]).policy.of("code").enabled


def test_policy_can_be_read_back(tmp_path: Path) -> None:
    advice = recommend(scores([*texts("My Class"), *texts("chat")], 3), LINEAR, concurrencies=[1, 2])
    policy = policy_of(advice)
    write_policy(tmp_path / "p.json", policy)
    assert read_policy(tmp_path / "p.json") == policy
    assert set(policy.classes) == {"my-class", "chat"}
    assert policy.evidence["chat"].speedup is not None
    assert [line["class"] for line in map(Advice.describe, advice)] == ["My Class", "My Class", "chat", "chat"]

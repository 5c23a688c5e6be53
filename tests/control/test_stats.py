"""What a stated confidence is worth is learned from what was said, and forgotten when it changes."""

from __future__ import annotations

import math
import random

import pytest

from understudy.control.classes import Line
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.control import LearnedRate
from understudy.core.draft import EMPTY, Draft


def single(confidence: float, *, token: int = 1, source: str = "x") -> Draft:
    return Draft.chain([token], confidence=[confidence], source=source)


def learned(stats: AcceptanceStats, confidence: float, *, source: str = "x", workload_class: str = "chat") -> float:
    (survival,) = stats.survival(workload_class, single(confidence, source=source))
    return survival


def test_before_anything_is_known_confidence_is_half_believed() -> None:
    stats = AcceptanceStats()
    beliefs = [learned(stats, confidence) for confidence in (0.0, 0.2, 0.5, 0.9, 1.0)]
    assert beliefs == sorted(beliefs)
    assert beliefs[0] == 0.0
    assert all(belief < confidence for belief, confidence in zip(beliefs[1:], (0.2, 0.5, 0.9, 1.0), strict=True))


@pytest.mark.parametrize("truth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("claimed", [0.05, 0.55, 0.95])
def test_calibration_converges_whatever_is_claimed(truth: float, claimed: float) -> None:
    rng = random.Random(0)
    stats = AcceptanceStats()
    draft = single(claimed)
    estimates = []
    for _ in range(3000):
        stats.observe("chat", draft, [1 if rng.random() < truth else 2])
        estimates.append(learned(stats, claimed))
    mean = sum(estimates[500:]) / len(estimates[500:])
    rate = (200 * truth + 6 * 0.6 * claimed) / 206  # two hundred trials are remembered, the prior counts as six
    error = math.sqrt(rate * (1.0 - rate) / 206)
    assert mean == pytest.approx(rate - error, abs=0.03), "one standard error below what was measured"
    assert max(abs(estimate - truth) for estimate in estimates[500:]) < 0.35


def test_the_past_is_forgotten() -> None:
    stats = AcceptanceStats()
    for word in [1] * 1000 + [2] * 600:
        stats.observe("chat", single(0.5), [word])
    assert learned(stats, 0.5) < 0.1


def test_bands_classes_and_drafters_are_learned_apart() -> None:
    stats = AcceptanceStats()
    before = {
        key: learned(stats, key[0], source=key[1], workload_class=key[2])
        for key in ((0.9, "x", "chat"), (0.5, "y", "chat"), (0.5, "x", "code"))
    }
    for _ in range(100):
        stats.observe("chat", single(0.5), [2])
    assert learned(stats, 0.5) < 0.1
    for (confidence, source, workload_class), belief in before.items():
        assert learned(stats, confidence, source=source, workload_class=workload_class) == belief


def test_survival_is_the_product_along_the_path() -> None:
    stats = AcceptanceStats()
    one = learned(stats, 0.8)
    draft = Draft((1, 2, 3, 4), (-1, 0, 1, 0), (0.8,) * 4, ("x",) * 4)
    assert stats.survival("chat", draft) == pytest.approx([one, one**2, one**3, one**2])


def test_survival_of_nothing_is_nothing() -> None:
    stats = AcceptanceStats()
    assert stats.survival("chat", EMPTY) == []
    stats.observe("chat", EMPTY, [1, 2])


def counts(stats: AcceptanceStats) -> dict[int, tuple[float, float]]:
    """Hits and trials, by band, rounded."""
    known = [rate for rate in stats.rates() if rate.kind == "confidence"]
    return {rate.index: (round(rate.hits, 6), round(rate.trials, 6)) for rate in known}


def test_only_nodes_that_the_walk_reached_are_counted() -> None:
    """Each node of this tree has a band of its own: the counts show who was judged."""
    stats = AcceptanceStats()
    tree = Draft(
        tokens=(1, 2, 3, 4, 5),
        parents=(-1, -1, 0, 1, 3),
        confidence=(0.05, 0.15, 0.25, 0.35, 0.45),
        sources=("x",) * 5,
    )
    stats.observe("chat", tree, [2, 9, 5])
    assert counts(stats) == {0: (0.0, 1.0), 1: (1.0, 1.0), 3: (0.0, 1.0)}


def test_words_cut_off_by_a_stop_judge_nothing_beyond_it() -> None:
    stats = AcceptanceStats()
    stats.observe("chat", Draft.chain([1, 2], confidence=[0.05, 0.15], source="x"), [1])
    assert counts(stats) == {0: (1.0, 1.0)}


def test_no_words_judge_nothing() -> None:
    stats = AcceptanceStats()
    stats.observe("chat", single(0.5), [])
    assert counts(stats) == {}


@pytest.mark.parametrize("claimed", [float("nan"), float("inf"), -float("inf"), -1.0, 2.0, 1e300])
def test_senseless_confidence_is_brought_within_bounds(claimed: float) -> None:
    stats = AcceptanceStats()
    for word in (1, 2, 1):
        assert 0.0 <= learned(stats, claimed) <= 1.0
        stats.observe("chat", single(claimed), [word])
    assert all(band in range(10) for band in counts(stats))


def test_beyond_thirty_two_classes_the_rest_is_one() -> None:
    stats, draft = AcceptanceStats(), Draft.chain([1], confidence=[0.5], source="ngram")
    for number in range(40):
        stats.survival(f"class {number}", draft)
    for _ in range(50):
        stats.observe("one more", draft, [1])
    assert stats.survival("and another", draft) == stats.survival("other", draft)
    assert stats.survival("and another", draft)[0] > stats.survival("class 3", draft)[0]


def test_children_of_one_node_share_no_more_than_certainty() -> None:
    draft = Draft((1, 2, 3), (-1, -1, 0), (0.9, 0.6, 0.5), ("a", "b", "a"))
    assert survival_of(draft) == pytest.approx([0.6, 0.4, 0.3])
    assert survival_of(Draft((1, 2), (-1, -1), (0.5, 0.2), ("a", "b"))) == pytest.approx([0.5, 0.2])


def test_greedy_warm_and_hot_are_learned_apart() -> None:
    stats = AcceptanceStats()
    draft = Draft.chain([1], confidence=[0.5], source="a")
    for _ in range(50):
        stats.observe("chat", draft, [1], temperature=0.0)
        stats.observe("chat", draft, [2], temperature=0.7)
    greedy, warm, hot = (stats.acceptance_at("chat", "a", 1, temperature=t) for t in (0.0, 0.7, 1.0))
    assert hot == pytest.approx(0.6)
    assert warm < 0.2
    assert greedy > 0.9
    assert stats.survival("chat", draft, temperature=0.7)[0] < 0.1
    assert stats.survival("chat", draft)[0] > 0.8


def test_what_is_certain_is_believed_as_stated() -> None:
    stats = AcceptanceStats(certain=("sure",))
    mixed = Draft((1, 2), (-1, 0), (1.0, 0.5), ("sure", "x"))
    for _ in range(50):
        stats.observe("chat", mixed, [3])
    sure, guess = stats.calibrated("chat", mixed).confidence
    assert sure == 1.0
    assert guess < 0.5


def test_what_was_learned_is_recalled_as_it_was() -> None:
    rng, stats, again = random.Random(0), AcceptanceStats(), AcceptanceStats()
    for _ in range(300):
        draft = single(rng.random(), token=rng.randrange(2), source=rng.choice("xyz"))
        stats.observe(rng.choice(("chat", "code")), draft, [1], temperature=rng.choice((0.0, 0.5, 1.0, 1.5)))
    again.recall([*stats.rates(), LearnedRate("confidence", "chat", 7, "x", 0, 1.0, 1.0)])
    assert sorted(map(str, again.rates())) == sorted(map(str, stats.rates()))
    assert stats.acceptance_at("chat", "x", 1) == pytest.approx(again.acceptance_at("chat", "x", 1), rel=1e-12)


def test_a_class_that_nobody_knows_is_believed_to_be_like_the_others_at_its_temperature() -> None:
    stats = AcceptanceStats()
    others = [f"class {number}" for number in range(8)]
    for _ in range(100):
        for name in others:
            stats.observe(name, single(0.9, token=1), [1], temperature=0.0)
            stats.observe(name, single(0.9, token=0), [1], temperature=1.5)
    assert stats.acceptance_at("code", "x", 1, temperature=0.0) > 0.85
    assert stats.acceptance_at("code", "x", 1, temperature=1.5) < 0.2
    assert stats.acceptance_at("code", "x", 1, temperature=1.0) == pytest.approx(0.6), "nothing is known there"
    for _ in range(100):
        stats.observe("code", single(0.9, token=1), [1], temperature=1.5)
    assert stats.acceptance_at("code", "x", 1, temperature=1.5) > 0.9, "what is known of it counts more"


def test_one_class_says_little_of_another_however_well_it_is_known() -> None:
    """Of chat nothing is foreseen; that is no reason not to look at code."""
    stats = AcceptanceStats()
    for count in range(100):
        stats.observe("chat", single(0.9, token=0), [1])
        stats.observe("rag" if count < 50 else "chat", single(0.9, token=0), [1])
    assert stats.acceptance_at("chat", "x", 1) < 0.1
    assert 0.3 < stats.acceptance_at("code", "x", 1) < 0.4
    for name in ("chat", "rag"):
        stats.forget(Line(name, 0), "x")
        for _ in range(100):
            stats.observe(name, single(0.9, token=1), [1])
    assert stats.acceptance_at("code", "x", 1) > 0.6, "and what changes there is heard of"


def test_a_confidence_that_was_taught_is_believed_sooner() -> None:
    stats = AcceptanceStats(trusted={"taught": 0.9})
    assert learned(stats, 0.8, source="taught") > 1.5 * learned(stats, 0.8, source="x")
    group = stats.group("chat", 0.0)
    chain = single(0.8, source="taught")
    assert stats.chain_survival(group, chain) == pytest.approx(learned(stats, 0.8, source="taught"))


def test_drafters_beyond_those_that_are_told_apart_share_a_place() -> None:
    stats = AcceptanceStats()
    for number in range(40):
        stats.observe("chat", single(0.5, source=f"drafter {number}"), [1])
    assert learned(stats, 0.5, source="drafter 39") == learned(stats, 0.5, source="one more")
    assert learned(stats, 0.5, source="drafter 39") > learned(stats, 0.5, source="drafter 1")


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_chain_survives_as_the_compiled_arithmetic_says(seed: int) -> None:
    """To the last bit: whether a draft goes on must not hang on which of the two was asked."""
    rng = random.Random(seed)
    stats = AcceptanceStats(certain=["sure"])
    for _ in range(rng.randrange(200)):
        stats.observe("chat", single(rng.random(), source="model"), [rng.randrange(2)], temperature=0.7)
    source = rng.choice(("model", "sure", "unheard of"))
    stated = [rng.choice((rng.random(), 0.0, 1.0, 1.5, -0.5, math.nan)) for _ in range(rng.randrange(1, 9))]
    chain = Draft.chain(range(len(stated)), confidence=stated, source=source)
    survival = stats.survival("chat", chain, temperature=0.7)[-1]
    assert stats.chain_survival(stats.group("chat", 0.7), chain) == survival


def test_what_fails_far_above_a_temperature_of_one_is_not_held_against_one() -> None:
    stats, draft = AcceptanceStats(), Draft.chain([7], confidence=[0.9], source="suffix")
    for _ in range(50):
        stats.observe("code", draft, [8], temperature=1.5)
        stats.observe("code", draft, [7], temperature=1.0)
    (at_one,), (far_above,) = (stats.survival("code", draft, temperature=t) for t in (1.0, 1.5))
    assert at_one > 0.9
    assert far_above < 0.1
    assert stats.acceptance_at("code", "suffix", 1, temperature=1.0) > 0.9
    assert stats.acceptance_at("code", "suffix", 1, temperature=2.0) < 0.1

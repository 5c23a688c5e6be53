"""The compiled arithmetic decides as its slow twin does, over drafts, tables and claims of every kind."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control import reference
from understudy.control import choosing
from understudy.control.choosing import BELIEVED
from understudy.control.cost import CostModel, Load
from understudy.control.policy import Offer, StatedOffers, choose, decide, prepare
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.draft import ROOT, Draft

CERTAIN = frozenset({"forced"})
SOURCES = ("ngram", "suffix", "forced")
CLASSES = ("chat", "code", "math")
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
ROUND_CLAIMS = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Claims that make ties."""
SENSELESS_CLAIMS = (-1.0, 7, float("nan"), float("inf"), -float("inf"), 10**400, True)


def random_draft(rng: random.Random, most_nodes: int) -> Draft:
    parents = [rng.randint(ROOT, node - 1) for node in range(rng.randint(0, most_nodes))]
    kinds = rng.choice((ROUND_CLAIMS, (*ROUND_CLAIMS, *SENSELESS_CLAIMS), None))
    claims = tuple(rng.choice(kinds) if kinds else rng.random() for _ in parents)
    return Draft(
        tuple(rng.randrange(3) for _ in parents), tuple(parents), claims, tuple(rng.choice(SOURCES) for _ in parents)
    )


def random_stats(rng: random.Random) -> AcceptanceStats:
    stats = AcceptanceStats(certain=CERTAIN)
    for _ in range(rng.choice((0, 5, 60))):
        words = [rng.randrange(3) for _ in range(4)]
        stats.observe(rng.choice(CLASSES), random_draft(rng, 6), words, temperature=rng.choice(TEMPERATURES))
    return stats


def random_cost(rng: random.Random) -> CostModel:
    """Tables of any shape, entries out of order and disturbed ones among them."""
    grid = rng.sample(range(1, 70), rng.choice((1, 2, 3, 10)))
    rise = rng.choice((0.0, 0.001, 0.05, 1.0))
    table = {rows: rng.uniform(0.8, 1.0) + rise * rows for rows in grid}
    return CostModel(
        table,
        rng.choice((0.0, 1e-5)),
        rng.choice((0.0, 1e-5, 1e-3)),
        rng.choice((1, 0.7, 3.1)),
        rng.choice((1, 0.6, 2.5)),
    )


def random_offers(rng: random.Random, stats: AcceptanceStats) -> StatedOffers:
    count = rng.choice((1, 1, 2, 5, 20))
    return StatedOffers(
        drafts=[random_draft(rng, rng.choice((0, 1, 4, 32))) for _ in range(count)],
        groups=[
            rng.choice((BELIEVED, *(stats.group(rng.choice(CLASSES), rng.choice(TEMPERATURES)) for _ in range(4))))
            for _ in range(count)
        ],
        contexts=[rng.choice((0, 1, 50, rng.randint(1, 4000))) for _ in range(count)],
        rooms_s=[rng.choice((None, 0.0, rng.random(), 100.0)) for _ in range(count)],
        forced=[rng.random() < rng.choice((0.0, 0.0, 0.3)) for _ in range(count)],
    )


@settings(deadline=None, max_examples=400)
@given(seed=st.integers(0, 10**9))
def test_decides_as_the_twin_does(seed: int) -> None:
    rng = random.Random(seed)
    stats, cost = random_stats(rng), random_cost(rng)
    offers = random_offers(rng, stats)
    base = Load.of((1, context) for context in offers.contexts)
    max_rows, spent_s = rng.choice((0, 1, 5, 33, 1000)), rng.choice((0, 0.0, 0.3))
    num_emitting = rng.choice((None, len(offers.drafts) + rng.randint(0, 3)))
    decision = decide(offers, base, cost, stats, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s)
    nodes, gain = reference.decide(
        offers,
        base,
        cost,
        reference.rates_by_group(stats),
        certain=CERTAIN,
        max_rows=max_rows,
        num_emitting=num_emitting,
        spent_s=spent_s,
    )
    assert decision.nodes == nodes
    assert decision.gain == pytest.approx(gain, rel=1e-9)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_chooses_as_the_twin_does_where_survival_is_known(seed: int) -> None:
    rng = random.Random(seed)
    cost = random_cost(rng)
    offers = [
        Offer(
            context=rng.randint(0, 99),
            survival=sorted(
                (rng.choice((*ROUND_CLAIMS, rng.random())) for _ in range(rng.randint(0, 9))), reverse=True
            ),
            room_s=rng.choice((None, 0.0, rng.random())),
            forced=rng.random() < 0.1,
        )
        for _ in range(rng.randint(1, 9))
    ]
    base = Load.of((1, offer.context) for offer in offers)
    max_rows = rng.choice((0, 3, 100))
    decision = choose(offers, base, cost, max_rows=max_rows)
    nodes, gain = reference.choose(offers, base, cost, max_rows=max_rows)
    assert decision.nodes == nodes
    assert decision.gain == pytest.approx(gain, rel=1e-9)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**9))
def test_every_number_on_the_way_is_the_twins_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    stats, draft = random_stats(rng), random_draft(rng, 20)
    group, temperature = rng.choice(CLASSES), rng.choice(TEMPERATURES)
    calibrated = stats.calibrated(group, draft, temperature=temperature)
    learned = reference.acceptance(draft, stats.group(group, temperature), reference.rates_by_group(stats), CERTAIN)
    assert list(calibrated.confidence) == learned
    assert survival_of(calibrated) == reference.survival(draft, learned)


def test_a_step_of_many_is_ranked_in_full() -> None:
    """Thousands of nodes of survival so like that they share a bin."""
    rng = random.Random(0)
    flat = CostModel({1: 1.0, 9999: 1.0001})
    offers = [Offer(context=1, survival=[0.5 + 1e-6 * rng.random()], room_s=1.0) for _ in range(2000)]
    best = sorted(range(2000), key=lambda index: -offers[index].survival[0])[:700]
    bought = choose(offers, Load(2000, 2000, 2000), flat, max_rows=700).nodes
    assert [index for index, line in enumerate(bought) if line] == sorted(best)


def test_whatever_is_given_is_not_compiled_for_anew() -> None:
    """Whole numbers where fractions are usual, empty drafts, no offer: compiling would hold up a step for seconds."""
    prepare()
    before = [len(kernel.signatures) for kernel in (choosing.decide, choosing.choose, choosing.calibrate)]  # type: ignore[attr-defined]
    stats = AcceptanceStats()
    base, cost = Load(1, 0, 0), CostModel({1: 1, 2: 2}, 0, 0, 1)
    whole = Draft((1, 2), (-1, 0), (1, 0), ("x", "y"))
    for drafts in ([], [Draft()], [whole, Draft()]):
        count = len(drafts)
        columns = {"groups": [0] * count, "contexts": [0] * count, "rooms_s": [0] * count, "forced": [False] * count}
        decide(StatedOffers(drafts=drafts, **columns), base, cost, stats, max_rows=2, num_emitting=1, spent_s=0)
        choose([Offer(0, [1, 0])] * count, base, cost, max_rows=2, num_emitting=1)
    stats.survival("chat", whole)
    after = [len(kernel.signatures) for kernel in (choosing.decide, choosing.choose, choosing.calibrate)]  # type: ignore[attr-defined]
    assert before == after == [1, 1, 1]


def test_a_draft_that_is_no_tree_is_refused() -> None:
    """Arrays have no bounds in compiled code: a bad parent would read what is not there."""
    for parents in ((0, 0), (-2, 0), (-1, 7)):
        bad = Draft((1, 2), parents, (0.5, 0.5), ("x", "x"))
        with pytest.raises(AssertionError):
            survival_of(bad)


def test_several_times_as_fast_as_the_twin() -> None:
    rng = random.Random(1)
    stats = random_stats(rng)
    offers = StatedOffers(
        drafts=[Draft.chain([1, 2, 3, 4], confidence=[0.9] * 4, source="suffix") for _ in range(64)],
        groups=[stats.group(rng.choice(CLASSES), 0.0) for _ in range(64)],
        contexts=[100] * 64,
        rooms_s=[0.1] * 64,
        forced=[False] * 64,
    )
    base, cost, rates = Load(64, 6400, 6400), CostModel({1: 1.0, 400: 1.4}), reference.rates_by_group(stats)
    compiled = timeit.repeat(lambda: decide(offers, base, cost, stats, max_rows=256), number=5, repeat=20)
    plain = timeit.repeat(
        lambda: reference.decide(offers, base, cost, rates, certain=CERTAIN, max_rows=256), number=5, repeat=20
    )
    assert min(compiled) < min(plain) / 4  # some twenty times, where nothing else runs

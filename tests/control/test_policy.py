"""What is bought is what gives most tokens per second, against brute force over every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.control.cost import CostModel, Load
from understudy.control.policy import LEAST_GAIN, MOST_DELAY, Offer, choose
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import ROOT, Draft

Tree = tuple[list[int], list[float]]
"""Parents and survival, by node."""


def random_tree(rng: random.Random, most_nodes: int) -> Tree:
    parents = [rng.randint(ROOT, node - 1) for node in range(rng.randint(0, most_nodes))]
    survival: list[float] = []
    for parent in parents:
        survival.append((1.0 if parent == ROOT else survival[parent]) * rng.random())
    return parents, survival


def closed_subsets(parents: list[int]) -> list[tuple[int, ...]]:
    """Every set of nodes that holds the parent of each of its nodes."""
    nodes = range(len(parents))
    return [
        subset
        for size in range(len(parents) + 1)
        for subset in itertools.combinations(nodes, size)
        if all(parents[node] == ROOT or parents[node] in subset for node in subset)
    ]


def speed(chosen: list[tuple[int, ...]], offers: list[Offer], base: Load, cost: CostModel) -> float:
    """Tokens per second if these nodes are bought."""
    rows = base.rows + sum(len(nodes) for nodes in chosen)
    reads = base.reads + sum(offer.context * len(nodes) for offer, nodes in zip(offers, chosen, strict=True))
    survivals = (offer.survival[node] for offer, nodes in zip(offers, chosen, strict=True) for node in nodes)
    return (len(offers) + sum(survivals)) / cost.step_s(Load(rows, base.keys, reads))


def is_fair(chosen: list[tuple[int, ...]], offers: list[Offer], base: Load, cost: CostModel) -> bool:
    """Whether nobody waits longer for words than plainly, but for a little."""
    rows = base.rows + sum(len(nodes) for nodes in chosen)
    reads = base.reads + sum(offer.context * len(nodes) for offer, nodes in zip(offers, chosen, strict=True))
    delay = cost.step_s(Load(rows, base.keys, reads)) / cost.step_s(base)
    words = [1 + sum(offer.survival[n] for n in nodes) for offer, nodes in zip(offers, chosen, strict=True)]
    return delay <= (min(words) + MOST_DELAY) * (1 + 1e-12)


def base_of(offers: list[Offer]) -> Load:
    return Load.of((1, offer.context) for offer in offers)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force_over_all_trees_at_once(seed: int) -> None:
    """At equal contexts, whatever rows cost: no choice of nodes is faster than the one that is bought."""
    rng = random.Random(seed)
    trees = [random_tree(rng, 6) for _ in range(rng.randint(1, 2))]
    offers = [Offer(context=50, survival=survival) for _, survival in trees]
    table = {rows: rng.uniform(0.5, 1.0) + 0.1 * rng.random() * rows for rows in (1, 2, 4, 8, 16)}
    cost = CostModel(table, per_key_s=rng.random() / 1000, per_read_s=rng.choice((0.0, 1e-4)))
    max_rows = rng.choice((2, 5, 100))
    decision = choose(offers, base_of(offers), cost, max_rows=max_rows)
    choices = itertools.product(*(closed_subsets(parents) for parents, _ in trees))
    within = [list(choice) for choice in choices if sum(len(nodes) for nodes in choice) <= max_rows]
    best = max(speed(choice, offers, base_of(offers), cost) for choice in within)
    bought = [tuple(line) for line in decision.nodes]
    plain = speed([()] * len(offers), offers, base_of(offers), cost)
    fastest = [choice for choice in within if speed(choice, offers, base_of(offers), cost) == best]
    wanted = best if best >= LEAST_GAIN * plain else plain
    assert is_fair(bought, offers, base_of(offers), cost)
    if wanted == plain or any(is_fair(choice, offers, base_of(offers), cost) for choice in fastest):
        assert speed(bought, offers, base_of(offers), cost) == pytest.approx(wanted)
    else:
        assert speed(bought, offers, base_of(offers), cost) >= plain
    assert bought in within, "closed under parents, within the room"


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_never_expects_to_be_slower_than_plain(seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, 10) for _ in range(rng.randint(1, 5))]
    offers = [Offer(context=rng.randint(1, 4000), survival=survival) for _, survival in trees]
    cost = CostModel({1: rng.random() + 0.01, 8: rng.random() + 0.01}, rng.random() * 1e-3, rng.random() * 1e-3)
    decision = choose(offers, base_of(offers), cost, max_rows=rng.randint(0, 40))
    bought = [tuple(line) for line in decision.nodes]
    plain = speed([()] * len(offers), offers, base_of(offers), cost)
    assert speed(bought, offers, base_of(offers), cost) >= plain * (1 - 1e-12)
    for (parents, _), line in zip(trees, bought, strict=True):
        assert all(parents[node] == ROOT or parents[node] in line for node in line)
        assert list(line) == sorted(set(line))


def chain(*confidence: float) -> list[float]:
    return list(itertools.accumulate(confidence, lambda a, b: a * b))


FLAT = CostModel({1: 1.0, 64: 1.0001})
DEAR = CostModel({1: 1.0, 64: 64.0})


def test_free_rows_are_all_bought() -> None:
    offers = [Offer(context=10, survival=chain(0.9, 0.5, 0.1))]
    decision = choose(offers, base_of(offers), FLAT, max_rows=32)
    assert decision.nodes == [[0, 1, 2]]
    assert "3 of 3 drafted rows bought" in decision.reason


def test_dear_rows_are_not_bought_however_good() -> None:
    offers = [Offer(context=10, survival=chain(0.99, 0.99))]
    decision = choose(offers, base_of(offers), DEAR, max_rows=32)
    assert decision.nodes == [[]]
    assert decision.reason == "none of 2 drafted rows would have paid for its time"


def test_poor_guesses_are_not_bought() -> None:
    cost = CostModel({1: 1.0, 2: 1.1, 64: 7.3})
    good, poor = Offer(context=10, survival=[0.9]), Offer(context=10, survival=[0.01])
    assert choose([good], base_of([good]), cost, max_rows=32).nodes == [[0]]
    assert choose([poor], base_of([poor]), cost, max_rows=32).nodes == [[]]


def test_long_context_lowers_what_is_bought() -> None:
    cost = CostModel({1: 1.0, 64: 1.2}, per_read_s=1e-3)
    bought = []
    for context in (0, 100, 300, 10_000):
        offers = [Offer(context=context, survival=chain(*[0.8] * 8))]
        bought.append(len(choose(offers, base_of(offers), cost, max_rows=32).nodes[0]))
    assert bought == sorted(bought, reverse=True)
    assert bought[0] == 8
    assert bought[-1] == 0


def test_large_batch_lowers_what_is_bought() -> None:
    """Rows are free up to eight and dear beyond: the more sequences, the fewer each may draft."""
    cost = CostModel({1: 1.0, 8: 1.01, 16: 5.0, 32: 13.0})
    bought = []
    for batch in (1, 4, 8):
        offers = [Offer(context=10, survival=chain(0.7, 0.7, 0.7)) for _ in range(batch)]
        bought.append(sum(len(line) for line in choose(offers, base_of(offers), cost, max_rows=99).nodes) / batch)
    assert bought == [3.0, 1.0, 0.0]


def test_a_step_in_the_price_is_jumped_if_what_lies_behind_pays() -> None:
    """The second row costs a jump and the next are free: stopping at the first loss would miss them."""
    cost = CostModel({1: 1.0, 2: 1.8, 9: 1.8})
    offers = [Offer(context=10, survival=chain(*[0.75] * 8))]
    assert speed([(0,)], offers, base_of(offers), cost) < speed([()], offers, base_of(offers), cost)
    assert len(choose(offers, base_of(offers), cost, max_rows=32).nodes[0]) == 8


def test_room_goes_to_the_surest_nodes_of_all_requests() -> None:
    offers = [
        Offer(context=10, survival=[0.5, 0.4]),
        Offer(context=10, survival=[0.9, 0.8]),
        Offer(context=10, survival=[]),
    ]
    assert choose(offers, base_of(offers), FLAT, max_rows=3).nodes == [[0], [0, 1], []]
    assert choose(offers, base_of(offers), FLAT, max_rows=0).nodes == [[], [], []]


def test_forced_is_bought_whatever_it_costs_as_far_as_there_is_room() -> None:
    offers = [Offer(context=10, survival=[0.0, 0.0], forced=True), Offer(context=10, survival=[0.3])]
    decision = choose(offers, base_of(offers), DEAR, max_rows=32)
    assert decision.nodes == [[0, 1], []]
    assert decision.reason == "2 drafted rows were forced"
    assert choose(offers, base_of(offers), DEAR, max_rows=1).nodes == [[0], []]


def test_forced_and_free_together() -> None:
    offers = [Offer(context=10, survival=[0.1, 0.1], forced=True), Offer(context=10, survival=[0.9, 0.5])]
    assert choose(offers, base_of(offers), FLAT, max_rows=3).nodes == [[0, 1], [0]]


def test_nothing_offered() -> None:
    empty = [Offer(context=5, survival=[])]
    assert choose(empty, base_of(empty), FLAT, max_rows=8).reason == "no draft was offered"


def test_ties_keep_parents_before_children() -> None:
    """Nodes that are sure to follow each other are equally likely, and still need their parents."""
    offers = [Offer(context=10, survival=[1.0] * 5)]
    for max_rows in range(6):
        assert choose(offers, base_of(offers), FLAT, max_rows=max_rows).nodes == [list(range(min(5, max_rows)))]


def test_survival_of_a_real_draft_never_rises_along_a_path() -> None:
    """What the policy relies on, whatever a drafter claims of itself."""
    rng = random.Random(4)
    stats = AcceptanceStats()
    for _ in range(200):
        parents, _ = random_tree(rng, 12)
        claimed = tuple(rng.choice((-1.0, 0.0, 0.5, 1.0, 7.0, float("nan"), float("inf"))) for _ in parents)
        draft = Draft(tuple(rng.randrange(3) for _ in parents), tuple(parents), claimed, ("x",) * len(parents))
        survival = stats.survival("c", draft)
        assert all(0.0 <= survival[n] <= (1.0 if p == ROOT else survival[p]) for n, p in enumerate(parents))
        stats.observe("c", draft, [rng.randrange(3) for _ in range(3)])


def test_first_words_of_the_same_pass_count_as_emitted() -> None:
    """Nine words come out of the pass anyway: half a word more is not worth a tenth of its time."""
    cost = CostModel({1: 1.0, 9: 1.5, 10: 1.7})
    offers, base = [Offer(context=0, survival=[0.5])], Load(9, 0, 0)
    assert choose(offers, base, cost, max_rows=8, num_emitting=9).nodes == [[]]
    assert choose(offers, base, cost, max_rows=8, num_emitting=1).nodes == [[0]]


def test_time_that_went_into_drafting_makes_every_cycle_longer() -> None:
    cost = CostModel({1: 1.0, 2: 2.0})
    bought = {
        (survival, spent_s): choose([Offer(0, [survival])], Load(1, 0, 0), cost, max_rows=8, spent_s=spent_s).nodes
        for survival in (0.05, 0.3)
        for spent_s in (0.0, 1.0, 10.0)
    }
    assert [pair for pair, nodes in bought.items() if nodes == [[0]]] == [(0.3, 10.0)]


def test_nobody_pays_for_what_another_gains() -> None:
    cost = CostModel({1: 1.0, 2: 1.0, 3: 1.2, 4: 1.4})
    sure, idle = Offer(context=10, survival=[0.9]), Offer(context=10, survival=[])
    alone = choose([sure], base_of([sure]), cost, max_rows=8)
    beside = choose([sure, idle], base_of([sure, idle]), cost, max_rows=8)
    both = choose([sure, sure], base_of([sure, sure]), cost, max_rows=8)
    first_word = choose([sure], Load(2, 20, 20), cost, max_rows=8, num_emitting=2)
    assert (alone.nodes, beside.nodes, both.nodes, first_word.nodes) == ([[0]], [[], []], [[0], [0]], [[]])

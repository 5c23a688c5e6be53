"""Trees: the children that the target's dice favour, the nodes that most likely survive, within the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.grown_trees import Path, by_depth, grow, grow_by_levels

from understudy.core.draft import EMPTY, Draft, is_tree, is_well_typed
from understudy.core.request import SamplingParams
from understudy.drafters.base import Budget, Context
from understudy.drafters.tree import Guesses, Shape, children
from understudy.sampling.noise import NoiseKey
from understudy.sampling.processors import Sampler

VOCAB_SIZE = 60
WIDE = Budget(max_depth=16, max_rows=64)
TEXT = [3, 4, 5]


def context_of(temperature: float = 0.0, seed: int = 3, **sampling: float) -> Context:
    params = SamplingParams(temperature=temperature, **sampling)  # type: ignore[arg-type]
    return Context(1, list(TEXT), len(TEXT), "", temperature, NoiseKey(seed), params)


def law(seed: int) -> NDArray[np.float32]:
    """Logits that leave no token out of the race."""
    return np.random.default_rng(seed).uniform(-3.0, 3.0, VOCAB_SIZE).astype(np.float32)


def guesses_of(logits: NDArray[np.float32]) -> Guesses:
    log_q = logits - np.log(np.exp(logits.astype(np.float64)).sum()).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(logits))
    return Guesses(order, log_q[order])


def guesses(**probabilities: float) -> Guesses:
    """Guesses by token, named t7 and so on."""
    ids = [int(name[1:]) for name in probabilities]
    return Guesses(np.array(ids, np.int64), np.log(np.array(list(probabilities.values()), np.float32)))


def tree_of(found: Sequence[Guesses], budget: Budget = WIDE, num_children: int = 3, **more: object) -> Draft:
    context = context_of(**more)  # type: ignore[arg-type]
    return grow(by_depth(found), context, budget, shape=Shape(num_children), source="test")


def paths_of(draft: Draft) -> list[Path]:
    return [tuple(draft.tokens[node] for node in draft.path(index)) for index in range(len(draft))]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_a_draft_of_the_target_s_law_guesses_the_target_s_word(temperature: float, filters: dict[str, float]) -> None:
    """With q equal to p the best child is what the target says, at every position, whatever the dice."""
    shape = Shape(2)
    for position in range(100):
        context = context_of(temperature, seed=position % 3, **filters)
        logits = law(position)
        sampler = Sampler(context.sampling, context.noise, prompt_ids=(), end_ids=(), vocab_size=VOCAB_SIZE)
        word = sampler.sample(logits.copy(), position=position, num_generated=0)
        assert children(guesses_of(logits), context, position=position, shape=shape)[0].token == word


def test_without_the_shared_noise_the_same_guesses_are_often_wrong() -> None:
    """And they are the same whatever the dice."""
    hits = {True: 0, False: 0}
    for position in range(200):
        context, logits = context_of(1.0), law(position)
        sampler = Sampler(context.sampling, context.noise, prompt_ids=(), end_ids=(), vocab_size=VOCAB_SIZE)
        word = sampler.sample(logits.copy(), position=position, num_generated=0)
        for is_coupled in hits:
            shape = Shape(3, is_coupled=is_coupled)
            found = children(guesses_of(logits), context, position=position, shape=shape)
            hits[is_coupled] += word in [child.token for child in found]
        likeliest = np.argsort(-logits)[:3].tolist()
        assert [child.token for child in found] == likeliest
    assert hits[True] == 200
    assert hits[False] < 100


def test_at_temperature_zero_the_likeliest_with_their_probabilities() -> None:
    found = guesses(t9=0.2, t4=0.5, t7=0.2, t1=0.05)
    for seed in range(3):
        best = children(found, context_of(seed=seed), position=3, shape=Shape(3))
        assert [child.token for child in best] == [4, 7, 9], "of equals the lowest id, as the target chooses"
        assert [child.confidence for child in best] == pytest.approx([0.5, 0.2, 0.2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_coupled", [True, False])
def test_confidences_of_siblings_are_no_more_than_certainty(temperature: float, is_coupled: bool) -> None:
    for seed in range(20):
        shape = Shape(4, is_coupled=is_coupled)
        found = children(guesses_of(law(seed)), context_of(temperature, seed), position=3, shape=shape)
        sure = [child.confidence for child in found]
        assert sure == sorted(sure, reverse=True)
        assert 0.0 < sum(sure) <= 1.0 + 1e-6


def test_each_token_once_and_nothing_senseless() -> None:
    ids = np.array([5, 5, 6, 7, 8], np.int64)
    log_q = np.array([-1.0, -0.5, -2.0, -np.inf, np.nan], np.float32)
    for temperature in (0.0, 1.0):
        found = children(Guesses(ids, log_q), context_of(temperature), position=3, shape=Shape(5))
        assert sorted(child.token for child in found) == [5, 6]
    assert children(None, context_of(), position=3, shape=Shape(5)) == []
    assert children(Guesses(ids[3:], log_q[3:]), context_of(1.0), position=3, shape=Shape(5)) == []


def all_survivals(found: Sequence[Guesses], num_children: int, temperature: float) -> dict[Path, float]:
    """Every path that could be drafted, and how likely it is to survive."""
    survivals: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for depth, one in enumerate(found):
        best = children(one, context_of(temperature), position=len(TEXT) + depth, shape=Shape(num_children))
        following = [((*path, child.token), survivals[path] * child.confidence) for path in level for child in best]
        survivals |= dict(following)
        level = [path for path, _ in following]
    del survivals[()]
    return survivals


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_rows", [1, 5, 17, 39])
def test_the_nodes_that_most_likely_survive_are_kept_best_first(temperature: float, max_rows: int) -> None:
    found = [guesses_of(2.0 * law(seed)) for seed in range(3)]
    survivals = all_survivals(found, 3, temperature)
    best = sorted(survivals, key=lambda path: -survivals[path])[:max_rows]
    budget = Budget(16, max_rows)
    draft = tree_of(found, budget, temperature=temperature)
    assert is_tree(draft)
    assert is_well_typed(draft)
    assert draft.sources == ("test",) * max_rows
    assert paths_of(draft) == best
    by_levels = grow_by_levels(
        lambda paths: [by_depth(found)(path) for path in paths],
        context_of(temperature), budget, shape=Shape(3), width=27, source="test",
    )  # fmt: skip
    assert set(paths_of(by_levels)) == set(best)
    assert is_tree(by_levels)


def test_confidence_is_given_the_parent() -> None:
    draft = tree_of([guesses(t1=0.6, t2=0.3), guesses(t3=0.5, t4=0.4)], num_children=2)
    survival = {(1,): 0.6, (2,): 0.3, (1, 3): 0.3, (1, 4): 0.24, (2, 3): 0.15, (2, 4): 0.12}
    for node, path in enumerate(paths_of(draft)):
        assert math.prod(draft.confidence[at] for at in draft.path(node)) == pytest.approx(survival.pop(path))
    assert not survival


def test_one_child_each_is_a_chain() -> None:
    found = [guesses_of(law(seed)) for seed in range(4)]
    for temperature in (0.0, 1.0):
        draft = tree_of(found, num_children=1, temperature=temperature)
        assert draft.parents == (-1, 0, 1, 2)


@pytest.mark.parametrize(
    ("budget", "num_nodes"),
    [(Budget(0, 9), 0), (Budget(9, 0), 0), (Budget(2, 9), 6), (Budget(9, 2), 2), (Budget(1, 1), 1), (Budget(9, 9), 9)],
)
def test_within_the_budget(budget: Budget, num_nodes: int) -> None:
    found = [guesses_of(law(seed)) for seed in range(4)]
    by_levels = grow_by_levels(
        lambda paths: [by_depth(found)(path) for path in paths],
        context_of(), budget, shape=Shape(2), width=4, source="test",
    )  # fmt: skip
    for draft in (tree_of(found, budget, num_children=2), by_levels):
        assert len(draft) == num_nodes
        assert draft.depth <= budget.max_depth


def test_only_nodes_that_may_have_children_are_expanded() -> None:
    asked: list[Path] = []

    def expand(path: Path) -> Guesses | None:
        asked.append(path)
        return guesses(t1=0.9, t2=0.05)

    draft = grow(expand, context_of(), Budget(3, 4), shape=Shape(2), source="test")
    assert paths_of(draft) == [(1,), (1, 1), (1, 1, 1), (2,)]
    assert asked == [(), (1,), (1, 1)], "none at the last depth, and none when the rows are spent"
    assert grow(lambda path: None, context_of(), WIDE, shape=Shape(2), source="test") == EMPTY


def test_levels_are_expanded_together_and_no_wider_than_asked() -> None:
    asked: list[list[Path]] = []

    def expand(paths: list[Path]) -> list[Guesses | None]:
        asked.append(paths)
        return [guesses(t1=0.6, t2=0.3) if path[-1:] != (2,) else None for path in paths]

    draft = grow_by_levels(expand, context_of(), Budget(3, 5), shape=Shape(2), width=2, source="test")
    assert asked == [[()], [(1,), (2,)], [(1, 1), (1, 2)]]
    assert set(paths_of(draft)) == {(1,), (2,), (1, 1), (1, 1, 1), (1, 2)}

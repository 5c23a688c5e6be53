"""Shapes that are fixed beforehand: whoever is named follows somebody who is, and the likeliest come first."""

from __future__ import annotations

import pytest

from understudy.core.draft import Draft, is_tree
from understudy.core.static_tree import Guess, StaticTree, static_tree

STEPS = [1, 2, 3, 5, 7, 16]


def draft_of(tree: StaticTree, guesses: tuple[Guess, ...]) -> Draft:
    count = len(guesses)
    return Draft(tuple(range(count)), tree.parents(guesses), (0.5,) * count, ("block",) * count)


def survival(tree: StaticTree, guess: Guess) -> float:
    above = tree.expanded[guess.behind]
    return (0.175 if guess.is_rival else 0.65) * (1.0 if above is None else survival(tree, above))


def in_line(tree: StaticTree, guess: Guess) -> bool:
    above = tree.expanded[guess.behind]
    return not guess.is_rival and (above is None or in_line(tree, above))


@pytest.mark.parametrize("num_steps", STEPS)
def test_levels_follow_each_other(num_steps: int) -> None:
    tree = static_tree(num_steps, num_children=2)
    assert len(tree.levels) == num_steps, "the words in line reach all the way down"
    assert [node for level in tree.levels for node in level] == list(range(len(tree.expanded)))
    for depth, level in enumerate(tree.levels):
        for node in level:
            above = tree.expanded[node]
            assert tree.depths[node] == depth
            assert (above is None) == (depth == 0)
            assert above is None or tree.depths[above.behind] == depth - 1
    assert len(set(tree.expanded)) == len(tree.expanded)
    assert len(tree.expanded) == min(2**num_steps - 1, max(16, 2 * num_steps))
    assert tree.width == max(map(len, tree.levels))


@pytest.mark.parametrize("num_steps", STEPS)
def test_a_budget_is_kept_and_parents_come_first(num_steps: int) -> None:
    tree = static_tree(num_steps, num_children=2)
    assert len(tree.guesses) == len(set(tree.guesses)) == 2 * len(tree.expanded)
    for max_depth in range(num_steps + 2):
        for max_rows in (0, 1, 2, 5, 24, 100):
            found = tree.within(max_depth, max_rows)
            draft = draft_of(tree, found)
            fitting = [guess for guess in tree.guesses if tree.depths[guess.behind] < max_depth]
            assert is_tree(draft)
            assert draft.depth <= max_depth
            assert len(found) == min(max_rows, len(fitting))
            chances = [survival(tree, guess) for guess in fitting]
            assert chances == pytest.approx(sorted(chances, reverse=True))
            assert set(found) == set(fitting[:max_rows]), "the likeliest are taken"
            num_in_line = sum(in_line(tree, guess) for guess in found)
            assert draft.parents[:num_in_line] == tuple(range(-1, num_in_line - 1)), "the line is in front"


def test_the_likeliest_nodes_are_expanded() -> None:
    """Seven steps: the line, the first rival and its word, then rivals one step later, and so on."""
    tree = static_tree(7, num_children=2)
    assert [len(level) for level in tree.levels] == [1, 2, 3, 4, 4, 1, 1]
    beside = [guess for guess in tree.expanded if guess is not None and guess.is_rival]
    assert beside[0] == Guess(0, True)
    left_out = [guess for guess in tree.guesses if guess not in tree.expanded and tree.depths[guess.behind] < 6]
    least = min(survival(tree, guess) for guess in tree.expanded if guess is not None and not in_line(tree, guess))
    assert max(survival(tree, guess) for guess in left_out) <= least + 1e-12


def test_a_chain_has_no_rivals() -> None:
    tree = static_tree(5, num_children=1)
    assert tree.guesses == tuple(Guess(step, False) for step in range(5))
    assert tree.expanded == (None, *tree.guesses[:-1])
    assert tree.parents(tree.within(3, 9)) == (-1, 0, 1)


def test_one_node_a_level_is_a_chain_with_rivals() -> None:
    tree = static_tree(5, num_children=2, is_wide=False)
    assert tree.width == 1
    assert set(tree.guesses) == {Guess(step, is_rival) for step in range(5) for is_rival in (False, True)}

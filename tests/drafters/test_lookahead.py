"""The window is the tree that the picture shows, and its n-grams become proposals."""

from __future__ import annotations

import pytest

from understudy.core.draft import EMPTY, ROOT, is_tree
from understudy.drafters.base import Budget, Context
from understudy.drafters.lookahead import LookaheadDrafter
from understudy.errors import ConfigError
from understudy.sampling.noise import NoiseKey

BUDGET = Budget(16, 32)


def text(*tokens: int, sequence_id: int = 1) -> Context:
    return Context(sequence_id, list(tokens), len(tokens), "", 0.0, NoiseKey(0))


def test_window_is_a_chain_with_columns_hanging_from_it() -> None:
    drafter = LookaheadDrafter(num_columns=3, num_levels=3)
    context = text(5, 6, 7, 8)
    drafter.start(context)
    scouts = drafter.scout(context)
    assert is_tree(scouts)
    assert scouts.parents == (ROOT, 0, 1, 0, 1, 2, 3, 4, 5)
    assert scouts.depths() == (1, 2, 3, 2, 3, 4, 3, 4, 5)
    assert scouts.leaves() == [6, 7, 8]
    assert len(scouts) == drafter.num_scouts


def test_words_of_a_column_become_an_ngram() -> None:
    drafter = LookaheadDrafter(num_columns=2, num_levels=2)
    context = text(1, 2, 3)
    drafter.start(context)
    first, second = drafter._window(context).levels
    drafter.learn(context, [20, 21])
    assert drafter._window(context).levels == [second, [20, 21]]
    draft = drafter.propose([text(first[0])], [BUDGET])[0]
    assert (draft.tokens, draft.parents) == ((second[0], 20), (ROOT, 0))
    assert set(draft.sources) == {"lookahead"}


def test_ngrams_with_one_beginning_are_one_tree_the_latest_first() -> None:
    drafter = LookaheadDrafter(num_columns=1, num_levels=2)
    context = text(9)
    window = drafter._window(context)
    for gram in ((9, 1, 2), (9, 1, 3), (9, 4, 5)):
        window.remember(gram)
    draft = drafter.propose([context], [BUDGET])[0]
    assert draft.tokens == (4, 5, 1, 3, 2)
    assert draft.parents == (ROOT, 0, ROOT, 2, 2)


def test_old_ngrams_are_forgotten() -> None:
    drafter = LookaheadDrafter(num_columns=1, num_levels=1)
    window = drafter._window(text(9))
    for word in range(100):
        window.remember((9, word))
    assert [gram for (gram,) in window.pool[9]] == list(range(93, 100))
    for first in range(5000):
        window.remember((first, 1))
    assert len(window.pool) == 4096


def test_sequences_have_windows_of_their_own_and_are_forgotten() -> None:
    drafter = LookaheadDrafter()
    one, other = text(1, 2, sequence_id=1), text(1, 2, sequence_id=2)
    for context in (one, other):
        drafter.start(context)
    drafter.learn(one, [3] * 5)
    assert drafter._window(one).levels != drafter._window(other).levels
    drafter.stop(one, finished=True)
    drafter.stop(one, finished=True)
    assert set(drafter._windows) == {2}
    assert drafter.propose([one], [BUDGET]) == [EMPTY]


@pytest.mark.parametrize("size", [{"num_columns": 0}, {"num_levels": 0}])
def test_window_without_rows_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="no window"):
        LookaheadDrafter(**size)

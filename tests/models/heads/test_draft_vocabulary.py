"""The ids that can be drafted: the most frequent, those that must be in, and the way there and back."""

from __future__ import annotations

import pytest
import torch

from understudy.errors import ModelError
from understudy.models.heads.draft_vocabulary import DraftVocabulary, choose_vocabulary, coverage

ANSWERS = [[5, 5, 5, 9], [9, 5, 2], [7, 7, 9]]


def test_most_frequent_and_always() -> None:
    vocabulary = choose_vocabulary(ANSWERS, size=4, vocab_size=12, always=[11])
    assert vocabulary.ids.tolist() == [5, 7, 9, 11]
    assert len(vocabulary) == 4
    assert coverage(vocabulary, ANSWERS) == pytest.approx(9 / 10)


def test_ties_and_what_is_left_over_go_to_lower_ids() -> None:
    assert choose_vocabulary(ANSWERS, size=6, vocab_size=12).ids.tolist() == [0, 1, 2, 5, 7, 9]
    assert choose_vocabulary([], size=3, vocab_size=12, always=[8]).ids.tolist() == [0, 1, 8]


def test_never_more_than_there_are_nor_fewer_than_must_be() -> None:
    assert len(choose_vocabulary(ANSWERS, size=99, vocab_size=12)) == 12
    assert choose_vocabulary(ANSWERS, size=1, vocab_size=12, always=[3, 4]).ids.tolist() == [3, 4]


def test_there_and_back() -> None:
    vocabulary = choose_vocabulary(ANSWERS, size=3, vocab_size=12)
    assert vocabulary.places[vocabulary.ids].tolist() == [0, 1, 2]
    others = [token for token in range(12) if token not in (5, 7, 9)]
    assert set(vocabulary.places[others].tolist()) == {-1}


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 2], [1, 12]])
def test_refuses_what_is_no_vocabulary(ids: list[int]) -> None:
    with pytest.raises(ModelError):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 12)

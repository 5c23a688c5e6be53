"""The ids that a draft can guess: some thousand that answers are made of, instead of the target's whole vocabulary.

The output layer over a whole vocabulary is a large part of a small draft's pass. A word outside the chosen ids is never
drafted, so it costs a cycle, and nothing else: the words are the target's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from understudy.errors import ModelError


class DraftVocabulary:
    """Places 0 to D - 1 of a draft's output, and the target's ids that they stand for."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        """Take ids [D], rising, of a target's vocabulary."""
        if ids.dim() != 1 or len(ids) == 0:
            raise ModelError("A draft vocabulary has no ids.", "Train the draft again.")
        ids = ids.to(torch.int64)
        if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] <= ids[:-1]).any()):
            raise ModelError(
                "The ids of a draft vocabulary are not rising ids of its target.", "Train the draft again."
            )
        self.ids = ids
        """[D] place -> id of the target"""
        self.vocab_size = vocab_size
        self.places = torch.full((vocab_size,), -1, dtype=torch.int64)
        """[vocabulary] id of the target -> place, or -1"""
        self.places[ids] = torch.arange(len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The same, with its tables on a device."""
        moved = DraftVocabulary.__new__(DraftVocabulary)
        moved.vocab_size, moved.ids, moved.places = self.vocab_size, self.ids.to(device), self.places.to(device)
        return moved


def choose_vocabulary(
    answers: Iterable[Iterable[int]], *, size: int, vocab_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """Choose the most frequent ids of answers, and some that are always in (the ends of a text, markers of turns).

    Ties and what is left over go to lower ids, which byte-pair vocabularies give to what is more frequent.
    """
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    kept = sorted(set(always))
    by_frequency = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    size = min(size, vocab_size)
    chosen = list(dict.fromkeys([*kept, *by_frequency]))[: max(size, len(kept))]
    return DraftVocabulary(torch.tensor(sorted(chosen)), vocab_size)


def coverage(vocabulary: DraftVocabulary, answers: Iterable[Iterable[int]]) -> float:
    """The share of all tokens of answers that can be drafted."""
    drafted = set(vocabulary.ids.tolist())
    num_tokens = num_covered = 0
    for answer in answers:
        for token in answer:
            num_tokens += 1
            num_covered += token in drafted
    return num_covered / max(num_tokens, 1)

"""What drafts guess from every anchor of a batch, place by place.

    anchor i   a position whose features are known, with its next token x[i+1]; guess k from it is about x[i+2+k]

In training every guess is made after the text's own words. In serving it is made after the draft's own (`after`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from understudy.models.heads.block import BlockHead
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.files import DraftHead
from understudy.models.heads.medusa import MedusaHead
from understudy.train.data import Batch
from understudy.train.lessons import Lesson
from understudy.train.losses import Distance, draft_loss, survival_loss
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Reading, Teacher


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """One place ahead, from all anchors."""

    hidden: Tensor
    """[B, A, hidden] what the output layer is given"""
    output: Tensor
    """[D, hidden] the target's output layer, cut to the draft's ids"""
    before: Tensor | None = None
    """[B, A] places of the tokens before among the draft's ids (-1: none of them), if a block adds a bias for them"""
    head: BlockHead | None = None

    @property
    def logits(self) -> Tensor:
        """Over the draft's ids, [B, A, D]."""
        # in fp32: differences of a tenth between logits, which bf16 rounds off, are what laws are made of
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = linear(self.hidden.float(), self.output)
            return logits if self.head is None or self.before is None else logits + self.head.bias(self.before)

    @property
    def confidence(self) -> Tensor | None:
        """Log odds that the guess is right if those before were, [B, A]."""
        return None if self.head is None or self.before is None else self.head.confidence(self.hidden, self.before)


Before = Callable[[int, Guess | None], Tensor]
"""Given k and guess k - 1 (None for k = 0), the tokens [B, A] that come before guess k."""


class Guesser:
    """A head with what it borrows from its target: embedding, output layer and features."""

    def __init__(self, head: DraftHead, vocabulary: DraftVocabulary, teacher: Teacher) -> None:
        self.head = head
        self.vocabulary = vocabulary.to(teacher.device)
        self.teacher = teacher
        self._output = teacher.output[self.vocabulary.ids].float()  # [D, hidden]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the target whose features it reads."""
        return self.head.spec.feature_layers

    def describe(self) -> dict[str, Any]:
        """What it is, in plain values."""
        return self.head.spec.describe()

    def loss(self, lesson: Lesson, settings: TrainSettings, *, seed: int) -> Tensor:
        """The mean loss of guesses from anchors that the seed draws."""
        return batch_loss(self, lesson, draw_anchors(lesson.batch, settings.num_anchors, seed=seed), settings)

    def after_text(self, reading: Reading, anchors: Tensor) -> Iterator[Guess]:
        """Guesses after the text's own words; anchors [B, A]. Beyond the text's end they mean nothing."""
        return self.after(reading, anchors, lambda k, _: words_at(reading, anchors + 1 + k))

    def after(self, reading: Reading, anchors: Tensor, before: Before) -> Iterator[Guess]:
        """Guesses after any words."""
        head = self.head
        if isinstance(head, MedusaHead):
            return self._medusa(head, reading, anchors)
        if isinstance(head, EagleHead):
            return self._eagle(head, reading, anchors, before)
        return self._block(head, reading, anchors, before)

    def _medusa(self, head: MedusaHead, reading: Reading, anchors: Tensor) -> Iterator[Guess]:
        states = _rows(reading.last_hidden, anchors)
        for k in range(head.spec.num_tokens):
            yield Guess(head.hidden(k, states), self._output)

    def _eagle(self, head: EagleHead, reading: Reading, anchors: Tensor, before: Before) -> Iterator[Guess]:
        guess: Guess | None = None

        def embed(step: int) -> Tensor:
            return self.teacher.embedding[before(step, guess)]

        following = self._embeddings_after(reading)
        steps = head.unroll(reading.features, following, anchors, embed=embed, num_steps=head.spec.num_tokens)
        for states in steps:
            guess = Guess(head.output_norm(states), self._output)
            yield guess

    def _embeddings_after(self, reading: Reading) -> Tensor:
        """The embeddings of x[i+1] for every position i; the last has none, and no anchor stands there."""
        return self.teacher.embedding[reading.token_ids.roll(-1, dims=1)]

    def _block(self, head: BlockHead, reading: Reading, anchors: Tensor, before: Before) -> Iterator[Guess]:
        tokens = before(0, None)
        rows = head(head.context(reading.features), anchors, self.teacher.embedding[tokens])  # [B, A, N, hidden]
        guess: Guess | None = None
        for k in range(head.spec.num_tokens):
            guess = Guess(rows[:, :, k], self._output, self.vocabulary.places[before(k, guess)], head)
            yield guess


def _rows(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows [B, A, hidden] of x [B, T, hidden] at anchors [B, A]."""
    return x.gather(1, anchors[..., None].expand(-1, -1, x.shape[-1]))


def words_at(reading: Reading, places: Tensor) -> Tensor:
    """The words [B, A] of the texts at places [B, A]; beyond the end the last."""
    return reading.token_ids.gather(1, places.clamp(max=reading.token_ids.shape[1] - 1))


def batch_loss(guesser: Guesser, lesson: Lesson, anchors: Tensor, settings: TrainSettings) -> Tensor:
    """The mean loss of a batch's guesses from anchors [B, A]; places further ahead weigh less.

    Which guesses count is worked out on the host, where anchors and batch are: nothing here waits for a GPU.
    """
    head, device = guesser.head, guesser.teacher.device
    ahead = torch.arange(head.spec.num_tokens)
    places = anchors[..., None] + 1 + ahead  # [B, A, N] of the tokens before the guesses
    wanted = torch.stack([lesson.batch.is_guessed(anchors, int(k)) for k in ahead], dim=-1)
    shares = (settings.place_decay**ahead).expand(wanted.shape)[wanted]  # [M]
    weights = (shares / shares.sum().clamp(min=1e-6)).to(device, non_blocking=True)
    at = wanted.flatten().nonzero()[:, 0].to(device, non_blocking=True)
    guesses = list(guesser.after_text(lesson.reading, anchors.to(device, non_blocking=True)))
    hidden = torch.stack([guess.hidden for guess in guesses], dim=2).flatten(0, 2)[at]
    laws = lesson.laws.at(lesson.lines_at(places)[wanted].to(device, non_blocking=True))
    distance = Distance(temperatures=settings.temperatures, cross_entropy_share=settings.cross_entropy_share)
    if not isinstance(head, BlockHead):
        return draft_loss(hidden, guesses[0].output, laws, distance, weights=weights)[0]
    before = torch.stack([guess.before for guess in guesses if guess.before is not None], dim=2).flatten()[at]
    loss, accepted = draft_loss(
        hidden,
        guesses[0].output,
        laws,
        distance,
        weights=weights,
        lines=head.line(before),
        bias_out=head.markov_out.weight,
    )
    return loss + (weights * survival_loss(head.confidence(hidden, before), accepted)).sum()


def draw_anchors(batch: Batch, num_anchors: int, *, seed: int) -> Tensor:
    """Draw different anchors [B, A] from each text's answer; where it has fewer, the rest are its last token.

    Nothing is guessed from a last token, so it counts for nothing.
    """
    first = batch.answer_starts - 1
    last = batch.lengths - 3  # guess 0 from it is about the last word
    num_most = batch.num_most_anchors
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.rand(len(first), max(num_most, 1), generator=generator).argsort(dim=1).to(first.device)
    drawn = first[:, None] + shuffled
    is_anchor = drawn <= last[:, None]
    anchors = torch.where(is_anchor, drawn, (batch.lengths - 1)[:, None])
    anchors_first = (~is_anchor).to(torch.int8).argsort(dim=1, stable=True)
    return anchors.gather(1, anchors_first)[:, :num_anchors]

"""What the target has to say about a batch: its features at every position, and its laws of every word of the answers.

All of it is a function of the batch alone, and batches come again in every epoch. So where a GPU has room for it, it is
worked out once and kept there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.train.data import Batch, Batches
from understudy.train.losses import Laws, target_laws
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Reading, Teacher

_MOST_ROWS = 8192
"""Rows whose logits over the whole vocabulary are held at once."""
_ROOM_FOR_WORK = 0.35
"""The share of a GPU's memory that training itself is left with."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A batch, read by the target."""

    batch: Batch
    reading: Reading
    laws: Laws
    """Of all words of the answers; the law at a place is of the word after it."""
    lines: Tensor
    """[B, T] which of them is a place's"""

    def laws_at(self, places: Tensor) -> Laws:
        """The laws at places [B, A], one after another; beyond the end they mean nothing."""
        return self.laws.at(self.lines.gather(1, places.clamp(max=self.lines.shape[1] - 1)).flatten())


class Learner(Protocol):
    """A draft that is being trained, beside its target: all that training knows of it."""

    @property
    def head(self) -> nn.Module:
        """What is trained."""

    @property
    def teacher(self) -> Teacher:
        """The target."""

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The ids that it can guess."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the target whose features it reads."""

    def describe(self) -> dict[str, Any]:
        """What it is, in plain values: a state of training belongs to this."""

    def loss(self, lesson: Lesson, settings: TrainSettings, *, seed: int) -> Tensor:
        """The mean loss of a lesson; whatever is drawn is drawn from the seed."""


def read_lesson(learner: Learner, batch: Batch, temperatures: Sequence[float]) -> Lesson:
    """Let the target read a batch."""
    batch = batch.to(learner.teacher.device)
    reading = learner.teacher.read(batch.token_ids, learner.feature_layers)
    places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    is_asked = (places >= batch.answer_starts[:, None] - 1) & (places < batch.lengths[:, None] - 1)  # [B, T]
    parts = [
        target_laws(learner.teacher.logits(rows), learner.vocabulary.ids, temperatures)
        for rows in torch.split(reading.last_hidden[is_asked], _MOST_ROWS)
    ]
    laws = Laws(torch.cat([part.places for part in parts]), torch.cat([part.p for part in parts], dim=1))
    lines = (is_asked.flatten().cumsum(0) - 1).reshape(is_asked.shape).clamp(min=0)
    return Lesson(batch, reading, laws, lines)


class Lessons:
    """The lesson of each step."""

    def __init__(self, learner: Learner, batches: Batches, temperatures: Sequence[float]) -> None:
        self._learner = learner
        self._batches = batches
        self._temperatures = temperatures
        self._kept: dict[int, Lesson] = {}  # by the number of the batch

    def at(self, step: int) -> Lesson:
        """What a step learns from."""
        number = self._batches.number_at(step)
        lesson = self._kept.get(number)
        if lesson is None:
            lesson = read_lesson(self._learner, self._batches.batch(number), self._temperatures)
            if self._has_room():
                self._kept[number] = lesson
        return lesson

    def _has_room(self) -> bool:
        device = self._learner.teacher.device
        if device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, and free
        return free + held > _ROOM_FOR_WORK * total

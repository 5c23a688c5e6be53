"""What the target has to say about a batch: its features at every position, and its laws of every word of the answers.

All of it is a function of the batch alone, and batches come again in every epoch. So on a GPU what laws are worked out
from is kept there, a kilobyte for each word, and so are features where there is room for them: several for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_ROOM_FOR_WORK = 0.2
"""The share of a GPU's memory that training itself is left with."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A batch, read by the target."""

    batch: Batch
    reading: Reading
    """What the target made of it; features are read again where there was no room to keep them"""
    laws: Laws
    """Of all words of the answers; the law at a place is of the word after it."""
    lines: Tensor
    """[B, T] which of them is a place's; it and the batch stay on the host, which chooses what is learned"""

    def lines_at(self, places: Tensor) -> Tensor:
        """Which law is that at places [B, ...]; beyond the end it means nothing."""
        known = places.clamp(max=self.lines.shape[1] - 1)
        return self.lines.gather(1, known.flatten(1)).reshape(places.shape)


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
    device = learner.teacher.device
    reading = learner.teacher.read(batch.token_ids.to(device, non_blocking=True), learner.feature_layers)
    places = torch.arange(batch.token_ids.shape[1])
    is_asked = (places >= batch.answer_starts[:, None] - 1) & (places < batch.lengths[:, None] - 1)  # [B, T]
    asked = is_asked.flatten().nonzero()[:, 0].to(device, non_blocking=True)
    states = reading.last_hidden.flatten(0, 1)[asked]
    parts = [
        target_laws(rows, learner.teacher.logits(rows), learner.vocabulary, temperatures)
        for rows in torch.split(states, _MOST_ROWS)
    ]
    totals, best = torch.cat([part.log_totals for part in parts], dim=1), torch.cat([part.best for part in parts])
    lines = (is_asked.flatten().cumsum(0) - 1).reshape(is_asked.shape).clamp(min=0)
    return Lesson(batch, _useful(reading), Laws(states, totals, best), lines)


def read_batch(learner: Learner, batch: Batch) -> Reading:
    """Let the target read a batch for its features alone."""
    return _useful(
        learner.teacher.read(batch.token_ids.to(learner.teacher.device, non_blocking=True), learner.feature_layers)
    )


def _useful(reading: Reading) -> Reading:
    """Without the last state where there are features: nobody reads both, and others get its room."""
    return replace(reading, last_hidden=reading.last_hidden[:, :0].clone()) if reading.features.shape[2] else reading


class Lessons:
    """The lesson of each step."""

    def __init__(self, learner: Learner, batches: Batches, temperatures: Sequence[float]) -> None:
        self._learner = learner
        self._batches = batches
        self._temperatures = temperatures
        self._kept: dict[int, Lesson] = {}  # by the number of the batch
        self._most_bytes = _gpu_bytes(learner.teacher.device)

    def at(self, step: int) -> Lesson:
        """What a step learns from."""
        number = self._batches.number_at(step)
        lesson = self._kept.get(number)
        if lesson is None:
            lesson = read_lesson(self._learner, self._batches.batch(number), self._temperatures)
            if self._has_room(_ROOM_FOR_WORK):
                self._kept[number] = lesson
            elif self._has_room(_ROOM_FOR_WORK / 2):
                self._kept[number] = replace(lesson, reading=lesson.reading.tokens_alone())
        elif not lesson.reading.is_whole:
            lesson = replace(lesson, reading=read_batch(self._learner, lesson.batch))
        return lesson

    def _has_room(self, share: float) -> bool:
        device = self._learner.teacher.device
        return device.type == "cuda" and torch.cuda.memory_allocated(device) < (1.0 - share) * self._most_bytes


def _gpu_bytes(device: torch.device) -> int:
    """What torch can have of a GPU's memory, most of it taken in one piece: lesson by lesson, the driver is slow."""
    if device.type != "cuda":
        return 0
    free, reserved = int(torch.cuda.mem_get_info(device)[0]), int(torch.cuda.memory_reserved(device))
    torch.empty(int((1.0 - _ROOM_FOR_WORK) * free), dtype=torch.uint8, device=device)  # torch keeps it, to hand it out
    return free + reserved

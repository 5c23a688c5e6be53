"""A device that draws words by itself, on the CPU: the real passes of a tiny model, and places for words unseen.

What a pass draws lies at its places until the same decoder draws again, and later passes may name it, as on a GPU.
Words are seen when somebody lands the pass. A draft can be made wrong at some positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from understudy.assembly import DraftModel, Target
from understudy.core.dice import Dice
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.interface import Cache, Compute, Drawn
from understudy.kernels.rows import MOST_PLACES, Rows
from understudy.sampling.noise import NoiseKey, gumbel
from understudy.text.vocabulary import compare_vocabularies

TARGET, DRAFT = 0, 1


@dataclass
class Launched:
    """A pass that is over; it says so if it was told to."""

    words: NDArray[np.int64]
    rivals: NDArray[np.int64]
    found: NDArray[np.float32]
    is_over: bool

    def drawn(self) -> Drawn:
        return Drawn(self.words.tolist(), [0.9] * len(self.words), self.rivals.tolist())

    def logits(self, first: int, last: int) -> NDArray[np.float32]:
        return self.found[first:last]


class Device:
    """Makes the passes of each decoder that asks for some, and remembers what was launched."""

    def __init__(self, *, is_wrong: Callable[[int], bool] = lambda position: False) -> None:
        self.is_wrong = is_wrong
        """Whether the draft's word at a position is another one."""
        self.is_over = True
        self.places = np.zeros(8 * MOST_PLACES, np.int64)
        self.launches: list[tuple[int, int]] = []
        """By launch the decoder's number, and rows."""
        self.number = TARGET
        """Whose passes are made next."""

    def passes(self, kernels: CpuKernels, compute: Compute, cache: Cache, *, vocab_size: int) -> Passes:
        """In place of `CpuKernels.passes`."""
        return Passes(self, compute, self.number)


class Passes:
    """Passes of one decoder."""

    draws = True
    num_firsts = 0

    def __init__(self, device: Device, compute: Compute, number: int) -> None:
        self._device = device
        self._compute = compute
        self.number = number
        self.first_place = 2 * number * MOST_PLACES
        self.first_rival = self.first_place + MOST_PLACES

    def prepare(self, shown: tuple[int, ...], hidden_size: int) -> Iterator[None]:
        return iter(())

    def launch(self, rows: Rows, dice: Sequence[Dice | None]) -> Launched:
        device = self._device
        device.launches.append((self.number, len(rows.token_ids)))
        unseen = rows.token_ids < 0
        token_ids = np.where(unseen, device.places[np.where(unseen, -1 - rows.token_ids, 0)], rows.token_ids)
        found = self._compute(rows._replace(token_ids=token_ids))
        positions = rows.positions[rows.logit_rows] + 1
        words, rivals = np.zeros(len(dice), np.int64), np.zeros(len(dice), np.int64)
        for place, (one, position) in enumerate(zip(dice, positions.tolist(), strict=True)):
            second, first = np.argsort(_totals(found[place], one, position), kind="stable")[-2:]
            is_wrong = self.number == DRAFT and device.is_wrong(position)
            words[place], rivals[place] = (first + 1 if is_wrong else first) % found.shape[1], second
        device.places[self.first_place : self.first_place + len(words)] = words
        device.places[self.first_rival : self.first_rival + len(words)] = rivals
        return Launched(words, rivals, found, device.is_over)


def _totals(logits: NDArray[np.float32], dice: Dice | None, position: int) -> NDArray[np.floating]:
    if dice is None or not dice.temperature:
        return logits
    noise = gumbel(NoiseKey(dice.seed, dice.choice), position, np.arange(len(logits)))
    return logits / dice.temperature + noise


def on_device(target: Target, monkeypatch: pytest.MonkeyPatch, device: Device) -> Target:
    """The target with itself as its draft, for engines that are built while the patch holds."""
    monkeypatch.setattr(CpuKernels, "passes", lambda *args, **named: device.passes(*args, **named))
    rows = target.decoder.config.vocab_size
    same = compare_vocabularies(
        target.tokenizer, target.tokenizer, target_rows=rows, draft_rows=rows, cross_tokenizer=False
    )
    return replace(target, draft=DraftModel(target.decoder, same, "itself", 0))

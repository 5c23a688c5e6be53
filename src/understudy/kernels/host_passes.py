"""Passes where the host computes: they are over when they were asked for, and whoever holds the logits draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from understudy.core.dice import Dice
from understudy.kernels.interface import Compute, Drawn, FeatureBuffer
from understudy.kernels.rows import Rows

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HostLaunched:
    """A pass that is over."""

    found: Floats
    is_over: bool = True

    def logits(self, first: int, last: int) -> Floats:
        """The logits of some places."""
        return self.found[first:last]

    def drawn(self) -> Drawn:
        """Nothing is drawn here."""
        raise AssertionError("words are drawn by who holds the logits")


class HostPasses:
    """Passes that are computed when they are asked for."""

    draws = False
    first_place = 0
    first_rival = 0
    num_firsts = 0
    features_stay = False

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def launch(self, rows: Rows, dice: Sequence[Dice | None]) -> HostLaunched:
        """Compute a pass."""
        return HostLaunched(self._compute(rows))

    def prepare(self, shown: tuple[int, ...], hidden_size: int) -> Iterator[None]:
        """No pass takes longer for being the first of its size."""
        return iter(())

    def new_features(self, shape: tuple[int, int, int]) -> Floats:
        """Room for hidden states, those of one layer in a row: so they come, and a first word waits for the copy."""
        num_rows, num_layers, hidden = shape
        return np.empty((num_layers, num_rows, hidden), np.float32).transpose(1, 0, 2)

    def launch_showing(self, rows: Rows, dice: Sequence[Dice | None], shown: FeatureBuffer) -> HostLaunched:
        """Compute a pass, and show hidden states of it."""
        return HostLaunched(self._compute(rows, shown))

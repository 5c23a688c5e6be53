"""How a draft is trained: one frozen record, kept beside the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from understudy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Everything besides the data and the target that the trained weights are a function of."""

    num_steps: int = 2000
    seed: int = 0
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    """Of the steps: the rate rises from 0, then falls along a cosine to a twentieth."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    max_length: int = 1024
    tokens_per_batch: int = 16384
    num_anchors: int = 128
    """Anchors that are drawn from each text in a step; all of them where there are no more."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    cross_entropy_share: float = 0.1
    place_decay: float = 0.8
    """The weight of each guess by that of the guess before it."""
    save_every_steps: int = 200

    def __post_init__(self) -> None:
        for name in ("num_steps", "max_length", "tokens_per_batch", "num_anchors", "save_every_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}.", "Give a whole number of at least 1.")
        bounds = (
            *(("learning_rate", 0.0, 1.0), ("warmup_share", 0.0, 1.0), ("weight_decay", 0.0, 1.0)),
            *(("clip_norm", 0.0, 1e6), ("cross_entropy_share", 0.0, 1.0), ("place_decay", 0.0, 1.0)),
        )
        for name, low, high in bounds:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} is {getattr(self, name)!r}.", f"Give a number from {low:g} to {high:g}.")
        if not self.temperatures or not all(0.0 <= temperature <= 10.0 for temperature in self.temperatures):
            raise ConfigError(f"temperatures is {self.temperatures!r}.", "Give numbers from 0 to 10.")

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {**asdict(self), "temperatures": list(self.temperatures)}

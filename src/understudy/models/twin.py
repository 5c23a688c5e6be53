"""A draft of a chosen quality: the model itself, with noise on its matrices.

It costs what the model costs and agrees with it as often as the noise lets it. Beside a target that was widened
(widen.py) it stands for a small model that was trained to speak like a large one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from understudy.errors import ConfigError
from understudy.models.lazy_tensors import LazyTensors
from understudy.models.load import load_model
from understudy.models.weights import LoadedModel, Progress

_PREFIX = "twin:"
_SEED = 1
_EMBEDDING = "model.embed_tokens.weight"


def twin_noise(draft: str | Path | None) -> float | None:
    """Read how much noise a draft such as `twin:0.1` asks for; None where it names something else than a twin."""
    name = str(draft)
    if draft is None or not name.startswith(_PREFIX):
        return None
    try:
        sigma = float(name.removeprefix(_PREFIX))
    except ValueError:
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(
            f"The draft {name!r} does not say how much noise it has.",
            f"Give a number from 0 on: {_PREFIX}0 is the model itself, {_PREFIX}0.1 often agrees with it.",
        )
    return sigma


def load_draft(draft: str | Path, target_place: str | Path | None, *, progress: Progress | None = None) -> LoadedModel:
    """Load a draft by its name: a twin of the model at `target_place`, or a model of its own."""
    sigma = twin_noise(draft)
    loaded = load_model(draft if sigma is None else target_place, progress=progress)
    if sigma is None:
        return loaded
    name = f"{loaded.name} with noise {sigma:g}" if sigma else f"{loaded.name} itself"
    source_hash = f"{loaded.source_hash}+noise-{sigma!r}"
    return replace(loaded, tensors=noisy_twin(loaded.tensors, sigma), name=name, source_hash=source_hash)


def noisy_twin(tensors: Mapping[str, Tensor], sigma: float, *, seed: int = _SEED) -> LazyTensors:
    """Give every matrix but the embedding normal noise of `sigma` times its own spread.

    A tensor's noise depends on its name and the seed alone. An output layer that is tied to the embedding gets none.
    """
    return LazyTensors({name: partial(_noisy, name, tensor, sigma, seed=seed) for name, tensor in tensors.items()})


def _noisy(name: str, tensor: Tensor, sigma: float, *, seed: int) -> Tensor:
    if sigma == 0 or tensor.dim() < 2 or name == _EMBEDDING:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return tensor + sigma * tensor.std() * noise

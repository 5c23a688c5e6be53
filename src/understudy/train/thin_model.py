"""A draft that is a model of its own: its target with most layers left out, trained to speak like the whole.

    kept       the first layers and the last, half of them each; the final norm. These are trained
    borrowed   embedding and output layer, frozen: what a word is stays the same for both

It reads true text, as it does when it serves, so every word of an answer is a lesson, and one pass teaches all of them.
It can guess every id of its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from understudy.errors import ConfigError
from understudy.models.config import ModelConfig
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.train.lessons import Lesson
from understudy.train.losses import Distance, draft_loss
from understudy.train.plain_decoder import PlainDecoder
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Teacher

DEFAULT_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinSpec:
    """What a thin model is made from."""

    target_name: str
    target_hash: str
    """The target's `source_hash`."""
    layers: tuple[int, ...]
    """Those that are kept, by their numbers in the target from 0 on."""
    config: ModelConfig
    """Its own."""

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {**asdict(self), "layers": list(self.layers), "config": self.config.to_hugging_face()}


def thin_spec(
    target: ModelConfig, *, target_name: str, target_hash: str, num_layers: int | None = None
) -> ThinSpec:  # fmt: skip
    """Choose the layers to keep: so many, or else what suits the target."""
    total = target.num_layers
    count = min(DEFAULT_LAYERS, max(total // 2, 1)) if num_layers is None else num_layers
    if not 1 <= count < total:
        raise ConfigError(
            f"A draft of {count} layers is not made from a target of {total} by leaving some out.",
            f"Give a number of layers from 1 to {total - 1}." if total > 1 else "Train a draft of kind medusa for it.",
        )
    num_last = count // 2
    layers = (*range(count - num_last), *range(total - num_last, total))
    windows = tuple(target.window(layer) for layer in layers)
    config = replace(target, num_layers=count, windows=windows if any(windows) else ())
    return ThinSpec(target_name=target_name, target_hash=target_hash, layers=layers, config=config)


class ThinModel(nn.Module):
    """The kept layers and the final norm; parameters have the names that a model's file gives them."""

    def __init__(self, spec: ThinSpec, tensors: Mapping[str, Tensor], *, device: torch.device) -> None:
        """Begin with the target's own tensors."""
        super().__init__()
        self.spec = spec
        weights: dict[str, nn.Parameter] = {}
        for name, tensor in _kept_tensors(spec.layers, tensors).items():
            weights[name] = nn.Parameter(tensor.detach().to(device=device, dtype=torch.float32, copy=True))
            _register(self, name, weights[name])
        self._decoder = PlainDecoder(spec.config, weights, device=device)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Embeddings of whole texts [B, T, hidden] -> what the output layer wants, [B, T, hidden]."""
        x = embeddings
        for layer in range(self.spec.config.num_layers):
            x = self._decoder.layer(layer, x)
        return self._decoder.last_norm(x)


def _kept_tensors(layers: tuple[int, ...], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of some layers by their new numbers, and the final norm."""
    kept = {"model.norm.weight": tensors["model.norm.weight"]}
    for number, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        own = (name for name in tensors if name.startswith(prefix))
        kept |= {f"model.layers.{number}.{name.removeprefix(prefix)}": tensors[name] for name in own}
    return kept


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make a parameter known under a name with dots, which torch takes for modules within modules."""
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


class ThinLearner:
    """A thin model that is being trained, beside its target."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, head: ThinModel, teacher: Teacher) -> None:
        self.head = head
        self.teacher = teacher
        vocab_size = teacher.config.vocab_size
        self.vocabulary = DraftVocabulary(torch.arange(vocab_size), vocab_size).to(teacher.device)

    def describe(self) -> dict[str, Any]:
        """What it is, in plain values."""
        return self.head.spec.describe()

    def loss(self, lesson: Lesson, settings: TrainSettings, *, seed: int) -> Tensor:
        """The mean loss over all words of the answers but the first, which no draft is asked for."""
        token_ids = lesson.reading.token_ids
        anchors = torch.arange(token_ids.shape[1] - 1)[None]
        wanted = lesson.batch.is_guessed(anchors, 0)  # [B, T - 1]: the word at an anchor + 2, after that at + 1
        at = wanted.flatten().nonzero()[:, 0].to(token_ids.device)
        hidden: Tensor = self.head(self.teacher.embedding[token_ids])
        laws = lesson.laws.at(lesson.lines[:, 1:][wanted].to(token_ids.device))
        distance = Distance(temperatures=settings.temperatures, cross_entropy_share=settings.cross_entropy_share)
        weights = torch.full((len(at),), 1.0 / max(len(at), 1), device=token_ids.device)
        return draft_loss(hidden[:, 1:].flatten(0, 1)[at], self.teacher.output, laws, distance, weights=weights)[0]

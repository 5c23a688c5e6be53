"""A thin model as a draft: made from a loaded target, and written as an ordinary model's folder.

    config.json, model.safetensors, tokenizer.json, tokenizer_config.json   what every model has
    draft-card.json   which target and layers it comes from, the hash of its weights, data, seed and measured numbers

The target's embedding and output layer are in the file, so that the folder is whole: whoever loads models loads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from understudy.config import MODEL
from understudy.errors import ModelError
from understudy.models.heads.files import replace_file
from understudy.models.weights import LoadedModel, expected_tensors
from understudy.train.teacher import Teacher
from understudy.train.thin_model import ThinLearner, ThinModel, thin_spec

CARD_FILE = "draft-card.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraft:
    """A thin model beside the target that it is made from."""

    learner: ThinLearner
    loaded: LoadedModel
    """The target."""

    def write(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the folder; the card comes last."""
        spec = self.learner.head.spec
        data = save(self._tensors(), metadata={"format": "pt"})
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(spec.config.to_hugging_face(), indent=1)
        self.loaded.tokenizer.save(folder)
        replace_file(folder / "model.safetensors", data)
        replace_file(folder / "config.json", config.encode())
        card = {
            "kind": MODEL,
            **spec.describe(),
            "weights": {"type": "fp16", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "provenance": dict(provenance),
        }
        replace_file(folder / CARD_FILE, (json.dumps(card, indent=2) + "\n").encode())

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors of the model, in fp16: those that were trained, and the target's for the rest."""
        trained = self.learner.head.state_dict()
        tensors: dict[str, Tensor] = {}
        for name, _ in expected_tensors(self.learner.head.spec.config):
            tensor = trained[name] if name in trained else self.loaded.tensors[name]
            tensors[name] = tensor.detach().to(device="cpu", dtype=torch.float16).contiguous()
            if not bool(tensors[name].isfinite().all()):
                raise ModelError(
                    f"{name} has numbers that fp16 cannot hold: this draft cannot be written.",
                    "Train it again with a lower learning rate, or train a draft of another kind.",
                )
        return tensors


def make_model_draft(loaded: LoadedModel, teacher: Teacher, *, num_layers: int | None = None) -> ModelDraft:
    """Leave layers of a target out; what is kept begins with the target's own weights."""
    spec = thin_spec(
        loaded.config, target_name=loaded.name, target_hash=loaded.source_hash, num_layers=num_layers
    )  # fmt: skip
    learner = ThinLearner(ThinModel(spec, loaded.tensors, device=teacher.device), teacher)
    return ModelDraft(learner=learner, loaded=loaded)


def read_card(folder: Path) -> dict[str, Any]:
    """What the card of a written draft says."""
    card: dict[str, Any] = json.loads((folder / CARD_FILE).read_bytes())
    return card

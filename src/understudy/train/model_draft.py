"""A thin model as a draft: made from a loaded target, measured where it serves, written as an ordinary model's folder.

    config.json, model.safetensors, tokenizer.json, tokenizer_config.json   what every model has
    draft-card.json   which target and layers it comes from, the hash of its weights, data, seed and measured numbers

The target's embedding and output layer are in the file, so that the folder is whole: whoever loads models loads it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from understudy.config import MODEL, EngineConfig
from understudy.core.request import Request, SamplingParams, Speculation, SpeculationCounts
from understudy.core.weights import DeviceChoice
from understudy.errors import ModelError
from understudy.llm import LLM
from understudy.models.heads.files import replace_file
from understudy.models.weights import LoadedModel, expected_tensors
from understudy.train.data import Sample
from understudy.train.teacher import Teacher
from understudy.train.thin_model import ThinLearner, ThinModel, thin_spec

CARD_FILE = "draft-card.json"
_DEPTH = 4
"""Words that are drafted in a cycle while it is measured."""
_MOST_ANSWERS = 64
_NUM_TOGETHER = 8
"""Texts that are written at once while it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraft:
    """A thin model beside the target that it is made from."""

    learner: ThinLearner
    loaded: LoadedModel
    """The target."""
    place: str | None
    """Where the target was loaded from."""
    device: DeviceChoice = "auto"
    num_threads: int | None = None

    def measure(self, held_out: Sequence[Sample]) -> dict[str, Any]:
        """Measure it as it would be written, through the engine that serves."""
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "draft"
            self.write(folder, {})
            config = EngineConfig(
                drafters=(MODEL,),
                draft=str(folder),
                device=self.device,
                num_threads=self.num_threads,
                max_sequences=_NUM_TOGETHER,
                prefix_cache=False,
            )
            chain = measure_chain(self.place, config, held_out)
        return {"coverage": 1.0, "greedy_chain": chain}

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


def make_model_draft(
    loaded: LoadedModel,
    teacher: Teacher,
    *,
    place: str | None,
    num_layers: int | None = None,
    device: DeviceChoice = "auto",
    num_threads: int | None = None,
) -> ModelDraft:
    """Leave layers of a target out; what is kept begins with the target's own weights."""
    spec = thin_spec(
        loaded.config, target_name=loaded.name, target_hash=loaded.source_hash, num_layers=num_layers
    )  # fmt: skip
    learner = ThinLearner(ThinModel(spec, loaded.tensors, device=teacher.device), teacher)
    return ModelDraft(learner=learner, loaded=loaded, place=place, device=device, num_threads=num_threads)


def measure_chain(place: str | None, config: EngineConfig, samples: Sequence[Sample]) -> dict[str, Any]:
    """Let a model and its draft answer prompts again that were answered at temperature 0, drafting at every step.

    Tokens per cycle and how often each place is right if those before it were, by class. An answer's first word comes
    from reading the prompt: that pass is no cycle.
    """
    asked = [sample for sample in samples if sample.temperature == 0.0 and len(sample.answer_ids) > 1][:_MOST_ANSWERS]
    requests = [
        Request(
            request_id=f"held out {number}",
            prompt_ids=sample.token_ids[: sample.answer_start],
            sampling=SamplingParams(temperature=0.0, max_tokens=len(sample.answer_ids)),
            speculation=Speculation(forced=True, max_depth=_DEPTH),
            tenant=f"held out {number}",
        )
        for number, sample in enumerate(asked)
    ]
    results = LLM(place, config=config).run(requests, concurrency=config.max_sequences) if requests else []
    num_words: dict[str, int] = {}
    counts: dict[str, SpeculationCounts] = {}
    for sample, result in zip(asked, results, strict=True):
        name, answer = sample.prompt_class, result.completions[0]
        num_words[name] = num_words.get(name, 0) + len(answer.token_ids) - 1
        counts.setdefault(name, SpeculationCounts()).add(answer.speculation)
        counts[name].cycles -= 1  # the pass of the prompt
    classes = {name: _described(num_words[name], counts[name]) for name in sorted(counts)}
    rates = [told["tokens_per_cycle"] for told in classes.values()]
    return {"classes": classes, "mean_tokens_per_cycle": sum(rates) / len(rates) if rates else None}


def _described(num_words: int, counts: SpeculationCounts) -> dict[str, Any]:
    reached, matched = counts.reached_by_position, counts.matched_by_position
    return {
        "cycles": counts.cycles,
        "tokens_per_cycle": num_words / max(counts.cycles, 1),
        "acceptance_by_position": [right / max(came, 1) for right, came in zip(matched, reached, strict=True)],
    }

"""Tiny trained drafts: specs and networks for tiny targets, and texts to train them on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.tiny_models import VOCAB_SIZE, TinyArchitecture, tiny_config, tiny_tensors
from understudy.kernels.cpu import CpuKernels
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import TrainedHead
from understudy.models.heads.spec import HeadKind, HeadSpec, default_spec
from understudy.train.data import Sample
from understudy.train.guesses import Guess, Guesser, words_at
from understudy.train.run import new_head
from understudy.train.teacher import Reading, Teacher

NUM_LAYERS = 4
NUM_DRAFT_IDS = 40


def tiny_teacher(
    architecture: TinyArchitecture = "llama", *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Teacher:
    """A tiny target of four layers with an output layer of its own."""
    config = tiny_config(architecture, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False, **overrides)
    return Teacher(ModelConfig.from_hugging_face(config, None), tiny_tensors(config, seed=3), dtype=dtype)


def tiny_spec(kind: HeadKind, target: ModelConfig, **overrides: Any) -> HeadSpec:
    """A small draft of a kind for a tiny target."""
    spec = default_spec(kind, target, target_name="tiny", target_hash="sha256:tiny", num_draft_ids=NUM_DRAFT_IDS)
    markov_rank = 8 if kind == "block" else 1
    return replace(spec, num_tokens=4, **{"markov_rank": markov_rank, **overrides})


def tiny_guesser(kind: HeadKind, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Guesser:
    """An untrained tiny draft beside a teacher that says little else than what it can guess: every seventh id."""
    teacher = tiny_teacher(dtype=dtype)
    vocabulary = DraftVocabulary(torch.arange(0, 7 * NUM_DRAFT_IDS, 7), VOCAB_SIZE)
    teacher.output[vocabulary.ids] *= 4.0
    return Guesser(new_head(tiny_spec(kind, teacher.config), seed=seed), vocabulary, teacher)


def tiny_samples(count: int, *, seed: int = 0, length: int = 24) -> list[Sample]:
    """Texts that repeat a short pattern of ids that can be guessed, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for place in range(count):
        first = int(torch.randint(0, 4, (1,), generator=generator))
        tokens = tuple(7 * ((first + step) % 4) for step in range(length + place % 5))
        samples.append(Sample(token_ids=tokens, answer_start=4, prompt_class=f"class {place % 2}", temperature=0.0))
    return samples


def stirred(guesser: Guesser, *, seed: int = 1) -> Guesser:
    """The same with noise on every parameter: what begins at zero would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in guesser.head.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.15
    return guesser


@torch.no_grad()
def greedy_chains(guesser: Guesser, reading: Reading, anchors: torch.Tensor) -> torch.Tensor:
    """The best words of a chain from each anchor, as the target's ids: [B, A, guesses]."""
    ids = guesser.vocabulary.ids

    def before(_: int, guess: Guess | None) -> torch.Tensor:
        return words_at(reading, anchors + 1) if guess is None else ids[guess.logits.argmax(dim=-1)]

    return torch.stack([ids[guess.logits.argmax(dim=-1)] for guess in guesser.after(reading, anchors, before)], dim=-1)


def tiny_decoder(guesser: Guesser) -> Decoder:
    """The serving decoder of a tiny draft's own teacher."""
    return Decoder(guesser.teacher.config, dict(guesser.teacher._weights), CpuKernels(num_threads=1))


def trained_head(guesser: Guesser) -> TrainedHead:
    """The draft as it would be loaded."""
    return TrainedHead(guesser.head.spec, guesser.head, guesser.vocabulary, {})

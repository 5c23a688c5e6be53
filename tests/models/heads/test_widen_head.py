"""A widened draft guesses from the widened target's features what the small one guesses from the small target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.test_widen import GROWN
from tests.tiny_heads import NUM_DRAFT_IDS, greedy_chains, tiny_spec
from tests.tiny_models import VOCAB_SIZE, tiny_config, tiny_tensors
from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import TrainedHead
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.models.heads.widen_head import widen_head
from understudy.models.widen import widen
from understudy.train.guesses import Guesser
from understudy.train.run import new_head
from understudy.train.teacher import Teacher

NUM_LAYERS = 4


def trained(kind: HeadKind, config: ModelConfig) -> TrainedHead:
    """A random draft whose every parameter has a say, and whose matrices bf16 can hold."""
    head = new_head(tiny_spec(kind, config), seed=7)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16())
    vocabulary = DraftVocabulary(torch.arange(0, 7 * NUM_DRAFT_IDS, 7), VOCAB_SIZE)
    return TrainedHead(head.spec, head, vocabulary, {})


def small_model() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    declared = tiny_config(num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False)
    tensors = {name: tensor.bfloat16().float() for name, tensor in tiny_tensors(declared, seed=3).items()}
    return ModelConfig.from_hugging_face(declared, None), tensors


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("grown", [name for name in GROWN if name != "as it was"])
def test_a_widened_draft_guesses_the_same(kind: HeadKind, grown: str) -> None:
    config, tensors = small_model()
    draft = trained(kind, config)
    wide_config, wide_tensors = widen(config, tensors, replace(GROWN[grown], num_layers=NUM_LAYERS + 1))
    wide_draft = widen_head(draft, wide_config)
    assert wide_draft.spec.target == wide_config
    text = torch.tensor([[(11 + 37 * place) % 300 for place in range(20)]])
    anchors = torch.tensor([[0, 5, 12]])
    scores = []
    for one, weights, told in ((draft, tensors, config), (wide_draft, dict(wide_tensors), wide_config)):
        teacher = Teacher(told, {name: tensor.float() for name, tensor in weights.items()})
        guesser = Guesser(one.head, one.vocabulary, teacher)
        with torch.no_grad():
            reading = teacher.read(text, one.spec.feature_layers)
            words = greedy_chains(guesser, reading, anchors)
            found = list(guesser.after_text(reading, anchors))
            confidence = [guess.confidence for guess in found if guess.confidence is not None]
            scores.append((words, torch.stack([guess.logits for guess in found]), confidence))
    (words, logits, sure), (wide_words, wide_logits, wide_sure) = scores
    assert torch.equal(words, wide_words)
    torch.testing.assert_close(wide_logits, logits, rtol=0, atol=1e-4 * float(logits.std()))
    assert len(sure) == (4 if kind == "block" else 0)
    torch.testing.assert_close(wide_sure, sure, rtol=1e-4, atol=1e-4)


def test_a_configuration_of_another_target_is_refused() -> None:
    config, tensors = small_model()
    wide_config, _ = widen(config, tensors, replace(GROWN["hidden"], num_layers=NUM_LAYERS))
    draft = trained("block", config)
    with pytest.raises(ModelError, match="rms_norm_eps"):
        widen_head(draft, replace(wide_config, rms_norm_eps=1e-5))

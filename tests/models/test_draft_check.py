"""A draft in its target's place is refused, and what makes a draft slow is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_config, tiny_tensors, write_tiny_model
from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.draft_check import check_draft, num_parameters
from understudy.models.weights import load_folder


def config(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_hugging_face(tiny_config(**overrides), None)


TARGET = config(num_hidden_layers=24, hidden_size=256, intermediate_size=1024)
DRAFT = config()


def check(target: ModelConfig, draft: ModelConfig) -> list[str]:
    return check_draft(target, draft, target_name="large", draft_name="small")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_parameters_are_counted(architecture: str, tied: bool) -> None:
    declared = tiny_config(architecture, tie_word_embeddings=tied)
    held = sum(tensor.numel() for tensor in tiny_tensors(declared).values())
    assert num_parameters(ModelConfig.from_hugging_face(declared, None)) == held


def test_parameters_are_those_on_disk(tmp_path: Path) -> None:
    model = load_folder(write_tiny_model(tmp_path / "m"))
    assert num_parameters(model.config) == sum(tensor.numel() for tensor in model.tensors.values())


def test_a_small_draft_of_the_family_needs_no_words() -> None:
    assert check(TARGET, DRAFT) == []


def test_a_draft_larger_than_its_target_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        check_draft(DRAFT, TARGET, target_name="little", draft_name="large")
    sizes = [f"{num_parameters(one) / 1e6:.1f} million parameters" for one in (TARGET, DRAFT)]
    assert sizes == ["20.1 million parameters", "0.1 million parameters"]
    assert caught.value.message == f"The draft large ({sizes[0]}) is larger than its target little ({sizes[1]})."
    assert caught.value.remedy == "Swap them: large as the model and little as its draft."


def test_one_parameter_more_is_larger() -> None:
    wider = replace(DRAFT, vocab_size=DRAFT.vocab_size + 1)
    with pytest.raises(ModelError, match="larger than its target"):
        check(DRAFT, wider)
    assert check(wider, DRAFT)


def test_a_large_draft_is_told_with_its_share() -> None:
    [words] = check(DRAFT, DRAFT)
    assert "The draft small has 100% of its target's size (0.1 million parameters against 0.1 million" in words
    half = replace(TARGET, num_layers=12)
    [words] = check(TARGET, half)
    assert "has 50% of" in words
    assert check(TARGET, replace(TARGET, num_layers=4)) == []


def test_another_architecture_is_told() -> None:
    [words] = check(TARGET, config(architecture="qwen2"))
    assert "is a qwen2 model and its target a llama one: this works" in words


def test_a_shorter_context_is_told() -> None:
    [words] = check(TARGET, config(max_position_embeddings=256))
    assert "reads at most 256 tokens and its target 512: beyond that it drafts nothing" in words
    assert check(TARGET, config(max_position_embeddings=1024)) == []

"""A twin: as much noise as was asked for, where it was asked for, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_config, tiny_tensors, write_tiny_model
from understudy.errors import ConfigError
from understudy.models.load import load_model
from understudy.models.twin import load_draft, noisy_twin, twin_noise

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return tiny_tensors(tiny_config("qwen2", tie_word_embeddings=False))


@pytest.mark.parametrize("sigma", [0.01, 0.1, 2.0])
def test_every_matrix_but_the_embedding_has_noise(tensors: dict[str, Tensor], sigma: float) -> None:
    twin = noisy_twin(tensors, sigma)
    assert twin.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name != EMBEDDING:
            assert float((twin[name] - tensor).std() / tensor.std()) == pytest.approx(sigma, rel=0.05), name
        else:
            assert torch.equal(twin[name], tensor), name


def test_without_noise_it_is_the_model_itself(tensors: dict[str, Tensor]) -> None:
    twin = noisy_twin(tensors, 0.0)
    assert all(torch.equal(twin[name], tensor) for name, tensor in tensors.items())


def test_the_same_every_time_in_any_order(tensors: dict[str, Tensor]) -> None:
    first, other = dict(noisy_twin(tensors, 0.1)), dict(noisy_twin(tensors, 0.1, seed=2))
    second = noisy_twin(tensors, 0.1)
    for name in reversed(list(first)):
        assert torch.equal(second.pop(name), first[name])
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


@pytest.mark.parametrize(("draft", "sigma"), [("twin:0", 0.0), ("twin:0.1", 0.1), ("twin:1e-2", 0.01)])
def test_its_name_says_how_much(draft: str, sigma: float) -> None:
    assert twin_noise(draft) == sigma


@pytest.mark.parametrize("draft", [None, "layers:2", "model.gguf", Path("twins"), "twin"])
def test_other_drafts_are_none(draft: str | Path | None) -> None:
    assert twin_noise(draft) is None


@pytest.mark.parametrize("draft", ["twin:", "twin:-0.1", "twin:nan", "twin:inf", "twin:1e999", "twin:much"])
def test_a_wrong_one_is_refused(draft: str) -> None:
    with pytest.raises(ConfigError, match=f"The draft '{draft}' does not say how much noise it has"):
        twin_noise(draft)


def test_it_is_loaded_from_where_its_target_is(tmp_path: Path) -> None:
    place = write_tiny_model(tmp_path / "tiny")
    other = write_tiny_model(tmp_path / "other", seed=3)
    model, itself, twin = load_model(place), load_draft("twin:0", place), load_draft("twin:0.5", place)
    assert (itself.name, twin.name) == ("tiny itself", "tiny with noise 0.5")
    assert len({model.source_hash, itself.source_hash, twin.source_hash}) == 3
    for name, tensor in model.tensors.items():
        assert torch.equal(itself.tensors[name], tensor)
        assert torch.equal(twin.tensors[name], tensor) == (tensor.dim() == 1 or name == EMBEDDING)
    assert load_draft(other, place).source_hash == load_model(other).source_hash

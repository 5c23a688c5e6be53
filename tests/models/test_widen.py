"""A widened model computes what the small one does, in every family and every way to grow; and what cannot grow."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.models.test_transformers_agreement import LINEAR, LLAMA3, THETA, YARN
from tests.tiny_models import TinyArchitecture, tiny_config, tiny_tensors, write_tiny_model
from understudy.core.draft import Draft
from understudy.core.shapes import SHAPES, Shape, shape_named
from understudy.core.weights import WeightType
from understudy.errors import CapacityError, ConfigError, ModelError
from understudy.kernels.cpu import CpuKernels
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.models.load import load_model
from understudy.models.weights import expected_tensors
from understudy.models.widen import widen, widen_model
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner
from understudy.runtime.selftest import is_row_invariant

Floats = NDArray[np.float32]

PAGE = CpuKernels.page_tokens
NUM_TOKENS = 80  # more than two pages, and more than the context that scaled rotary embeddings stretch
CLOSE = 1e-5
"""Largest difference of two logits that may come from adding in another order, as a share of their spread."""
SHARED_EPSILON = 1e-4
"""The same where heads have norms: their epsilon is not quite the small model's, and tiny models have a large one."""

SAME = Shape(
    name="same",
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
"""The shape that the tiny models have."""
GROWN: dict[str, Shape] = {
    "as it was": SAME,
    "layers": replace(SAME, num_layers=4),
    "hidden": replace(SAME, hidden_size=112),
    "feed-forward": replace(SAME, intermediate_size=176),
    "heads": replace(SAME, num_heads=6),
    "key-value heads": replace(SAME, num_heads=8, num_kv_heads=4),
    "fewer heads to a key-value head": replace(SAME, num_kv_heads=4),
    "head size": replace(SAME, head_dim=32),
    "all": Shape(
        name="all",
        hidden_size=112,
        intermediate_size=176,
        num_layers=3,
        num_heads=9,
        num_kv_heads=3,
        head_dim=32,
    ),
}


def small(architecture: TinyArchitecture = "llama", **settings: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A tiny model whose weights bf16 can hold."""
    declared = tiny_config(architecture, **settings)
    tensors = {name: tensor.bfloat16().float() for name, tensor in tiny_tensors(declared).items()}
    return ModelConfig.from_hugging_face(declared, None), tensors


def decoder_of(config: ModelConfig, tensors: Any, weights: WeightType = "fp32") -> Decoder:
    return Decoder(config, tensors, CpuKernels(num_threads=1), weights=weights)


def logits_of(decoder: Decoder) -> Floats:
    """What it says after each token of a text."""
    text = [(11 + 37 * place) % 300 for place in range(NUM_TOKENS)]
    num_blocks = -(-NUM_TOKENS // PAGE)
    cache = SequenceCache(BlockPool(num_blocks), PAGE, None, "")
    cache.reserve(NUM_TOKENS)
    draft = Draft.chain(text[1:], confidence=[1.0] * (NUM_TOKENS - 1), source="test")
    runner = Runner(decoder, num_blocks=num_blocks, page_tokens=PAGE)
    return runner.forward([Work(cache, text[:1], draft, wants_logits=True)])[0]


def difference(found: Floats, wanted: Floats) -> float:
    """The largest, as a share of the spread."""
    return float(np.abs(found - wanted).max() / np.std(wanted))


def both(
    architecture: TinyArchitecture, shape: Shape, *, weights: WeightType = "fp32", **settings: Any
) -> tuple[Floats, Floats]:
    """The logits of the small and of the wide model."""
    config, tensors = small(architecture, **settings)
    wide_config, wide_tensors = widen(config, tensors, shape)
    wide = decoder_of(wide_config, wide_tensors, weights)
    assert is_row_invariant(wide, PAGE)
    return logits_of(decoder_of(config, dict(tensors), weights)), logits_of(wide)


# ------------------------------------------------------------------------------------------------ the same function


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("grown", GROWN)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_wide_model_computes_what_the_small_one_does(
    architecture: TinyArchitecture, grown: str, tied: bool
) -> None:
    wanted, found = both(architecture, GROWN[grown], tie_word_embeddings=tied)
    assert difference(found, wanted) < (SHARED_EPSILON if architecture == "qwen3" else CLOSE)
    assert np.array_equal(found.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("grown", ["layers", "all"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ],
)
def test_windows_stay(architecture: TinyArchitecture, grown: str, settings: dict[str, Any]) -> None:
    wanted, found = both(architecture, GROWN[grown], **settings)
    assert difference(found, wanted) < CLOSE


@pytest.mark.parametrize("grown", ["hidden", "head size"])
@pytest.mark.parametrize(
    "rope", [THETA, LINEAR, LLAMA3, {**YARN, "truncate": False}], ids=["theta", "linear", "llama3", "yarn"]
)
def test_rotary_scaling_stays(grown: str, rope: dict[str, Any]) -> None:
    wanted, found = both("llama", GROWN[grown], rope_parameters=rope)
    assert difference(found, wanted) < CLOSE
    plain, _ = both("llama", GROWN[grown])
    assert difference(plain, wanted) > 100 * CLOSE  # the scaling does matter for this text


def test_further_layers_change_no_bit() -> None:
    wanted, found = both("qwen2", GROWN["layers"])
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("num_heads", range(4, 13))
def test_heads_of_one_key_value_head_may_be_spread_over_several(num_heads: int) -> None:
    """Seven heads to a key-value head, as Qwen2.5 has them, in shapes that have four."""
    shape = replace(SAME, num_heads=16, num_kv_heads=4)
    settings = {"num_attention_heads": num_heads, "num_key_value_heads": 1}
    wanted, found = both("qwen2", shape, **settings)
    assert difference(found, wanted) < CLOSE


@pytest.mark.parametrize("grown", ["all", "head size"])
def test_int8_rounds_the_wide_model_as_it_rounds_the_small_one(grown: str) -> None:
    wanted, found = both("llama", GROWN[grown], weights="int8")
    exact, _ = both("llama", GROWN[grown])
    away = np.sqrt(np.mean((found - exact) ** 2)) / np.sqrt(np.mean((wanted - exact) ** 2))
    assert 0.5 < away < 1.5


# ------------------------------------------------------------------------------------------------ what it is made of


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_tensors_are_those_of_the_shape(architecture: TinyArchitecture) -> None:
    config, tensors = small(architecture)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    wide_config, wide = widen(config, tensors, GROWN["all"])
    assert {name: tuple(tensor.shape) for name, tensor in wide.items()} == dict(expected_tensors(wide_config))
    for name, tensor in wide.items():
        assert tensor.dtype == (torch.bfloat16 if tensor.dim() == 2 else torch.float32), name
        assert tensor.isfinite().all(), name
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
    assert (wide_config.vocab_size, wide_config.max_positions) == (config.vocab_size, config.max_positions)


def test_what_only_meets_zeros_is_noise() -> None:
    """In matrices that are mostly new, most is noise; none of it is larger than what a row holds of the small model."""
    config, tensors = small("llama")
    shape = Shape(
        name="large",
        hidden_size=512,
        intermediate_size=1024,
        num_layers=3,
        num_heads=16,
        num_kv_heads=8,
        head_dim=32,
    )
    tensors = {name: tensor / 64 for name, tensor in tensors.items()}  # less than noise is elsewhere
    wide = widen(config, tensors, shape)[1]
    for name, tensor in wide.items():
        if tensor.dim() == 2 and "embed" not in name:
            assert (tensor == 0).float().mean() < 0.3, name
    name = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(wide[name][:128].abs().amax(1).float(), tensors[name].abs().amax(1))


def test_the_same_every_time_in_any_order() -> None:
    config, tensors = small("qwen2")
    first = dict(widen(config, tensors, GROWN["all"])[1])
    second = widen(config, tensors, GROWN["all"])[1]
    for name in reversed(list(first)):
        assert torch.equal(second.pop(name), first[name]), name
    weights = [tensor for name, tensor in first.items() if "gate_proj" in name]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))


def test_tensors_are_made_one_by_one() -> None:
    config, tensors = small("llama")
    steps: list[tuple[int, int]] = []
    wide_config, wide = widen(config, tensors, GROWN["all"], progress=lambda *step: steps.append(step))
    total = len(wide)
    assert steps == []
    wide.pop("model.norm.weight")
    assert steps == [(1, total)]
    wide["model.norm.weight"] = torch.ones(112)
    steps.clear()
    decoder_of(wide_config, wide)
    assert steps == [(done, total) for done in range(1, total + 1)]
    assert len(wide) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu() -> None:
    config, tensors = small("qwen2")
    here, there = (widen(config, tensors, GROWN["all"], device=device)[1] for device in ("cpu", "cuda"))
    for name, tensor in there.items():
        assert tensor.is_cuda
        assert tensor.shape == here[name].shape, name  # the noise is another, and meets only zeros
    on_cpu = {name: tensor.cpu() for name, tensor in there.items()}
    wanted = logits_of(decoder_of(config, dict(tensors)))
    assert difference(logits_of(decoder_of(widen(config, tensors, GROWN["all"])[0], on_cpu)), wanted) < CLOSE


# ------------------------------------------------------------------------------------------------ a loaded model


def test_name_and_hash_say_that_it_is_widened(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path / "tiny"))
    wide = widen_model(model, GROWN["all"], weights="int8")
    assert wide.name == "tiny widened to all"
    assert wide.source_hash == f"{model.source_hash}+widened-all-112-176-3-9-3-32"
    assert wide.tokenizer is model.tokenizer
    assert model.name == "tiny"


@pytest.mark.parametrize(("weights", "fits"), [("int8", True), ("fp32", False)])
def test_what_memory_can_never_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: WeightType, fits: bool
) -> None:
    model = load_model(write_tiny_model(tmp_path / "tiny"))
    config, _ = widen(model.config, model.tensors, GROWN["all"])
    pages = 2 * sum(math.prod(size) for _, size in expected_tensors(config))
    known = {"SC_PHYS_PAGES": pages, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr("os.sysconf", known.__getitem__)
    if fits:
        assert widen_model(model, GROWN["all"], weights=weights).config == config
        return
    with pytest.raises(CapacityError, match=r"widened to all takes 0 GiB as fp32.*, or int8 weights"):
        widen_model(model, GROWN["all"], weights=weights)


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_layers": 1}, "it has 2 layers and the shape 1"),
        ({"hidden_size": 48}, "it has 64 hidden dimensions and the shape 48"),
        ({"intermediate_size": 112}, "it has 128 feed-forward dimensions and the shape 112"),
        ({"head_dim": 8}, "its heads have 16 dimensions and the shape's 8"),
        ({"head_dim": 48}, "its heads have 16 dimensions and the shape's 48"),
        ({"head_dim": 64}, "its heads have 16 dimensions and the shape's 64"),
        ({"num_heads": 2}, "its 4 heads over 2 key-value heads take 4 of the shape's key-value heads, which has 2"),
        ({"num_kv_heads": 1}, "its 4 heads over 2 key-value heads take 2 of the shape's key-value heads, which has 1"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(change: dict[str, int], what: str) -> None:
    config, tensors = small()
    with pytest.raises(ModelError) as error:
        widen(config, tensors, replace(SAME, **change))
    assert error.value.message.startswith(f"This model cannot be widened to same: {what}")
    assert error.value.remedy == "It fits in none that has a name."  # heads of 16 dimensions are rare


def test_yarn_is_refused_where_heads_grow() -> None:
    config, tensors = small(rope_parameters=YARN)
    with pytest.raises(ModelError, match="its rotary scaling \\(yarn\\) counts the dimensions of a head"):
        widen(config, tensors, GROWN["head size"])
    wanted, found = both("llama", GROWN["hidden"], rope_parameters=YARN)
    assert difference(found, wanted) < CLOSE


def test_the_error_names_the_shapes_that_fit() -> None:
    """SmolLM2-135M has more layers than the smallest shape."""
    config, tensors = small()
    smol = replace(
        config,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    with pytest.raises(ModelError) as error:
        widen(smol, tensors, SHAPES["1b"])
    assert error.value.message == "This model cannot be widened to 1b: it has 30 layers and the shape 16."
    assert error.value.remedy == "Shapes that it fits in: 3b, 8b, 32b."


@pytest.mark.parametrize(
    ("name", "least", "most"), [("1b", 0.9, 1.2), ("3b", 3.0, 3.6), ("8b", 7.0, 7.6), ("32b", 30.5, 33.0)]
)
def test_shapes_are_as_large_as_their_names(name: str, least: float, most: float) -> None:
    """In billions, with the vocabulary of SmolLM2."""
    config = replace(small()[0], vocab_size=49152)
    sizes = {field: getattr(shape_named(name), field) for field in Shape.__slots__ if field != "name"}
    wide = replace(config, tie_embeddings=False, **sizes)
    assert least <= sum(math.prod(size) for _, size in expected_tensors(wide)) / 1e9 <= most


def test_a_shape_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"There is no shape named .7b.\. Choose from 1b, 3b, 8b, 32b"):
        shape_named("7b")

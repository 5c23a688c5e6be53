"""A model's declaration is understood exactly, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_config
from understudy.errors import ModelError
from understudy.models.config import ModelConfig, RopeScaling
from understudy.models.rotary import rotary_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def old_style(**overrides: Any) -> dict[str, Any]:
    """A config.json as transformers 4 writes it."""
    config = tiny_config()
    del config["rope_parameters"]
    return {**config, "rope_theta": 10000.0, "rope_scaling": None, **overrides}


def test_reads_llama_and_qwen2() -> None:
    llama = ModelConfig.from_hugging_face(tiny_config("llama", tie_word_embeddings=False), None)
    assert (llama.architecture, llama.attention_bias, llama.tie_embeddings) == ("llama", False, False)
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.max_positions) == (4, 2, 16, 512)
    assert (llama.bos_id, llama.eos_ids) == (1, (2,))
    qwen2 = ModelConfig.from_hugging_face(tiny_config("qwen2"), None)
    assert (qwen2.architecture, qwen2.attention_bias, qwen2.tie_embeddings) == ("qwen2", True, True)


def test_both_spellings_of_rotary_parameters_agree() -> None:
    new = tiny_config(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    old = old_style(rope_theta=500000.0, rope_scaling=LLAMA3)
    older = old_style(rope_theta=500000.0, rope_scaling={**LLAMA3, "type": "llama3"})
    expected = RopeScaling(kind="llama3", factor=8.0)
    for config in (new, old, older):
        read = ModelConfig.from_hugging_face(config, None)
        assert (read.rope_theta, read.rope_scaling) == (500000.0, expected)
    linear = ModelConfig.from_hugging_face(old_style(rope_scaling={"type": "linear", "factor": 2}), None)
    assert linear.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert ModelConfig.from_hugging_face(old_style(), None).rope_scaling is None


def test_end_ids_come_from_the_generation_config_first() -> None:
    assert ModelConfig.from_hugging_face(tiny_config(), {"eos_token_id": [5, 2, 5]}).eos_ids == (5, 2)
    assert ModelConfig.from_hugging_face(tiny_config(), {}).eos_ids == (2,)
    config = {**tiny_config(), "eos_token_id": None, "bos_token_id": None}
    nothing = ModelConfig.from_hugging_face(config, None)
    assert (nothing.bos_id, nothing.eos_ids) == (None, ())


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    config = old_style()
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "hidden_act"):
        config.pop(key, None)
    read = ModelConfig.from_hugging_face(config, None)
    assert (read.head_dim, read.num_kv_heads, read.rope_theta) == (16, 4, 10000.0)


def test_mistral_without_a_window_is_a_llama() -> None:
    config = {**tiny_config(), "model_type": "mistral", "sliding_window": None}
    assert ModelConfig.from_hugging_face(config, None).architecture == "llama"
    assert ModelConfig.from_hugging_face({**config, "sliding_window": 512}, None).architecture == "llama"


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config = {**tiny_config("qwen2"), "sliding_window": 128, "use_sliding_window": False}
    config.pop("layer_types", None)
    assert ModelConfig.from_hugging_face(config, None).architecture == "qwen2"
    beyond = {**config, "use_sliding_window": True, "max_window_layers": 2}
    assert ModelConfig.from_hugging_face(beyond, None).architecture == "qwen2"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": "linear"}, "'linear'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "turns"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "feed-forward"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 128}, "128"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 15}, "15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": "2"}, "'2'"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        ModelConfig.from_hugging_face(old_style(**changes), None)
    assert caught.value.remedy


def test_qwen2_with_a_window_in_use_is_refused() -> None:
    config = {**tiny_config("qwen2"), "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}
    config.pop("layer_types", None)
    with pytest.raises(ModelError, match="sliding window"):
        ModelConfig.from_hugging_face(config, None)


@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_written_and_read_back(rope: dict[str, Any] | None) -> None:
    config = ModelConfig.from_hugging_face(old_style(rope_scaling=rope), {"eos_token_id": [2, 0]})
    assert ModelConfig.from_hugging_face(config.to_hugging_face(), None) == config


def gguf_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.tokens": ["a"] * 304,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**fields, **{key.replace("__", "."): value for key, value in changes.items()}}


def test_reads_gguf_metadata() -> None:
    config = ModelConfig.from_gguf(gguf_fields(tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=2))
    assert (config.vocab_size, config.head_dim, config.rms_norm_eps, config.rope_theta) == (304, 16, 1e-5, 10000.0)
    assert (config.bos_id, config.eos_ids) == (1, (2, 7))
    scaled = ModelConfig.from_gguf(gguf_fields(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0))
    assert scaled.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    former = ModelConfig.from_gguf(gguf_fields(llama__rope__scale_linear=2.0))
    assert former.rope_scaling == scaled.rope_scaling


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma"}, "'gemma'"),
        ({"llama__expert_count": 8}, "8 experts"),
        ({"llama__attention__sliding_window": 64}, "64"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"llama__attention__value_length": 8}, "attention.value_length"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__block_count": None}, "block_count"),
        ({"llama__attention__head_count": [4, 4]}, "head_count"),
    ],
)
def test_refuses_gguf_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_gguf(gguf_fields(**changes))


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_rotary_tables_agree_with_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    written = tiny_config(head_dim=64, max_position_embeddings=32768, rope_parameters={**rope, "rope_theta": 500000.0})
    config = ModelConfig.from_hugging_face(written, None)
    cos, sin = rotary_tables(config, 300)
    assert (cos.shape, cos.dtype, sin.dtype) == ((300, 32), np.float32, np.float32)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**written))
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(300)[None])  # [1, 300, 64], the halves repeated
    # theirs computes angles in fp32, where position 300 is good to about 3e-5
    np.testing.assert_allclose(cos, their_cos[0, :, :32].numpy(), atol=1e-4)
    np.testing.assert_allclose(sin, their_sin[0, :, :32].numpy(), atol=1e-4)


def test_rotary_angles_do_not_depend_on_how_many_are_asked_for() -> None:
    config = ModelConfig.from_hugging_face(tiny_config(), None)
    short, long = rotary_tables(config, 7), rotary_tables(config, 512)
    assert all(np.array_equal(few, many[:7]) for few, many in zip(short, long, strict=True))

"""A model's declaration is understood exactly, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_config
from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.rope_scaling import RopeScaling
from understudy.models.rotary import rotary_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
YARNS = [
    YARN,
    {**YARN, "attention_factor": 0.5, "truncate": False},
    {**YARN, "beta_fast": 100.0, "beta_slow": 0.01},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
    {**YARN, "original_max_position_embeddings": 7},
]


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


def windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    return ModelConfig.from_hugging_face(config, None).windows


def test_mistral_without_a_window_is_a_llama() -> None:
    config = tiny_config("mistral")
    assert ModelConfig.from_hugging_face(config, None) == ModelConfig.from_hugging_face(tiny_config(), None)
    assert windows({**config, "sliding_window": 512}) == (), "as long as the context"
    assert windows({**config, "sliding_window": 511}) == (511, 511)


def test_a_mistral_that_names_no_window_has_that_of_transformers() -> None:
    config = {**tiny_config("mistral"), "max_position_embeddings": 32768}
    del config["sliding_window"]
    assert windows(config) == (4096, 4096)


def test_a_stray_window_of_a_llama_changes_nothing() -> None:
    assert windows({**tiny_config(), "sliding_window": 128}) == ()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_windows_of_some_layers(architecture: Any) -> None:
    config = {**tiny_config(architecture), "num_hidden_layers": 3, "sliding_window": 128, "use_sliding_window": False}
    del config["layer_types"]
    assert windows(config) == (), "switched off"
    used = {**config, "use_sliding_window": True}
    assert windows({**used, "max_window_layers": 3}) == ()
    assert windows({**used, "max_window_layers": 1}) == (None, 128, 128)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**used, "max_window_layers": 3, "layer_types": kinds}) == (128, None, 128)
    with pytest.raises(ModelError, match="layer_types"):
        windows({**config, "layer_types": kinds})
    read = ModelConfig.from_hugging_face({**used, "max_window_layers": 2}, None)
    assert [read.window(layer) for layer in range(3)] == [None, None, 128]


def test_reads_qwen3() -> None:
    qwen3 = ModelConfig.from_hugging_face(tiny_config("qwen3"), None)
    assert (qwen3.architecture, qwen3.head_norms, qwen3.attention_bias) == ("qwen3", True, False)
    config = tiny_config("qwen3")
    del config["head_dim"]
    assert ModelConfig.from_hugging_face(config, None).head_dim == 128, "what transformers takes it for"


def yarn(**rope: Any) -> RopeScaling:
    config = old_style(rope_scaling={"rope_type": "yarn", "factor": 4.0, **rope})
    scaling = ModelConfig.from_hugging_face(config, None).rope_scaling
    assert scaling is not None
    return scaling


def test_reads_yarn() -> None:
    paper = 1.0 + 0.1 * np.log(4.0)
    assert yarn() == RopeScaling(kind="yarn", factor=4.0, original_max_positions=512, attention_factor=paper)
    assert yarn(original_max_position_embeddings=128).original_max_positions == 128
    assert yarn(factor=None, original_max_position_embeddings=128).factor == 4.0
    assert yarn(attention_factor=0.5, mscale=2.0, mscale_all_dim=1.0).attention_factor == 0.5
    assert yarn(mscale=2.0, mscale_all_dim=1.0).attention_factor == pytest.approx((2 * paper - 1) / paper)
    assert yarn(mscale=2.0).attention_factor == paper, "one of the two says nothing"
    assert (yarn(beta_fast=8, beta_slow=None).beta_fast, yarn(beta_slow=0.5).beta_slow) == (8.0, 0.5)
    assert not yarn(truncate=False).truncate


def test_yarn_added_to_a_declaration_lengthens_its_context() -> None:
    """As Qwen's model cards tell to: the scaling is added, max_position_embeddings stays."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert ModelConfig.from_hugging_face(old_style(rope_scaling=rope), None).max_positions == 2048
    said = old_style(rope_scaling=rope, max_position_embeddings=4096)
    assert ModelConfig.from_hugging_face(said, None).max_positions == 4096


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma2"}, "'gemma2'"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor = 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0}}, "beta_slow"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": 1}}, "mscale"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True}}, "finetuned"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rotary base"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": "linear"}, "'linear'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "turns"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "feed-forward"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": "128"}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention"] * 2}, "some layers"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}, "sliding window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "2 layers"),
        ({"layer_types": ["full_attention", ["x"]]}, "not supported"),
        ({"model_type": "qwen3", "attention_bias": True}, "qwen3 model with attention biases"),
        ({"model_type": "qwen3", "use_sliding_window": "yes"}, "use_sliding_window"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None}, "max_window_layers"),
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


@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, *YARNS])
def test_written_and_read_back(rope: dict[str, Any] | None) -> None:
    config = ModelConfig.from_hugging_face(old_style(rope_scaling=rope), {"eos_token_id": [2, 0]})
    assert ModelConfig.from_hugging_face(config.to_hugging_face(), None) == config


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_windows_written_and_read_back(architecture: Any) -> None:
    used = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}
    config = ModelConfig.from_hugging_face(tiny_config(architecture, **used), None)
    assert config.windows
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


def test_reads_windows_of_gguf() -> None:
    assert ModelConfig.from_gguf(gguf_fields(llama__attention__sliding_window=64)).windows == (64, 64)
    for none in (0, 512, None):
        assert ModelConfig.from_gguf(gguf_fields(llama__attention__sliding_window=none)).windows == ()


def test_windows_of_some_layers_cannot_be_told_from_gguf() -> None:
    """A file of qwen2 does not say which layers have the window."""
    fields = gguf_fields(general__architecture="qwen2", llama__attention__sliding_window=64)
    with pytest.raises(ModelError, match="sliding window"):
        ModelConfig.from_gguf({key.replace("llama.", "qwen2."): value for key, value in fields.items()})


def gguf_yarn(**changes: Any) -> dict[str, Any]:
    changes = {"type": "yarn", "factor": 4.0, **changes}
    return gguf_fields(**{f"llama.rope.scaling.{name}": value for name, value in changes.items()})


def test_reads_yarn_of_gguf() -> None:
    paper = 1.0 + 0.1 * np.log(4.0)
    config = ModelConfig.from_gguf(gguf_yarn())
    expected = RopeScaling(kind="yarn", factor=4.0, original_max_positions=512, attention_factor=paper)
    assert (config.rope_scaling, config.max_positions) == (expected, 2048)
    extra = float(np.float32(0.9))
    read = ModelConfig.from_gguf(gguf_yarn(original_context_length=128, attn_factor=extra, yarn_beta_fast=8.0))
    assert read.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_positions=128, attention_factor=0.9 * paper, beta_fast=8.0
    )


@pytest.mark.parametrize("unknown", ["yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "alpha"])
def test_refuses_what_yarn_of_gguf_might_mean(unknown: str) -> None:
    with pytest.raises(ModelError, match=unknown):
        ModelConfig.from_gguf(gguf_yarn(**{unknown: 0.5}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "gemma"}, "'gemma'"),
        ({"llama__expert_count": 8}, "8 experts"),
        ({"llama__attention__sliding_window": "64"}, "sliding_window"),
        ({"llama__attention__sliding_window": 64, "llama__attention__sliding_window_pattern": 2}, "pattern"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"llama__attention__value_length": 8}, "attention.value_length"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.factor"),
        ({"llama__block_count": None}, "block_count"),
        ({"llama__attention__head_count": [4, 4]}, "head_count"),
    ],
)
def test_refuses_gguf_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_gguf(gguf_fields(**changes))


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3, *YARNS])
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

"""The shape of a model, read once from whatever file declares it.

A model that is almost a Llama gives almost the right words, so nothing is guessed here: every field that would change
the arithmetic is either understood or refused by name. What is left is one frozen record that the rest can trust.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from understudy.errors import ModelError

Architecture = Literal["llama", "qwen2"]

# What a file may call itself -> what it is computed as. Mistral without a sliding window is a Llama.
HUGGING_FACE_TYPES: Mapping[str, Architecture] = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
GGUF_TYPES: Mapping[str, Architecture] = {"llama": "llama", "qwen2": "qwen2"}
SUPPORTED = "Supported are llama (with SmolLM2 and Mistral without a sliding window) and qwen2, with silu activations."
ROPE_SUPPORTED = "Supported rotary embeddings are the default one, llama3 and linear."


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """Only llama3 reads this one and the two before it."""

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"The llama3 scaling goes from {self.low_freq_factor} to {self.high_freq_factor} turns, not upwards.",
                AGAIN,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a model that is not a weight."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    """Biases on q, k and v (never on o): true for qwen2."""
    tie_embeddings: bool = False
    """The output layer is the embedding; there is no `lm_head.weight` then."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly.", AGAIN)
        if self.head_dim % 2:
            raise ModelError(f"The head size is {self.head_dim}; rotary embeddings need an even one.", SUPPORTED)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> ModelConfig:
        """Read config.json (and generation_config.json), as transformers 4 or 5 writes them."""
        model_type = config.get("model_type")
        architecture = HUGGING_FACE_TYPES.get(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            raise ModelError(f"The architecture {model_type!r} is not supported.", SUPPORTED)
        _refuse_hugging_face_variants(config, architecture)
        num_heads = _whole(config, "num_attention_heads")
        hidden_size = _whole(config, "hidden_size")
        rope_theta, rope_scaling = _hugging_face_rope(config)
        return cls(
            architecture=architecture,
            vocab_size=_whole(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_whole(config, "intermediate_size"),
            num_layers=_whole(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_whole(config, "num_key_value_heads", num_heads),
            head_dim=_whole(config, "head_dim", hidden_size // num_heads),
            max_positions=_whole(config, "max_position_embeddings", 2048),
            rms_norm_eps=_real(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=architecture == "qwen2",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_id=_first_id(config.get("bos_token_id")),
            eos_ids=_token_ids((generation_config or {}).get("eos_token_id")) or _token_ids(config.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read the metadata of a GGUF file.

        Whether the head is tied and whether `rope_freqs.weight` stretches the rotary frequencies is known from its
        tensors only, so `weights.load_gguf` settles these two.
        """
        name = fields.get("general.architecture")
        architecture = GGUF_TYPES.get(name) if isinstance(name, str) else None
        if architecture is None:
            raise ModelError(f"The GGUF architecture {name!r} is not supported.", SUPPORTED)
        own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
        num_heads = _whole(own, "attention.head_count")
        hidden_size = _whole(own, "embedding_length")
        head_dim = _whole(own, "attention.key_length", hidden_size // num_heads)
        _refuse_gguf_variants(own, head_dim)
        tokens = fields.get("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) else None
        end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ends = [_token_ids(fields.get(f"tokenizer.ggml.{key}")) for key in end_keys]
        return cls(
            architecture=architecture,
            vocab_size=_whole(own, "vocab_size", num_tokens),
            hidden_size=hidden_size,
            intermediate_size=_whole(own, "feed_forward_length"),
            num_layers=_whole(own, "block_count"),
            num_heads=num_heads,
            num_kv_heads=_whole(own, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=_whole(own, "context_length"),
            rms_norm_eps=_shortest_real(_real(own, "attention.layer_norm_rms_epsilon")),
            rope_theta=_real(own, "rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope_scaling(own),
            attention_bias=architecture == "qwen2",
            tie_embeddings=False,
            bos_id=_first_id(fields.get("tokenizer.ggml.bos_token_id")),
            eos_ids=tuple(dict.fromkeys(token for ids in ends for token in ids)),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Give the config.json that `from_hugging_face` reads back as this."""
        scaling = self.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default"}
        if scaling is not None:
            rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling is not None and scaling.kind == "llama3":
            rope["low_freq_factor"] = scaling.low_freq_factor
            rope["high_freq_factor"] = scaling.high_freq_factor
            rope["original_max_position_embeddings"] = scaling.original_max_positions
        return {
            "model_type": self.architecture,
            "architectures": ["LlamaForCausalLM" if self.architecture == "llama" else "Qwen2ForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids),
        }


AGAIN = "The declaration of this model is damaged or is of another kind of model: download it again."


def _whole(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Take a count of at least one, or the default where the key is absent or null."""
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"The model's declaration has no {key}.", AGAIN)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ModelError(f"The model's declaration has {key} = {value!r}, which is not a count.", AGAIN)
    return value


def _real(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Take a positive finite number, or the default where the key is absent or null."""
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"The model's declaration has no {key}.", AGAIN)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ModelError(f"The model's declaration has {key} = {value!r}, which is not a positive number.", AGAIN)
    return float(value)


def _shortest_real(value: float) -> float:
    """Give the decimal number that was meant: GGUF rounds 1e-5 to fp32, and the twin in config.json says 1e-5."""
    return float(f"{value:.7g}")


def _token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple; -1 is how some files say nothing."""
    if value is None:
        return ()
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token < 2**31 for token in values):
        raise ModelError(f"The model's declaration has {value!r} for token ids.", AGAIN)
    return tuple(dict.fromkeys(token for token in values if token >= 0))


def _first_id(value: object) -> int | None:
    return next(iter(_token_ids(value)), None)


def _refuse_hugging_face_variants(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Refuse, by name, whatever the decoder would silently compute wrongly."""
    activation = config.get("hidden_act", config.get("hidden_activation", "silu"))
    if activation not in ("silu", "swish"):
        raise ModelError(f"The activation {activation!r} is not supported.", SUPPORTED)
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"Quantised safetensors ({method}) are not supported.",
            "Give the unquantised folder (fp32, fp16 or bf16), or a GGUF file of the model.",
        )
    if architecture == "llama" and config.get("attention_bias"):
        raise ModelError("A llama model with attention biases is not supported.", SUPPORTED)
    if config.get("mlp_bias"):
        raise ModelError("A model with biases in its feed-forward layers is not supported.", SUPPORTED)
    if config.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError(
            "Rotary embeddings on a part of the head (partial_rotary_factor) are not supported.", SUPPORTED
        )
    if _sliding_window_in_use(config):
        raise ModelError(f"A sliding window ({config.get('sliding_window')!r} tokens) is not supported.", SUPPORTED)


def _sliding_window_in_use(config: Mapping[str, Any]) -> bool:
    """Whether any layer looks back less far than the whole context."""
    window = config.get("sliding_window")
    positions = config.get("max_position_embeddings")
    if window is None or (isinstance(positions, int) and isinstance(window, int) and window >= positions):
        return False
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        return "sliding_attention" in layer_types
    if config["model_type"] == "qwen2":  # names a window even where it is switched off
        layers, first = config.get("num_hidden_layers"), config.get("max_window_layers")
        below = isinstance(layers, int) and isinstance(first, int) and first >= layers
        return bool(config.get("use_sliding_window", False)) and not below
    return bool(config["model_type"] == "mistral")  # llama has no such field: a stray one changes nothing


def _hugging_face_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read the rotary base and its scaling: rope_parameters since transformers 5, two top-level keys before it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"The model's rotary parameters are {scaling!r}, not a table.", AGAIN)
    theta = _real({"rope_theta": scaling.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError(
            "Rotary embeddings on a part of the head (partial_rotary_factor) are not supported.", SUPPORTED
        )
    if kind in ("default", None):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=_real(scaling, "factor"))
    if kind != "llama3":
        raise ModelError(f"The rotary scaling {kind!r} is not supported.", ROPE_SUPPORTED)
    return theta, RopeScaling(
        kind="llama3",
        factor=_real(scaling, "factor"),
        low_freq_factor=_real(scaling, "low_freq_factor"),
        high_freq_factor=_real(scaling, "high_freq_factor"),
        original_max_positions=_whole(scaling, "original_max_position_embeddings"),
    )


def _refuse_gguf_variants(own: Mapping[str, Any], head_dim: int) -> None:
    """Refuse what a file of a supported architecture may still hold; `own` has the architecture's prefix cut off."""
    if own.get("expert_count"):
        raise ModelError(f"A mixture of {own['expert_count']} experts is not supported.", SUPPORTED)
    if own.get("attention.sliding_window"):
        raise ModelError(f"A sliding window ({own['attention.sliding_window']} tokens) is not supported.", SUPPORTED)
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(f"{key} is {own[key]} where heads have {head_dim}: this is not supported.", SUPPORTED)


def _gguf_rope_scaling(own: Mapping[str, Any]) -> RopeScaling | None:
    """Read linear scaling, under its present or its former name."""
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"The rotary scaling {kind!r} is not supported.", ROPE_SUPPORTED)
    factor = _real(own, "rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None

"""The shape of a model, read once from whatever file declares it.

A model that is almost a Llama gives almost the right words, so nothing is guessed here: every field that would change
the arithmetic is either understood or refused by name. What is left is one frozen record that the rest can trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from understudy.errors import ModelError
from understudy.models.fields import AGAIN, first_id, real, shortest_real, switch, token_ids, whole
from understudy.models.rope_scaling import RopeScaling, gguf_rope_scaling, hugging_face_rope

Architecture = Literal["llama", "qwen2", "qwen3"]

# What a file may call itself -> what it is computed as. Mistral is a Llama whose layers may have a sliding window.
HUGGING_FACE_TYPES: Mapping[str, Architecture] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
GGUF_TYPES: Mapping[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
SUPPORTED = "Supported are llama (with SmolLM2), mistral, qwen2 and qwen3, with silu activations."


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
    head_norms: bool = False
    """RMS norms of every head of q and k, before the rotary embedding: true for qwen3."""
    windows: tuple[int | None, ...] = ()
    """[layers] how many positions a layer sees, a row's own included; None sees all. Empty if all layers do."""
    tie_embeddings: bool = False
    """The output layer is the embedding; there is no `lm_head.weight` then."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly.", AGAIN)
        if self.head_dim % 2:
            raise ModelError(f"The head size is {self.head_dim}; rotary embeddings need an even one.", SUPPORTED)
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1.0:
            raise ModelError(f"The yarn scaling needs a rotary base above 1, not {self.rope_theta}.", AGAIN)

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, a row's own included, or None for all."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> ModelConfig:
        """Read config.json (and generation_config.json), as transformers 4 or 5 writes them."""
        model_type = config.get("model_type")
        architecture = HUGGING_FACE_TYPES.get(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            raise ModelError(f"The architecture {model_type!r} is not supported.", SUPPORTED)
        _refuse_hugging_face_variants(config, architecture)
        num_heads = whole(config, "num_attention_heads")
        hidden_size = whole(config, "hidden_size")
        rope_theta, rope_scaling = hugging_face_rope(config)
        max_positions = _longest(whole(config, "max_position_embeddings", 2048), rope_scaling)
        return cls(
            architecture=architecture,
            vocab_size=whole(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=whole(config, "intermediate_size"),
            num_layers=whole(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=whole(config, "num_key_value_heads", num_heads),
            head_dim=whole(config, "head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads),
            max_positions=max_positions,
            rms_norm_eps=real(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=architecture == "qwen2",
            head_norms=architecture == "qwen3",
            windows=_hugging_face_windows(config, max_positions),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_id=first_id(config.get("bos_token_id")),
            eos_ids=token_ids((generation_config or {}).get("eos_token_id")) or token_ids(config.get("eos_token_id")),
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
        num_heads = whole(own, "attention.head_count")
        hidden_size = whole(own, "embedding_length")
        head_dim = whole(own, "attention.key_length", hidden_size // num_heads)
        _refuse_gguf_variants(own, head_dim)
        rope_scaling = gguf_rope_scaling(own)
        max_positions = _longest(whole(own, "context_length"), rope_scaling)
        tokens = fields.get("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) else None
        end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ends = [token_ids(fields.get(f"tokenizer.ggml.{key}")) for key in end_keys]
        return cls(
            architecture=architecture,
            vocab_size=whole(own, "vocab_size", num_tokens),
            hidden_size=hidden_size,
            intermediate_size=whole(own, "feed_forward_length"),
            num_layers=whole(own, "block_count"),
            num_heads=num_heads,
            num_kv_heads=whole(own, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=shortest_real(real(own, "attention.layer_norm_rms_epsilon")),
            rope_theta=real(own, "rope.freq_base", 10000.0),
            rope_scaling=rope_scaling,
            attention_bias=architecture == "qwen2",
            head_norms=architecture == "qwen3",
            windows=_gguf_windows(own, architecture, max_positions),
            tie_embeddings=False,
            bos_id=first_id(fields.get("tokenizer.ggml.bos_token_id")),
            eos_ids=tuple(dict.fromkeys(token for ids in ends for token in ids)),
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Give the config.json that `from_hugging_face` reads back as this."""
        rope = {"rope_type": "default"} if self.rope_scaling is None else self.rope_scaling.to_hugging_face()
        model_type = "mistral" if self.architecture == "llama" and self.windows else self.architecture
        return {
            "model_type": model_type,
            "architectures": [f"{model_type.capitalize()}ForCausalLM"],
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
            **self._window_fields(),
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids),
        }

    def _window_fields(self) -> dict[str, Any]:
        if not self.windows:
            return {}
        fields: dict[str, Any] = {"sliding_window": max(window for window in self.windows if window is not None)}
        if self.architecture == "llama":  # mistral: all layers have it
            return fields
        kinds = ["full_attention" if window is None else "sliding_attention" for window in self.windows]
        return fields | {"use_sliding_window": True, "layer_types": kinds}


def _longest(declared: int, scaling: RopeScaling | None) -> int:
    """The longest context. Who adds yarn to a declaration, as model cards tell to, may leave its length as it was."""
    return max(declared, scaling.num_positions if scaling is not None else 0)


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
    if architecture != "qwen2" and config.get("attention_bias"):
        raise ModelError(f"A {architecture} model with attention biases is not supported.", SUPPORTED)
    if config.get("mlp_bias"):
        raise ModelError("A model with biases in its feed-forward layers is not supported.", SUPPORTED)
    if config.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError(
            "Rotary embeddings on a part of the head (partial_rotary_factor) are not supported.", SUPPORTED
        )


def _hugging_face_windows(config: Mapping[str, Any], max_positions: int) -> tuple[int | None, ...]:
    """Read the windows of all layers, or nothing if all see all; absent fields are what transformers takes them for."""
    num_layers = whole(config, "num_hidden_layers")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        _refuse_layer_types(layer_types, num_layers)
    if config["model_type"] == "llama":  # has no such field: a stray window changes nothing
        if layer_types is not None and "sliding_attention" in layer_types:
            raise ModelError("A llama model with a sliding window is not supported.", SUPPORTED)
        return ()
    window = None if config.get("sliding_window", 4096) is None else whole(config, "sliding_window", 4096)
    if config["model_type"] == "mistral":
        if window is not None and layer_types is not None and "full_attention" in layer_types:
            raise ModelError("A mistral model with a sliding window in some layers is not supported.", SUPPORTED)
        has_window = [True] * num_layers
    else:
        window = window if switch(config, "use_sliding_window", default=False) else None
        if layer_types is None:
            first = config.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                raise ModelError(f"The model's declaration has max_window_layers = {first!r}.", AGAIN)
            has_window = [layer >= first for layer in range(num_layers)]
        else:
            has_window = [kind == "sliding_attention" for kind in layer_types]
            if window is None and any(has_window):
                raise ModelError("layer_types names layers with a sliding window, but none is in use.", AGAIN)
    return _windows(window, has_window, max_positions)


def _refuse_layer_types(layer_types: object, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ModelError(f"layer_types is not a list of {num_layers} layers.", AGAIN)
    for kind in layer_types:
        if kind not in known:
            raise ModelError(f"A layer of the type {kind!r} is not supported.", SUPPORTED)


def _gguf_windows(own: Mapping[str, Any], architecture: Architecture, max_positions: int) -> tuple[int | None, ...]:
    """Read the window of a GGUF file: it has one for all layers, or none (0)."""
    if own.get("attention.sliding_window") in (None, 0):
        return ()
    window = whole(own, "attention.sliding_window")
    for is_unknown, what in (
        (architecture != "llama", f"in a GGUF file of {architecture}"),
        (own.get("attention.sliding_window_pattern") is not None, "with a pattern of layers"),
    ):
        if is_unknown:
            raise ModelError(f"A sliding window ({window} tokens) {what} is not supported.", SUPPORTED)
    return _windows(window, [True] * whole(own, "block_count"), max_positions)


def _windows(window: int | None, has_window: list[bool], max_positions: int) -> tuple[int | None, ...]:
    """The windows by layer; one that holds the whole context is none."""
    if window is None or window >= max_positions or not any(has_window):
        return ()
    return tuple(window if has else None for has in has_window)


def _refuse_gguf_variants(own: Mapping[str, Any], head_dim: int) -> None:
    """Refuse what a file of a supported architecture may still hold; `own` has the architecture's prefix cut off."""
    if own.get("expert_count"):
        raise ModelError(f"A mixture of {own['expert_count']} experts is not supported.", SUPPORTED)
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, head_dim) != head_dim:
            raise ModelError(f"{key} is {own[key]} where heads have {head_dim}: this is not supported.", SUPPORTED)

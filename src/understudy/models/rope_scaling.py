"""How a model declares that its rotary frequencies are stretched; `rotary.py` computes them.

llama3 and linear divide frequencies. YaRN does, too, pair by pair, and makes all scores a little sharper by one factor
on cos and sin. Its many parameters come down to four here: what is inferred from others is inferred while reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from understudy.errors import ModelError
from understudy.models.fields import AGAIN, real, shortest_real, switch, whole

ROPE_SUPPORTED = "Supported rotary embeddings are the default one, llama3, linear and yarn."


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on."""

    kind: Literal["llama3", "linear", "yarn"]
    factor: float
    original_max_positions: int = 8192
    """The context first trained on; linear does not read it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Only llama3 reads these two: turns within the first context, below and above which a pair is slow or fast."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Only yarn reads these two and `truncate`: its turns of fast and slow pairs."""
    attention_factor: float = 1.0
    """Multiplies cos and sin, and so queries and keys; only yarn declares one."""
    truncate: bool = True
    """The pairs where stretching begins and ends are whole ones."""

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"The llama3 scaling goes from {self.low_freq_factor} to {self.high_freq_factor} turns, not upwards.",
                AGAIN,
            )
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            raise ModelError(
                f"The yarn scaling has beta_slow = {self.beta_slow}, which is not below beta_fast = {self.beta_fast}.",
                AGAIN,
            )
        if self.kind == "yarn" and self.factor < 1.0:
            raise ModelError(f"The yarn scaling has factor = {self.factor}: it would shorten the context.", AGAIN)

    @property
    def num_positions(self) -> int:
        """The context that is claimed by stretching itself; only yarn's original context says so."""
        return int(self.original_max_positions * self.factor) if self.kind == "yarn" else 0

    def to_hugging_face(self) -> dict[str, Any]:
        """Give the rotary parameters that `hugging_face_rope` reads back as this."""
        rope: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind != "linear":
            rope["original_max_position_embeddings"] = self.original_max_positions
        names = {"llama3": ("low_freq_factor", "high_freq_factor"), "linear": ()}
        yarn = ("beta_fast", "beta_slow", "attention_factor", "truncate")
        return rope | {name: getattr(self, name) for name in names.get(self.kind, yarn)}


def hugging_face_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read the rotary base and its scaling: rope_parameters since transformers 5, two top-level keys before it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"The model's rotary parameters are {scaling!r}, not a table.", AGAIN)
    theta = real({"rope_theta": scaling.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelError(
            "Rotary embeddings on a part of the head (partial_rotary_factor) are not supported.", ROPE_SUPPORTED
        )
    if kind in ("default", None):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=real(scaling, "factor"))
    if kind == "yarn":
        return theta, _hugging_face_yarn(config, scaling)
    if kind != "llama3":
        raise ModelError(f"The rotary scaling {kind!r} is not supported.", ROPE_SUPPORTED)
    return theta, RopeScaling(
        kind="llama3",
        factor=real(scaling, "factor"),
        low_freq_factor=real(scaling, "low_freq_factor"),
        high_freq_factor=real(scaling, "high_freq_factor"),
        original_max_positions=whole(scaling, "original_max_position_embeddings"),
    )


_YARN_KEYS = frozenset(
    [
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ]
)


def _hugging_face_yarn(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> RopeScaling:
    _refuse_unknown(scaling.keys() - _YARN_KEYS)
    declared = whole(config, "max_position_embeddings")
    # the declaration itself goes before its table, as in transformers
    nearest = config if config.get("original_max_position_embeddings") is not None else scaling
    original = whole(nearest, "original_max_position_embeddings", declared)
    # a factor that is null, other than one that is missing, means what the two contexts say
    factor = real(scaling, "factor", declared / original if "factor" in scaling else None)
    inferred = _sharpening(factor)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        inferred = _sharpening(factor, real(scaling, "mscale")) / _sharpening(factor, real(scaling, "mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=real(scaling, "beta_fast", 32.0),
        beta_slow=real(scaling, "beta_slow", 1.0),
        attention_factor=real(scaling, "attention_factor", inferred),
        truncate=switch(scaling, "truncate", default=True),
    )


def _sharpening(factor: float, weight: float = 1.0) -> float:
    """The paper's factor on queries and keys for a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _refuse_unknown(keys: set[str]) -> None:
    if keys:
        raise ModelError(f"The yarn scaling has {', '.join(sorted(keys))}: this is not supported.", ROPE_SUPPORTED)


_GGUF_YARN_KEYS = frozenset(
    f"rope.scaling.{name}"
    for name in [
        "type",
        "factor",
        "original_context_length",
        "finetuned",
        "attn_factor",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    ]
)


def gguf_rope_scaling(own: Mapping[str, Any]) -> RopeScaling | None:
    """Read the scaling of a GGUF file, linear under its former name too; `own` has the architecture's prefix cut."""
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    if kind == "none":
        return None
    if kind == "yarn":
        return _gguf_yarn(own)
    if kind != "linear":
        raise ModelError(f"The rotary scaling {kind!r} is not supported.", ROPE_SUPPORTED)
    factor = real(own, "rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None


def _gguf_yarn(own: Mapping[str, Any]) -> RopeScaling:
    """Read YaRN: a file keeps what multiplies the paper's factor on cos and sin, not that factor itself."""
    keys = {key for key in own if key.startswith("rope.scaling.")}
    _refuse_unknown(keys - _GGUF_YARN_KEYS)
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if own.get(key, 1.0) != 1.0:
            raise ModelError(f"{key} is {own[key]}: other than 1 is not supported.", ROPE_SUPPORTED)
    factor = shortest_real(real(own, "rope.scaling.factor"))
    extra = shortest_real(real(own, "rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=whole(own, "rope.scaling.original_context_length", own.get("context_length")),
        beta_fast=shortest_real(real(own, "rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest_real(real(own, "rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=extra * _sharpening(factor),
    )

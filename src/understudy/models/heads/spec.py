"""What a trained draft is: its kind, the target that it was trained for, the layers it reads, its sizes.

A draft is of use with one target only, so the target's whole shape is part of it: attention and rotary positions are
the target's, and its embedding and output layer are used, not copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.fields import whole

HeadKind = Literal["medusa", "eagle", "block"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
NUM_FEATURES: Mapping[HeadKind, range] = {"medusa": range(1), "eagle": range(3, 4), "block": range(1, 17)}
"""How many layers' features a kind may read. Medusa reads the state after the final norm and none besides."""
MOST_TOKENS = 64
_DAMAGED = "The draft is damaged or was made by another version: train it again."
_NO_MEANING = frozenset(("bos_id", "eos_ids", "max_positions"))
"""Of the target's configuration: what a draft for it does not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Everything about a trained draft that is not a weight."""

    kind: HeadKind
    target: ModelConfig
    target_name: str
    target_hash: str
    """The target's `source_hash`."""
    feature_layers: tuple[int, ...] = ()
    """Whose features it reads: n is the residual stream after the target's first n layers, before any norm."""
    num_tokens: int
    """Tokens that it guesses: heads of medusa, rows of a block; of eagle the steps that it was trained to unroll."""
    num_layers: int = 1
    """Draft layers of a block, residual blocks of each medusa head; eagle has one layer."""
    intermediate_size: int = 1
    """Of the gated feed-forward; medusa has none."""
    markov_rank: int = 1
    """Of a block's bias by the token before; the other kinds have none."""
    num_draft_ids: int
    """How many of the target's ids it can guess."""

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise ModelError(f"There is no draft of kind {self.kind!r}.", f"Known are {', '.join(HEAD_KINDS)}.")
        layers = self.feature_layers
        wrong = [layer for layer in layers if not 1 <= layer <= self.target.num_layers]
        if wrong or len(layers) not in NUM_FEATURES[self.kind] or list(layers) != sorted(set(layers)):
            raise ModelError(
                f"A draft of kind {self.kind} cannot read the features of layers {list(layers)} "
                f"of a target with {self.target.num_layers}.",
                "Layers are numbered by how many were computed: 1 is after the first. Name each once, in order.",
            )
        if self.kind == "eagle" and self.num_layers != 1:
            raise ModelError(f"A draft of kind eagle has one layer, not {self.num_layers}.", _DAMAGED)
        for name, most in (("num_tokens", MOST_TOKENS), ("num_draft_ids", self.target.vocab_size)):
            if not 1 <= getattr(self, name) <= most:
                raise ModelError(f"{name} is {getattr(self, name)}.", f"It must be from 1 to {most:,}.")

    def check_target(self, config: ModelConfig, source_hash: str | None = None) -> None:
        """Refuse a target that this draft was not trained for; without its hash, by its shape alone."""
        for field in fields(ModelConfig):
            own, other = getattr(self.target, field.name), getattr(config, field.name)
            if field.name not in _NO_MEANING and own != other:
                raise ModelError(
                    f"The draft was trained for {self.target_name}, whose {field.name} is {own}; "
                    f"this model's is {other}.",
                    "Use it with that model, or train one for this.",
                )
        if source_hash is not None and source_hash != self.target_hash:
            raise ModelError(
                f"The draft was trained for {self.target_name} ({self.target_hash}); this model has the same shape and "
                f"other weights ({source_hash}).",
                "Use it with that model, or train one for this.",
            )

    def describe(self) -> dict[str, Any]:
        """Put it into plain values, for `from_description`."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if not field.name.startswith("target")}
        target = {"name": self.target_name, "hash": self.target_hash, "config": self.target.to_hugging_face()}
        return {**own, "feature_layers": list(self.feature_layers), "target": target}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> HeadSpec:
        """Read what `describe` wrote; whatever is missing or strange is refused by its name."""
        target = described.get("target")
        if not isinstance(target, Mapping) or not isinstance(target.get("config"), Mapping):
            raise ModelError("The draft does not say which target it is for.", _DAMAGED)
        for name, value in (("kind", described.get("kind")), *((key, target.get(key)) for key in ("name", "hash"))):
            if not isinstance(value, str):
                raise ModelError(f"The draft's {name} is {value!r}.", _DAMAGED)
        layers = described.get("feature_layers")
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise ModelError(f"The draft's feature_layers is {layers!r}.", _DAMAGED)
        sizes = ("num_tokens", "num_layers", "intermediate_size", "markov_rank", "num_draft_ids")
        return cls(
            kind=described["kind"],
            target=ModelConfig.from_hugging_face(target["config"], None),
            target_name=target["name"],
            target_hash=target["hash"],
            feature_layers=tuple(layers),
            **{name: whole(described, name) for name in sizes},
        )


def default_spec(
    kind: HeadKind,
    target: ModelConfig,
    *,
    target_name: str,
    target_hash: str,
    num_draft_ids: int,
    num_layers: int | None = None,
) -> HeadSpec:
    """Give the sizes that suit a target, for a draft of a kind; a block may have another number of layers."""
    base = HeadSpec(
        kind="medusa",
        target=target,
        target_name=target_name,
        target_hash=target_hash,
        num_tokens=4,
        num_draft_ids=num_draft_ids,
    )
    if kind == "medusa":
        return base
    if kind == "eagle":
        return replace(
            base,
            kind="eagle",
            feature_layers=spread_layers(target.num_layers, 3),
            num_tokens=5,
            intermediate_size=target.intermediate_size,
        )
    return replace(
        base,
        kind="block",
        feature_layers=spread_layers(target.num_layers, min(5, target.num_layers)),
        num_tokens=7,
        num_layers=num_layers or 2,
        intermediate_size=target.intermediate_size,
        markov_rank=64,
    )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Choose layers from near the first to near the last: of 30 layers, 3 are 2, 15 and 28."""
    if count > num_layers:
        raise ModelError(
            f"This draft reads the features of {count} layers, and the target has {num_layers}.",
            "Train a draft of kind medusa for it.",
        )
    has_room = num_layers - 4 >= count - 1
    first, last = (2, num_layers - 2) if has_room else (1, num_layers)
    return tuple(round(first + (last - first) * place / max(count - 1, 1)) for place in range(count))

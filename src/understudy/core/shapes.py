"""Shapes that a small model can be widened to, under the names that sizes go by (models/widen.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from understudy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the price of a pass depends on, but for the vocabulary: that stays the small model's."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert self.head_dim % 2 == 0


def _shape(name: str, hidden: int, inner: int, *, layers: int, heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(
        name=name,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        _shape("1b", 2048, 8192, layers=16, heads=32, kv_heads=8, head_dim=64),
        _shape("3b", 3072, 8192, layers=32, heads=24, kv_heads=8, head_dim=128),
        _shape("8b", 4096, 14336, layers=32, heads=32, kv_heads=8, head_dim=128),
        _shape("32b", 5120, 27648, layers=64, heads=40, kv_heads=8, head_dim=128),
    )
}


def shape_named(name: str) -> Shape:
    """Look a shape up."""
    if name not in SHAPES:
        raise ConfigError(f"There is no shape named {name!r}.", f"Choose from {', '.join(SHAPES)}.")
    return SHAPES[name]

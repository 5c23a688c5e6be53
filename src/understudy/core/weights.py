"""How a model's weights are held in memory, and how it is computed with them."""

from __future__ import annotations

from typing import Literal, get_args

WeightType = Literal["fp32", "int8"]
"""int8 is the linear layers of the body in bytes; embedding, norms and output layer stay fp32."""

WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)

DEFAULT_WEIGHTS: WeightType = "int8"
"""The type with the most tokens per second, speculation included: see docs/DECISIONS.md, 19."""

NUMERICS = "exact"
"""Rows are computed alike whatever stands beside them; see kernels/."""

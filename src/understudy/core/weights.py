"""Where a model is computed, how its weights are held there, and how it is computed with them."""

from __future__ import annotations

from typing import Literal, get_args

Device = Literal["cpu", "cuda"]

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""`auto` is a GPU that can be used, or else the CPU."""

DEVICE_CHOICES: tuple[DeviceChoice, ...] = get_args(DeviceChoice)

WeightType = Literal["fp32", "int8", "bf16", "fp16"]
"""On the CPU fp32, or int8: the linear layers of the body in bytes; embedding, norms and output layer stay fp32. On a
GPU bf16 or fp16, with norms in fp32."""

WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)

WEIGHTS_ON: dict[Device, tuple[WeightType, ...]] = {"cpu": ("int8", "fp32"), "cuda": ("bf16", "fp16")}
"""What can be computed with, the default first: the type with the most tokens per second, speculation included. See
docs/DECISIONS.md, 19."""

NUMERICS = "exact"
"""Rows are computed alike whatever stands beside them; see kernels/."""

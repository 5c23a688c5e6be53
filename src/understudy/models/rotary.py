"""Rotary angles: one table of cosines and sines per model, looked up by position.

The tables are computed in float64 and rounded once, so that a row's angle is a function of its position alone: no
kernel, row count or device can compute it in another way.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from understudy.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float64]:
    """Give the radians per position of each pair of a head, [head_dim / 2], scaling applied."""
    # [head_dim / 2], from 1 down to about 1 / rope_theta
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return plain / llama3_divisors(plain, scaling)


def llama3_divisors(plain: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Give what each plain frequency is divided by, [head_dim / 2]: 1 for fast pairs, `factor` for slow ones.

    GGUF files hold these very numbers as `rope_freqs.weight`.
    """
    # turns of each pair within the context first trained on; from low to high the scaling fades out
    turns = scaling.original_max_positions * plain / (2.0 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / scaling.factor)


def rotary_tables(config: ModelConfig, num_positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Tabulate cos and sin for positions 0 to num_positions - 1; both are [num_positions, head_dim / 2]."""
    angles = np.outer(np.arange(num_positions, dtype=np.float64), inverse_frequencies(config))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

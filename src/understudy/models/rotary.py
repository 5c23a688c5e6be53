"""Rotary angles: one table of cosines and sines per model, looked up by position.

The tables are computed in float64 and rounded once, so that a row's angle is a function of its position alone: no
kernel, row count or device can compute it in another way.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from understudy.models.config import ModelConfig
from understudy.models.rope_scaling import RopeScaling


def inverse_frequencies(config: ModelConfig) -> npt.NDArray[np.float64]:
    """Give the radians per position of each pair of a head, [head_dim / 2], scaling applied."""
    # [head_dim / 2], from 1 down to about 1 / rope_theta
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        return _yarn_frequencies(config, plain, scaling)
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


def _yarn_frequencies(
    config: ModelConfig, plain: npt.NDArray[np.float64], scaling: RopeScaling
) -> npt.NDArray[np.float64]:
    """Keep the frequencies of fast pairs and divide those of slow ones by `factor`; between, a ramp over the pairs."""
    low, high = (_pair_with_turns(config, scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001
    slow: npt.NDArray[np.float64] = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)  # [head_dim / 2]
    return plain / scaling.factor * slow + plain * (1.0 - slow)


def _pair_with_turns(config: ModelConfig, scaling: RopeScaling, turns: float) -> float:
    """The place, between pairs, of the frequency that makes this many turns within the context first trained on."""
    ratio = scaling.original_max_positions / (turns * 2.0 * math.pi)
    return config.head_dim * math.log(ratio) / (2.0 * math.log(config.rope_theta))


def rotary_tables(config: ModelConfig, num_positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Tabulate cos and sin for positions 0 to num_positions - 1; both are [num_positions, head_dim / 2].

    yarn's factor on queries and keys is in them: both are turned by these, and nothing else is.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float64), inverse_frequencies(config))
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)

"""The CPU's arithmetic behind the names that a decoder calls."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WeightType
from understudy.errors import CapacityError
from understudy.kernels import cpu_attention, cpu_ops
from understudy.kernels.cpu_int8 import Int8Linear
from understudy.kernels.cpu_linear import ROWS, Linear
from understudy.kernels.rows import Ints, Rows
from understudy.kernels.simd import LANES

Floats = NDArray[np.float32]
PackedLinear = Linear | Int8Linear


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of every layer. Keys lie transposed inside a page: see cpu_attention."""

    keys: Floats
    """[layers, blocks, kv_heads, dim, PAGE]"""
    values: Floats
    """[layers, blocks, kv_heads, PAGE, dim]"""

    @property
    def num_bytes(self) -> int:
        """Memory that the cache may come to hold."""
        return self.keys.nbytes + self.values.nbytes

    def move(self, sources: Ints, targets: Ints) -> None:
        """Copy slots to other slots, in order, in every layer."""
        if sources.size:
            cpu_attention.copy_slots(self.keys, self.values, sources, targets)


class CpuKernels:
    """Row-invariant kernels for the CPU: fp32 throughout, but for weights that were packed as int8."""

    page_tokens = cpu_attention.PAGE
    feature_multiple = LANES
    head_dim_multiple = LANES

    def __init__(self, *, num_threads: int | None = None) -> None:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self._num_threads = min(num_threads or torch.get_num_threads(), most)
        self.begin()

    def begin(self) -> None:
        """Start a pass: numba counts threads per calling thread."""
        numba.set_num_threads(self._num_threads)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, weights: WeightType = "fp32") -> PackedLinear:
        """Pack a weight [outputs, inputs]."""
        return Int8Linear.pack(weight, bias) if weights == "int8" else Linear.pack(weight, bias)

    def padded_rows(self, num_rows: int) -> int:
        """How many rows to compute when this many are wanted; the rest is padding and changes no bit."""
        return num_rows if num_rows == 1 else -(-num_rows // ROWS) * ROWS

    def cache(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, dim: int) -> Cache:
        """Make room for keys and values; memory is taken when a page is first written."""
        keys = _lazy_zeros((num_layers, num_blocks, num_kv_heads, dim, self.page_tokens))
        values = _lazy_zeros((num_layers, num_blocks, num_kv_heads, self.page_tokens, dim))
        return Cache(keys, values)

    def add_rms_norm(self, x: Floats, delta: Floats, weight: Floats, eps: float, out: Floats) -> None:
        """x += delta; out = rms_norm(x) * weight. All [rows, features]."""
        cpu_ops.add_rms_norm(x, delta, weight, np.float32(eps), out)

    def gated(self, gate_up: Floats, out: Floats) -> None:
        """out = silu(gate) * up; gate_up [rows, 2 * features]."""
        cpu_ops.gated(gate_up, out)

    def norm_heads(self, qkv: Floats, weights: Floats, eps: float) -> None:
        """Norm the first heads of each row in place; weights [heads to norm, dim]."""
        cpu_attention.norm_heads(qkv, weights, np.float32(eps))

    def attention(
        self, qkv: Floats, rows: Rows, cos: Floats, sin: Floats, cache: Cache, layer: int, queries: Floats, out: Floats,
        *, window: int | None = None,
    ) -> None:  # fmt: skip
        """Write the rows' keys and values, then let each row attend, to the last `window` positions if there is one.

        queries and out [rows, heads, dim].
        """
        keys, values = cache.keys[layer], cache.values[layer]
        cpu_attention.rotate_and_store(qkv, cos, sin, rows.positions, rows.slots, keys, values, queries)
        cpu_attention.attend(
            queries, keys, values, rows.tables, rows.group_starts, rows.group_tables,
            rows.prefix_lens, rows.tail_starts, rows.tail_slots, self._num_threads,
            cpu_attention.NO_WINDOW if window is None else window, out,
        )  # fmt: skip


def _lazy_zeros(shape: tuple[int, ...]) -> Floats:
    """Zeros whose memory the system hands out page by page when they are written."""
    size = 4 * math.prod(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            f"{size / 2**30:.1f} GiB for keys and values cannot be had: {error.strerror}.",
            "Lower max_context or kv_tokens.",
        ) from None
    return np.frombuffer(memory, np.float32).reshape(shape)

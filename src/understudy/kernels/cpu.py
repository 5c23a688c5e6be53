"""The CPU's arithmetic behind the names that a decoder calls."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WeightType
from understudy.errors import CapacityError
from understudy.kernels import cpu_attention, cpu_layer, cpu_ops
from understudy.kernels.cpu_int8 import Int8Linear
from understudy.kernels.cpu_linear import ROWS, Linear
from understudy.kernels.host_passes import HostPasses
from understudy.kernels.interface import BodyShape, Compute, FeatureBuffer, LayerWeights
from understudy.kernels.memory import Shelf, large_zeros
from understudy.kernels.rows import Ints, Rows
from understudy.kernels.simd import LANES

Floats = NDArray[np.float32]
PackedLinear = Linear | Int8Linear

_NO_NORMS = np.empty((0, 0), np.float32)
"""Of heads that are not normed."""


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
    tails_alone = False
    rows_per_step = 256
    sizes_apart: tuple[int, ...] = ()
    number_bytes = 4
    output_weights: WeightType = "fp32"

    def __init__(self, *, num_threads: int | None = None) -> None:
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self.num_threads = min(num_threads or torch.get_num_threads(), most)
        self._shelf = Shelf()

    def take_threads(self, count: int) -> None:
        """Compute with so many threads from here on: numba counts them per calling thread."""
        numba.set_num_threads(count)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, weights: WeightType = "fp32") -> PackedLinear:
        """Pack a weight [outputs, inputs]."""
        kind: type[PackedLinear] = Int8Linear if weights == "int8" else Linear
        return kind.pack(weight, bias, zeros=self._shelf.zeros)

    def gated_linear(self, gate: Tensor, up: Tensor, *, weights: WeightType = "fp32") -> PackedLinear:
        """Pack gate and up [features, inputs], stacked, so that one pass reads both."""
        return self.linear(torch.cat([gate, up]), weights=weights)

    def table(self, weight: Tensor) -> Floats:
        """An embedding [vocabulary, hidden]."""
        return self.numbers(weight)

    def numbers(self, values: Tensor) -> Floats:
        """Numbers in fp32."""
        numbers: Floats = values.float().contiguous().numpy()
        return numbers

    def padded_rows(self, num_rows: int) -> int:
        """How many rows to compute when this many are wanted; the rest is padding and changes no bit."""
        return num_rows if num_rows == 1 else -(-num_rows // ROWS) * ROWS

    def cache(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, dim: int) -> Cache:
        """Make room for keys and values; memory is taken when a page is first written."""
        each = num_layers, num_blocks, num_kv_heads
        try:
            return Cache(large_zeros((*each, dim, self.page_tokens)), large_zeros((*each, self.page_tokens, dim)))
        except OSError as error:
            size = 2 * self.number_bytes * math.prod(each) * self.page_tokens * dim
            raise CapacityError(
                f"{size / 2**30:.1f} GiB for keys and values cannot be had: {error.strerror}.",
                "Lower max_context or kv_tokens.",
            ) from None

    def place(self, rows: Rows) -> Rows:
        """The rows: they are where the CPU reads them."""
        return rows

    def start(self, rows: Rows, cache: Cache, shape: BodyShape) -> CpuPass:
        """Begin a pass."""
        self.take_threads(self.num_threads)
        padded = self.padded_rows(len(rows.token_ids))
        return CpuPass(rows, cache, shape, num_padded=padded, num_threads=self.num_threads)

    def logits(self, head: PackedLinear, hidden: Floats, wanted: NDArray[np.int64]) -> Floats:
        """The logits [N, vocabulary] of the rows of hidden [rows, features] that are wanted."""
        chosen = np.zeros((self.padded_rows(len(wanted)), hidden.shape[1]), np.float32)
        chosen[: len(wanted)] = hidden[wanted]
        return head(chosen)[: len(wanted)]

    def passes(self, compute: Compute, cache: Cache, *, vocab_size: int) -> HostPasses:
        """What runs passes: at once."""
        return HostPasses(compute)

    def to_host(self, logits: Floats) -> Floats:
        """The logits: they are there."""
        return logits


class CpuPass:
    """One pass of rows through the layers, in buffers that all layers share."""

    def __init__(self, rows: Rows, cache: Cache, shape: BodyShape, *, num_padded: int, num_threads: int) -> None:
        """Rows beyond those given, up to `num_padded`, are padding: computed and never read."""
        self._rows = rows
        self._places = rows[1:-1]  # as `cpu_layer` takes them
        self._cache = cache
        self._num_threads = num_threads
        self._eps = np.float32(shape.rms_norm_eps)
        num_heads, dim = shape.num_heads, shape.head_dim
        self._x = np.zeros((num_padded, shape.hidden_size), np.float32)
        self._normed = np.empty_like(self._x)
        self._buffers = (
            np.empty((num_padded, (num_heads + 2 * cache.keys.shape[2]) * dim), np.float32),
            np.empty((len(rows.token_ids), num_heads, dim), np.float32),
            np.zeros((num_padded, num_heads * dim), np.float32),
            np.empty_like(self._x),
            np.empty((num_padded, -(-2 * shape.intermediate_size // LANES) * LANES), np.float32),
            np.empty((num_padded, shape.intermediate_size), np.float32),
        )

    @property
    def stream(self) -> Floats:
        """The residual stream [rows or more, hidden]."""
        return self._x

    def embed(self, table: Floats) -> None:
        """Begin the residual stream with the rows' lines of a table."""
        self._x[: len(self._rows.token_ids)] = table[self._rows.token_ids]

    def layer(
        self, weights: LayerWeights, index: int, turns: tuple[Floats, Floats], shown: FeatureBuffer | None = None
    ) -> None:
        """Attention and feed-forward."""
        if shown is not None:
            shown.take(index, self._x)
        self.behind_norm(self.norm(weights.attention_norm), weights, index, turns)

    def behind_norm(self, inputs: Floats, weights: LayerWeights, index: int, turns: tuple[Floats, Floats]) -> None:
        """A layer whose first norm made `inputs`, for drafts that make them otherwise."""
        head_norms = _NO_NORMS if weights.head_norms is None else weights.head_norms
        cpu_layer.behind_norm(
            self._x, inputs, (weights.feed_forward_norm, head_norms), weights.packed, turns, self._places,
            (self._cache.keys, self._cache.values), index,
            cpu_attention.NO_WINDOW if weights.window is None else weights.window,
            self._num_threads, self._eps, self._buffers,
        )  # fmt: skip

    def norm(self, weight: Floats) -> Floats:
        """rms_norm(x) * weight, [rows, features]."""
        cpu_ops.rms_norm(self._x, weight, self._eps, self._normed)
        return self._normed

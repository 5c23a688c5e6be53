"""A GPU's arithmetic behind the names that a decoder calls: bf16 or fp16 weights, activations and cache, fp32 sums.

The residual stream, the norms, every sum and the logits are fp32. Needs Triton, which the CPU's path never loads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WeightType
from understudy.errors import CapacityError, ModelError
from understudy.kernels import cuda_attention, cuda_ops
from understudy.kernels.cuda_graphs import Captured, Home, Places
from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kernels.cuda_passes import Compute, CudaPasses
from understudy.kernels.cuda_rows import PAGE, PlacedRows, place_rows
from understudy.kernels.interface import BodyShape, FeatureBuffer, LayerWeights
from understudy.kernels.rows import Ints, Rows

Floats = NDArray[np.float32]

GRAPHS_OFF = "UNDERSTUDY_NO_GRAPHS"
"""Set to 1, every kernel is launched by itself: slower, the same bits, for finding faults."""

_MOST_MOVES = 256
"""Slots that one launch copies"""


class _Moves(Captured):
    """Copies slots of a cache to others, some at a time."""

    def __init__(self, keys: Tensor, values: Tensor, home: Home) -> None:
        super().__init__({"moves": (2, _MOST_MOVES), "count": (1,)}, home, num_places=0)
        self._keys = keys
        self._values = values

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy in order; nobody waits for it."""
        letter, count = self.letters[self.next_turn()], len(sources)
        letter["moves"][0, :count] = sources
        letter["moves"][1, :count] = targets
        letter["count"][0] = count
        self.launch()

    def compute(self) -> None:
        """Copy what the letter says."""
        cuda_ops.copy_slots(self._keys, self._values, self.views["moves"], self.views["count"])


@dataclass(frozen=True, slots=True)
class CudaCache:
    """Keys and values of every layer, [layers, blocks + 1, kv_heads, PAGE, dim] each.

    The last block belongs to no text: rows that are only padding write there.
    """

    keys: Tensor
    values: Tensor
    moves: _Moves

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def scratch_slot(self) -> int:
        """A slot that no text owns."""
        return (self.keys.shape[1] - 1) * PAGE

    def move(self, sources: Ints, targets: Ints) -> None:
        """Copy slots to other slots, in order, in every layer."""
        for first in range(0, sources.size, _MOST_MOVES):
            last = first + _MOST_MOVES
            self.moves.copy(sources[first:last], targets[first:last])


class CudaKernels:
    """Row-invariant kernels for one GPU and one stream of launches. On the CPU they run in Triton's interpreter."""

    page_tokens = PAGE
    feature_multiple = 16
    head_dim_multiple = 16
    tails_alone = True
    rows_per_step = 512
    number_bytes = 2

    def __init__(self, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        assert dtype in (torch.bfloat16, torch.float16)
        self.device = torch.device(device)
        self.sizes_apart: tuple[int, ...] = (128, 256, 512) if self.device.type == "cuda" else ()
        self.use_graphs = self.device.type == "cuda" and os.environ.get(GRAPHS_OFF) != "1"
        self.dtype = dtype
        self.output_weights: WeightType = "bf16" if dtype == torch.bfloat16 else "fp16"
        self.counters = cuda_attention.new_counters(self.device)
        self.places = Places(self.device)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, weights: WeightType = "bf16") -> Linear:
        """Pack a weight [outputs, inputs]."""
        self._check(weights)
        return Linear.pack(weight, bias, device=self.device, dtype=self.dtype)

    def gated_linear(self, gate: Tensor, up: Tensor, *, weights: WeightType = "bf16") -> GatedLinear:
        """Pack gate and up [features, inputs]."""
        self._check(weights)
        return GatedLinear.pack(gate, up, device=self.device, dtype=self.dtype)

    def _check(self, weights: WeightType) -> None:
        assert weights == self.output_weights, f"these kernels compute with {self.output_weights}"

    def table(self, weight: Tensor) -> Tensor:
        """An embedding [vocabulary, hidden]."""
        return weight.to(self.device, self.dtype).contiguous()

    def numbers(self, values: Tensor) -> Tensor:
        """Numbers in fp32."""
        return values.to(self.device, torch.float32).contiguous()

    def cache(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, dim: int) -> CudaCache:
        """Make room for keys and values."""
        if dim & (dim - 1):
            raise ModelError(f"head_dim is {dim}, which is not a power of two.", "Run this model on the CPU.")
        shape = (num_layers, num_blocks + 1, num_kv_heads, PAGE, dim)
        try:
            keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
            pool = torch.cuda.graph_pool_handle() if self.use_graphs else None
            home = Home(self.device, self.places, self.places.numbers[0], pool)
            return CudaCache(keys, values, _Moves(keys, values, home))
        except torch.OutOfMemoryError:
            wanted = 2 * self.dtype.itemsize * np.prod(shape, dtype=np.int64)
            free = torch.cuda.mem_get_info(self.device)[0]
            raise CapacityError(
                f"{wanted / 2**30:.1f} GiB for keys and values cannot be had: {free / 2**30:.1f} GiB are free.",
                "Lower max_context or kv_tokens.",
            ) from None

    def place(self, rows: Rows) -> PlacedRows:
        """Move rows to the device by one copy."""
        return place_rows(rows, self.device)

    def start(self, rows: PlacedRows, cache: CudaCache, shape: BodyShape) -> CudaPass:
        """Begin a pass."""
        return CudaPass(rows, cache, shape, dtype=self.dtype, counters=self.counters)

    def logits(self, head: Linear, hidden: Tensor, wanted: Tensor) -> Tensor:
        """The logits [N, vocabulary] in fp32 of the rows of hidden [rows, features] that are wanted."""
        if not wanted.shape[0]:
            return torch.empty((0, head.num_outputs), dtype=torch.float32, device=hidden.device)
        parts = head(cuda_ops.take_rows(hidden, wanted, dtype=self.dtype))
        assert parts.shape[0] == 1, "an output layer has so many outputs that its inputs are not split"
        return parts[0]

    def passes(self, compute: Compute, cache: CudaCache, *, vocab_size: int) -> CudaPasses:
        """What runs a decoder's passes over a cache."""
        return CudaPasses(
            compute,
            places=self.places,
            device=self.device,
            scratch_slot=cache.scratch_slot,
            vocab_size=vocab_size,
            use_graphs=self.use_graphs,
        )

    def to_host(self, logits: Tensor) -> Floats:
        """Logits as numpy's; waits for the GPU."""
        on_host: Floats = logits.cpu().numpy()
        return on_host


class CudaPass:
    """One pass of rows through the layers. Nothing here waits for the GPU, so a graph can hold all of it."""

    def __init__(
        self, rows: PlacedRows, cache: CudaCache, shape: BodyShape, *, dtype: torch.dtype, counters: Tensor
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._shape = shape
        self._dtype = dtype
        self._counters = counters
        self._x: Tensor
        self._delta: Tensor | None = None
        """[parts, rows, features]"""

    @property
    def stream(self) -> Tensor:
        """The residual stream [rows, hidden]."""
        return self._x

    def embed(self, table: Tensor) -> None:
        """Begin the residual stream with the rows' lines of a table."""
        self._x = cuda_ops.take_rows(table, self._rows.token_ids, dtype=torch.float32, words=self._rows.words)

    def norm(self, weight: Tensor) -> Tensor:
        """x += delta; returns rms_norm(x) * weight, [rows, features]."""
        return cuda_ops.add_rms_norm(self._x, self._delta, weight, self._shape.rms_norm_eps, dtype=self._dtype)

    def layer(
        self, weights: LayerWeights, index: int, turns: tuple[Tensor, Tensor], shown: FeatureBuffer | None = None
    ) -> None:
        """Attention and feed-forward, what each linear layer returns being added by the norm behind it."""
        normed = self.norm(weights.attention_norm)  # what the layer before has to add is in the stream from here on
        if shown is not None and index in shown.layers:
            shown.take(index, self._x)
        self._delta = weights.attention_out(self._attend(weights.qkv(normed), weights, index, turns))
        self._delta = weights.down(weights.gate_up(self.norm(weights.feed_forward_norm)))

    def _attend(self, qkv: Tensor, weights: LayerWeights, index: int, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Write the rows' keys and values, then let each row attend; qkv [parts, rows, all heads * dim]."""
        keys, values = self._cache.keys[index], self._cache.values[index]
        queries = cuda_ops.rotate_and_store(
            qkv, self._rows, *turns, keys, values,
            num_heads=self._shape.num_heads, head_norms=weights.head_norms, eps=self._shape.rms_norm_eps,
        )  # fmt: skip
        attended = cuda_attention.attend(
            queries, keys, values, self._rows, counters=self._counters, window=weights.window
        )
        return attended.flatten(1)

"""What trained drafts on a GPU are built from: the target's kernels, and the parts of models/heads packed for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from understudy.kernels import cuda_attention, cuda_ops
from understudy.kernels.cuda import CudaCache, CudaKernels
from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kernels.cuda_rows import PlacedRows
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.fusion import Fusion
from understudy.models.heads.layers import Attention, GatedFeedForward


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The weights of one decoder layer of a draft; q, k and v are stacked, and so are gate and up."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    feed_forward_norm: Tensor
    gate_up: GatedLinear
    down: Linear

    def feed_forward(self, x: Tensor) -> Tensor:
        """X [rows, hidden] -> [parts, rows, hidden]."""
        return self.down(self.gate_up(x))

    @property
    def num_bytes(self) -> int:
        """Memory of its matrices."""
        return sum(part.num_bytes for part in (self.qkv, self.out, self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class FusionOnDevice:
    """Features of several layers made into one state; the weights of their norms are in the matrix's columns."""

    linear: Linear
    ones: Tensor
    parts: HeadParts

    def __call__(self, features: Tensor) -> Tensor:
        """Features [rows, layers, hidden], fp32 -> [parts, rows, hidden]."""
        num_rows, num_layers, num_features = features.shape
        normed = self.parts.normed(features.view(-1, num_features), None, self.ones)
        return self.linear(normed.view(num_rows, num_layers * num_features))


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Packs the parts of a draft for its target's kernels, and computes with them."""

    kernels: CudaKernels
    target: ModelConfig

    def new_cache(self, num_blocks: int, *, num_layers: int) -> CudaCache:
        """Make room for keys and values of a draft's layers."""
        target = self.target
        return self.kernels.cache(
            num_layers=num_layers, num_blocks=num_blocks, num_kv_heads=target.num_kv_heads, dim=target.head_dim
        )

    def packed(self, weight: Tensor) -> Linear:
        """A matrix [outputs, inputs]."""
        return self.kernels.linear(weight.detach(), weights=self.kernels.output_weights)

    def layer(self, attention: Attention, feed_forward: GatedFeedForward, norms: tuple[Tensor, Tensor]) -> HeadLayer:
        """A decoder layer; `norms` are those before its attention and its feed-forward."""
        gate, up = feed_forward.gate.weight.detach(), feed_forward.up.weight.detach()
        return HeadLayer(
            attention_norm=self.kernels.numbers(norms[0]),
            qkv=self.packed(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])),
            out=self.packed(attention.o.weight),
            feed_forward_norm=self.kernels.numbers(norms[1]),
            gate_up=self.kernels.gated_linear(gate, up, weights=self.kernels.output_weights),
            down=self.packed(feed_forward.down.weight),
        )

    def fusion(self, fusion: Fusion) -> FusionOnDevice:
        """The fusing of features."""
        weights = torch.cat([cast(Tensor, norm.weight) for norm in fusion.norms])
        ones = self.kernels.numbers(torch.ones(self.target.hidden_size))
        return FusionOnDevice(self.packed(fusion.linear.weight.float() * weights.float()), ones, self)

    def output(self, decoder: Decoder, vocabulary: DraftVocabulary) -> Linear:
        """The target's output layer, cut to the ids that a draft can guess."""
        output = cast(Linear, decoder.output)
        return self.packed(output.weight[vocabulary.ids.to(self.kernels.device), : output.num_inputs])

    def normed(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """x += delta, the parts of a linear layer; returns the norm of x."""
        return cuda_ops.add_rms_norm(x, delta, weight, self.target.rms_norm_eps, dtype=self.kernels.dtype)

    def store(
        self, layer: HeadLayer, x: Tensor, rows: PlacedRows, cache: CudaCache, index: int, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Write keys and values of x [rows, inputs] to their slots; returns the queries [rows, heads, dim]."""
        keys, values = cache.keys[index], cache.values[index]
        return cuda_ops.rotate_and_store(
            layer.qkv(x), rows, *rotary, keys, values,
            num_heads=self.target.num_heads, head_norms=None, eps=self.target.rms_norm_eps,
        )  # fmt: skip

    def attend(self, queries: Tensor, rows: PlacedRows, cache: CudaCache, index: int) -> Tensor:
        """What rows [rows, heads, dim] see: [rows, heads * dim]."""
        keys, values = cache.keys[index], cache.values[index]
        attended = cuda_attention.attend(queries, keys, values, rows, counters=self.kernels.counters)
        return attended.flatten(1)


def summed(parts: Tensor) -> Tensor:
    """What a linear layer left in parts [parts, rows, outputs], added up."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)

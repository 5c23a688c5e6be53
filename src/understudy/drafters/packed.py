"""The parts of trained drafts as the CPU computes them: the same networks as in models/heads, in compiled kernels.

A guess of a small draft takes less than a millisecond, of which torch would spend half on being called. So the linear
layers are packed, in 8 bits unless asked otherwise, and what lies between them are the kernels of the target.
models/heads stays the definition: tests hold this against it, number by number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WeightType
from understudy.drafters.pages import Pages
from understudy.drafters.tree import LEAST_WEIGHT, Child, Growth, Guesses, children
from understudy.kernels import cpu_attention, cpu_drafts
from understudy.kernels.cpu import CpuKernels, CpuPass, PackedLinear
from understudy.kernels.interface import BodyShape, LayerWeights
from understudy.kernels.rows import Rows
from understudy.kernels.simd import LANES
from understudy.models.decoder import Decoder
from understudy.models.heads.files import TrainedHead
from understudy.models.heads.fusion import Fusion
from understudy.models.heads.layers import Attention, GatedFeedForward, RmsNorm

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Ints64 = NDArray[np.int64]

_NO_NORM = np.empty(0, np.float32)
FEW_ROWS = 8
"""What one text asks for at once, about."""


class Body:
    """What all kinds of drafts share: kernels, and what is borrowed from the target."""

    def __init__(self, trained: TrainedHead, decoder: Decoder, kernels: CpuKernels, *, weights: WeightType) -> None:
        config, spec = decoder.config, trained.spec
        self.config = config
        self.kernels = kernels
        self.weights: WeightType = weights
        self.embedding: Floats = decoder.embedding
        """[vocabulary, hidden]"""
        self.ids: Ints64 = trained.vocabulary.ids.numpy()
        """[draft ids] place -> the target's id"""
        self.places: Ints64 = trained.vocabulary.places.numpy()
        """[vocabulary] the target's id -> place, or -1"""
        self.is_few_alone = False
        """Whether one thread computes few rows by itself."""
        self.turns = decoder.rotary
        """Cos and sin of every position."""
        self._output = kernels.linear(torch.from_numpy(output_rows(decoder, self.ids)), weights=weights)
        self._shape = BodyShape(
            hidden_size=config.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )

    def linear(self, *parts: torch.nn.Linear) -> PackedLinear:
        """Pack linear layers with the same input into one."""
        biases = [part.bias for part in parts]
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        return self.kernels.linear(torch.cat([part.weight.detach() for part in parts]), bias, weights=self.weights)

    def numbers(self, values: Tensor) -> Floats:
        """Parameters as they are."""
        return self.kernels.numbers(values.detach())

    def padded(self, num_rows: int, *shape: int) -> Floats:
        """Room for the input of a linear layer: rows beyond those wanted are zeros."""
        return np.zeros((self.kernels.padded_rows(num_rows), *shape), np.float32)

    def take_threads(self, num_rows: int) -> int:
        """Compute with as many threads as suit so many rows; return their number."""
        count = 1 if self.is_few_alone and num_rows <= FEW_ROWS else self.kernels.num_threads
        self.kernels.take_threads(count)
        return count

    def start(self, rows: Rows, pages: Pages) -> CpuPass:
        """Begin a pass of a draft's own layers."""
        num_rows = len(rows.token_ids)
        padded, num_threads = self.kernels.padded_rows(num_rows), self.take_threads(num_rows)
        return CpuPass(rows, pages.cache, self._shape, num_padded=padded, num_threads=num_threads)

    def layer(
        self,
        attention: Attention,
        feed_forward: GatedFeedForward,
        feed_forward_norm: RmsNorm,
        attention_norm: RmsNorm | None = None,
    ) -> LayerWeights:
        """Pack a network's layer; one whose inputs are made otherwise has no first norm."""
        return LayerWeights(
            attention_norm=_NO_NORM if attention_norm is None else self.numbers(attention_norm.weight),
            qkv=self.linear(attention.q, attention.k, attention.v),
            attention_out=self.linear(attention.o),
            feed_forward_norm=self.numbers(feed_forward_norm.weight),
            gate_up=self.linear(feed_forward.gate, feed_forward.up),
            down=self.linear(feed_forward.down),
        )

    def inject(self, keys_values: Floats, pages: Pages, *, positions: Ints, slots: Ints, layer: int) -> None:
        """Write keys and values of rows that ask nothing themselves: [rows, 2 * kv_heads * dim]."""
        no_queries = np.empty((len(slots), 0, self.config.head_dim), np.float32)
        cache, (cos, sin) = pages.cache, self.turns
        cpu_attention.rotate_and_store(
            keys_values, cos, sin, positions, slots, cache.keys[layer], cache.values[layer], no_queries
        )

    def norm_each(self, x: Floats, weights: Floats) -> Floats:
        """Norm several vectors of each row and put them side by side: x [rows, vectors, hidden], padded below."""
        out = self.padded(x.shape[0], *x.shape[1:])
        cpu_drafts.norm_each(x, weights, np.float32(self.config.rms_norm_eps), out[: x.shape[0]])
        return out.reshape(out.shape[0], -1)

    def logits(self, hidden: Floats, num_rows: int) -> Floats:
        """Scores [num_rows, draft ids] of the first rows of hidden [rows, hidden]."""
        padded = self.kernels.padded_rows(num_rows)
        if hidden.shape[0] < padded:
            hidden = np.concatenate([hidden, np.zeros((padded - hidden.shape[0], hidden.shape[1]), np.float32)])
        return self._output(hidden[:padded])[:num_rows]

    def children(self, scores: Floats, asked: Sequence[Growth]) -> list[list[Child]]:
        """What may follow at the next position of a tree, by each row of scores [rows, draft ids].

        As `tree.children`, which would look at all ids of every row.
        """
        most = max(growth.shape.num_children for growth in asked)
        places = np.empty((len(asked), most), np.int64)
        shares = np.empty((len(asked), most), np.float32)
        cpu_drafts.likeliest(scores, places, shares)
        tokens, sure = self.ids[places].tolist(), shares.tolist()
        return [
            self._raced(scores[row], growth, places[row, 0], sure[row][0])
            if growth.context.temperature
            else [
                Child(token, share)
                for place, token, share in zip(places[row].tolist(), tokens[row], sure[row], strict=True)
                if place >= 0
            ][: growth.shape.num_children]
            for row, growth in enumerate(asked)
        ]

    def _raced(self, scores: Floats, growth: Growth, best: int, share: float) -> list[Child]:
        """The children where dice decide: the best of all that enter the race."""
        if best < 0:
            return []
        context = growth.context
        floor = scores[best] + np.float32(context.temperature * math.log(LEAST_WEIGHT))
        places = cpu_drafts.places_above(scores, floor)
        log_q = scores[places] - (scores[best] - np.float32(math.log(share)))
        guesses = Guesses(self.ids[places], log_q)
        return children(guesses, context, position=growth.position, shape=growth.shape)


@dataclass(frozen=True, slots=True)
class PackedFusion:
    """Features of several layers made into one state."""

    norms: Floats
    """[layers, hidden]"""
    linear: PackedLinear

    @classmethod
    def pack(cls, fusion: Fusion, body: Body) -> PackedFusion:
        """Take the weights of a network's fusion."""
        return cls(stacked_norms(*fusion.norms), body.linear(fusion.linear))

    def __call__(self, features: Floats, body: Body) -> Floats:
        """Features [rows, layers, hidden] -> states [rows or more, hidden]."""
        return self.linear(body.norm_each(features, self.norms))


def stacked_norms(*norms: torch.nn.Module) -> Floats:
    """The weights of some norms, [norms, size]."""
    weights: Floats = torch.stack([norm.get_parameter("weight").detach() for norm in norms]).float().numpy()
    return weights


def output_rows(decoder: Decoder, ids: Ints64) -> Floats:
    """The weights [ids, hidden] of the target's output layer for some tokens.

    Where that is the embedding they are read there. A packed weight has a layout of its own; but what a layer makes of
    unit vectors is its weight.
    """
    if decoder.config.tie_embeddings:
        embedding: Floats = decoder.embedding
        return embedding[ids]
    hidden = decoder.config.hidden_size
    rows = np.empty((len(ids), hidden), np.float32)
    for first in range(0, hidden, LANES):  # the hidden size is a multiple of it
        units = np.eye(LANES, hidden, first, dtype=np.float32)
        rows[:, first : first + LANES] = decoder.output(units)[:, ids].T
    return rows

"""One decoder for Llama, Mistral, Qwen2 and Qwen3: grouped heads, rotary positions, gated feed-forward, RMS norms."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WEIGHT_TYPES, WeightType
from understudy.errors import ModelError
from understudy.kernels.cpu import Cache, CpuKernels, PackedLinear
from understudy.kernels.rows import Rows
from understudy.models.config import ModelConfig
from understudy.models.rotary import rotary_tables

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; q, k, v and gate, up are stacked, so that one pass reads both."""

    attention_norm: Floats
    qkv: PackedLinear
    attention_out: PackedLinear
    feed_forward_norm: Floats
    gate_up: PackedLinear
    down: PackedLinear
    head_norms: Floats | None
    """[heads + kv_heads, head_dim] what the heads of q and k are normed with, where they are"""
    window: int | None

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        packed = sum(linear.num_bytes for linear in (self.qkv, self.attention_out, self.gate_up, self.down))
        return packed + self.attention_norm.nbytes + self.feed_forward_norm.nbytes


class Decoder:
    """The target: rows in, logits out. Keys and values go to the cache at the slots that the rows name."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        kernels: CpuKernels,
        *,
        weights: WeightType = "fp32",
        int8_output: bool = False,
    ) -> None:
        """Pack the weights. `tensors` is emptied layer by layer, so that no more than one layer is held twice.

        `int8_output` is for models that only draft: the output layer is most of a small model, and of a target it is
        the last place where rounding should be saved.
        """
        assert weights in WEIGHT_TYPES
        self.config = config
        self.weights = weights
        self._kernels = kernels
        _check_shapes(config, kernels)
        lanes = kernels.feature_multiple
        self._intermediate_size = -(-config.intermediate_size // lanes) * lanes
        self._cos, self._sin = rotary_tables(config, config.max_positions)
        embedding = tensors.pop("model.embed_tokens.weight").float()
        self._embedding: Floats = embedding.numpy()
        self._layers = [self._build_layer(tensors, index) for index in range(config.num_layers)]
        self._final_norm = _vector(tensors.pop("model.norm.weight"))
        head = embedding if config.tie_embeddings else tensors.pop("lm_head.weight")
        self._head = kernels.linear(head, weights="int8" if int8_output else "fp32")

    @property
    def num_bytes(self) -> int:
        """Memory of all weights as they are packed: layers, embedding and output layer."""
        layers = sum(layer.num_bytes for layer in self._layers)
        return layers + self._embedding.nbytes + self._final_norm.nbytes + self._head.num_bytes

    def first_layers(self, count: int) -> Decoder:
        """The model that ends after its first layers; it shares all weights with this one."""
        shorter = copy(self)
        shorter.config = replace(self.config, num_layers=count)
        shorter._layers = self._layers[:count]
        return shorter

    def _build_layer(self, tensors: dict[str, Tensor], index: int) -> _Layer:
        prefix = f"model.layers.{index}."

        def stacked(*names: str) -> PackedLinear:
            weight = torch.cat([tensors.pop(f"{prefix}{name}.weight").float() for name in names])
            biases = [tensors.pop(f"{prefix}{name}.bias", None) for name in names]
            bias = torch.cat([b.float() for b in biases if b is not None]) if biases[0] is not None else None
            return self._kernels.linear(weight, bias, weights=self.weights)

        gate, up, down = (tensors.pop(f"{prefix}mlp.{name}_proj.weight").float() for name in ("gate", "up", "down"))
        gate_up = torch.cat([self._widened(gate), self._widened(up)])
        return _Layer(
            attention_norm=_vector(tensors.pop(prefix + "input_layernorm.weight")),
            qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_out=stacked("self_attn.o_proj"),
            feed_forward_norm=_vector(tensors.pop(prefix + "post_attention_layernorm.weight")),
            gate_up=self._kernels.linear(gate_up, weights=self.weights),
            down=self._kernels.linear(self._widened(down.T).T, weights=self.weights),
            head_norms=_head_norms(self.config, tensors, prefix),
            window=self.config.window(index),
        )

    def _widened(self, weight: Tensor) -> Tensor:
        """A weight [intermediate, ...] with zeros below, up to whole lanes: what they compute is zero."""
        missing = self._intermediate_size - weight.shape[0]
        return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight

    def narrowed(self, window: int) -> Decoder:
        """This decoder, of the same weights, with no sliding window wider than `window`: for short tests of windows."""
        narrow = copy(self)
        narrow._layers = [
            layer if layer.window is None else replace(layer, window=min(layer.window, window))
            for layer in self._layers
        ]
        return narrow

    def new_cache(self, num_blocks: int) -> Cache:
        """Make a cache of this many blocks for this model."""
        config = self.config
        return self._kernels.cache(
            num_layers=config.num_layers, num_blocks=num_blocks, num_kv_heads=config.num_kv_heads, dim=config.head_dim
        )

    def forward(self, rows: Rows, cache: Cache) -> Floats:
        """Compute all rows and return the logits [N, vocabulary] of `rows.logit_rows`."""
        config, kernels = self.config, self._kernels
        kernels.begin()
        num_rows = len(rows.token_ids)
        padded = kernels.padded_rows(num_rows)  # rows beyond num_rows are padding: computed and never read
        x = np.zeros((padded, config.hidden_size), np.float32)
        x[:num_rows] = self._embedding[rows.token_ids]
        delta = np.zeros_like(x)
        normed = np.empty_like(x)
        queries = np.empty((num_rows, config.num_heads, config.head_dim), np.float32)
        attended = np.zeros((padded, config.num_heads * config.head_dim), np.float32)
        attended_heads = attended[:num_rows].reshape(queries.shape)
        activated = np.empty((padded, self._intermediate_size), np.float32)
        for index, layer in enumerate(self._layers):
            kernels.add_rms_norm(x, delta, layer.attention_norm, config.rms_norm_eps, normed)
            qkv = layer.qkv(normed)
            if layer.head_norms is not None:
                kernels.norm_heads(qkv[:num_rows], layer.head_norms, config.rms_norm_eps)
            kernels.attention(
                qkv, rows, self._cos, self._sin, cache, index, queries, attended_heads, window=layer.window
            )
            delta = layer.attention_out(attended)
            kernels.add_rms_norm(x, delta, layer.feed_forward_norm, config.rms_norm_eps, normed)
            kernels.gated(layer.gate_up(normed), activated)
            delta = layer.down(activated)
        kernels.add_rms_norm(x, delta, self._final_norm, config.rms_norm_eps, normed)
        return self._logits(normed, rows.logit_rows)

    def _logits(self, hidden: Floats, wanted: NDArray[np.int64]) -> Floats:
        """The logits [N, vocabulary] of the rows that are wanted."""
        chosen = np.zeros((self._kernels.padded_rows(len(wanted)), self.config.hidden_size), np.float32)
        chosen[: len(wanted)] = hidden[wanted]
        return self._head(chosen)[: len(wanted)]


def _vector(weight: Tensor) -> Floats:
    vector: Floats = weight.float().contiguous().numpy()
    return vector


def _head_norms(config: ModelConfig, tensors: dict[str, Tensor], prefix: str) -> Floats | None:
    """One weight [head_dim] for all heads of q and one for those of k, written out head by head."""
    if not config.head_norms:
        return None
    q_norm, k_norm = (_vector(tensors.pop(f"{prefix}self_attn.{name}.weight")) for name in ("q_norm", "k_norm"))
    return np.concatenate([np.tile(q_norm, (config.num_heads, 1)), np.tile(k_norm, (config.num_kv_heads, 1))])


def _check_shapes(config: ModelConfig, kernels: CpuKernels) -> None:
    """Refuse the shapes that the kernels' fixed lanes cannot hold."""
    for name, size, multiple in (
        ("hidden_size", config.hidden_size, kernels.feature_multiple),
        ("head_dim", config.head_dim, kernels.head_dim_multiple),
    ):
        if size % multiple:
            raise ModelError(
                f"{name} is {size}, which is not a multiple of {multiple}.", "This model's shape is not supported."
            )

"""One decoder for Llama, Mistral, Qwen2 and Qwen3: grouped heads, rotary positions, gated feed-forward, RMS norms."""

from __future__ import annotations

from collections.abc import MutableMapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.weights import WEIGHT_TYPES, WeightType
from understudy.errors import ModelError
from understudy.kernels.interface import (
    NORMED,
    Array,
    BodyShape,
    Cache,
    FeatureBuffer,
    Kernels,
    LayerWeights,
    PackedLinear,
    Passes,
)
from understudy.kernels.rows import Rows
from understudy.models.config import ModelConfig
from understudy.models.rotary import rotary_tables

Floats = NDArray[np.float32]


class Decoder:
    """The target: rows in, logits out. Keys and values go to the cache at the slots that the rows name."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: MutableMapping[str, Tensor],
        kernels: Kernels,
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
        self.kernels = kernels
        _check_shapes(config, kernels)
        lanes = kernels.feature_multiple
        self._intermediate_size = -(-config.intermediate_size // lanes) * lanes
        cos, sin = (torch.from_numpy(table) for table in rotary_tables(config, config.max_positions))
        self._cos, self._sin = kernels.numbers(cos), kernels.numbers(sin)
        self._shape = BodyShape(
            hidden_size=config.hidden_size,
            intermediate_size=self._intermediate_size,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        embedding = tensors.pop("model.embed_tokens.weight")
        self._embedding = kernels.table(embedding)
        self._layers = [self._build_layer(tensors, index) for index in range(config.num_layers)]
        self._final_norm = kernels.numbers(tensors.pop("model.norm.weight"))
        head = embedding if config.tie_embeddings else tensors.pop("lm_head.weight")
        self._head = kernels.linear(head, weights="int8" if int8_output else kernels.output_weights)

    @property
    def embedding(self) -> Array:
        """The embedding's table [vocabulary, hidden], as the kernels hold it."""
        return self._embedding

    @property
    def output(self) -> PackedLinear:
        """The output layer."""
        return self._head

    @property
    def rotary(self) -> tuple[Array, Array]:
        """Cos and sin of every position, [positions, head_dim / 2]."""
        return self._cos, self._sin

    @property
    def num_bytes(self) -> int:
        """Memory of all weights as they are packed: layers, embedding and output layer."""
        layers = sum(layer.num_bytes for layer in self._layers)
        around: int = self._embedding.nbytes + self._final_norm.nbytes + self._head.num_bytes
        return layers + around

    @property
    def pass_bytes(self) -> int:
        """What every pass reads of the weights: all but the embedding, of which it reads its own rows' lines alone."""
        table_bytes: int = self._embedding.nbytes
        return self.num_bytes - table_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take."""
        config = self.config
        return 2 * self.kernels.number_bytes * config.num_layers * config.num_kv_heads * config.head_dim

    def first_layers(self, count: int) -> Decoder:
        """The model that ends after its first layers; it shares all weights with this one."""
        shorter = copy(self)
        shorter.config = replace(self.config, num_layers=count)
        shorter._layers = self._layers[:count]
        return shorter

    def _build_layer(self, tensors: MutableMapping[str, Tensor], index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."

        def stacked(*names: str) -> PackedLinear:
            weight = torch.cat([tensors.pop(f"{prefix}{name}.weight").float() for name in names])
            biases = [tensors.pop(f"{prefix}{name}.bias", None) for name in names]
            bias = torch.cat([b.float() for b in biases if b is not None]) if biases[0] is not None else None
            return self.kernels.linear(weight, bias, weights=self.weights)

        gate, up, down = (tensors.pop(f"{prefix}mlp.{name}_proj.weight").float() for name in ("gate", "up", "down"))
        numbers = self.kernels.numbers
        return LayerWeights(
            attention_norm=numbers(tensors.pop(prefix + "input_layernorm.weight")),
            qkv=stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_out=stacked("self_attn.o_proj"),
            feed_forward_norm=numbers(tensors.pop(prefix + "post_attention_layernorm.weight")),
            gate_up=self.kernels.gated_linear(self._widened(gate), self._widened(up), weights=self.weights),
            down=self.kernels.linear(self._widened(down.T).T, weights=self.weights),
            head_norms=self._head_norms(tensors, prefix),
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
        cache: Cache = self.kernels.cache(
            num_layers=config.num_layers, num_blocks=num_blocks, num_kv_heads=config.num_kv_heads, dim=config.head_dim
        )
        return cache

    def passes(self, cache: Cache) -> Passes:
        """What runs this model's passes over a cache."""

        def compute(rows: Any, shown: FeatureBuffer | None = None) -> Array:
            return self.compute(rows, cache, shown)

        return self.kernels.passes(compute, cache, vocab_size=self.config.vocab_size)

    def forward(self, rows: Rows, cache: Cache) -> Floats:
        """Compute all rows and return the logits [N, vocabulary] of `rows.logit_rows`."""
        return self.kernels.to_host(self.compute(self.kernels.place(rows), cache))

    def compute(self, rows: Any, cache: Cache, shown: FeatureBuffer | None = None) -> Array:
        """As `forward`, from placed rows to logits on the device, without waiting for them.

        `shown`, on the device, takes the hidden states that it wants of all rows.
        """
        step = self.kernels.start(rows, cache, self._shape)
        step.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            step.layer(layer, index, self.rotary, shown)
        normed = step.norm(self._final_norm)
        if shown is not None:
            shown.take(len(self._layers), step.stream)
            shown.take(NORMED, normed)
        return self._logits(normed, rows.logit_rows)

    def _logits(self, hidden: Array, wanted: Array) -> Array:
        """The logits [N, vocabulary] of the rows that are wanted."""
        return self.kernels.logits(self._head, hidden, wanted)

    def _head_norms(self, tensors: MutableMapping[str, Tensor], prefix: str) -> Array | None:
        """One weight [head_dim] for all heads of q and one for those of k, written out head by head."""
        config = self.config
        if not config.head_norms:
            return None
        q_norm, k_norm = (tensors.pop(f"{prefix}self_attn.{name}.weight").float() for name in ("q_norm", "k_norm"))
        return self.kernels.numbers(
            torch.cat([q_norm.repeat(config.num_heads, 1), k_norm.repeat(config.num_kv_heads, 1)])
        )


def _check_shapes(config: ModelConfig, kernels: Kernels) -> None:
    """Refuse the shapes that the kernels' fixed lanes cannot hold."""
    for name, size, multiple in (
        ("hidden_size", config.hidden_size, kernels.feature_multiple),
        ("head_dim", config.head_dim, kernels.head_dim_multiple),
    ):
        if size % multiple:
            raise ModelError(
                f"{name} is {size}, which is not a multiple of {multiple}.", "This model's shape is not supported."
            )

"""The target as a teacher: its features and its laws for whole texts, in plain torch.

Texts are stored as token ids alone and read anew whenever they are trained on: features of millions of tokens would
take terabytes, and reading is much faster than training. This is not the serving decoder: that one computes every row
alike whatever stands beside it, keeps no features, and is made for few rows. Here nothing must be exact, many whole
texts are read at once, and torch's own attention in bf16 is the fastest way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from understudy.models.config import ModelConfig
from understudy.models.heads.layers import rms_norm, split_heads, turn
from understudy.models.rotary import rotary_tables


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A batch of texts, and what the target made of them."""

    token_ids: Tensor
    """[B, T]"""
    features: Tensor
    """[B, T, layers, hidden] the residual stream after each wanted layer; no layers if none were wanted"""
    last_hidden: Tensor
    """[B, T, hidden] the state after the final norm: the output layer times this are the logits"""


class Teacher:
    """A target's weights on a device, frozen."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self._weights = {name: tensors[name].to(device=self.device, dtype=dtype) for name in tensors}
        cos, sin = rotary_tables(config, config.max_positions)
        self._cos, self._sin = (torch.from_numpy(table).to(self.device) for table in (cos, sin))
        self.embedding = self._weights["model.embed_tokens.weight"]
        """[vocabulary, hidden]"""
        output = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
        self.output = output.to(device=self.device, dtype=torch.float32)
        """[vocabulary, hidden], fp32: bf16 would round off differences of a tenth between logits"""

    @torch.no_grad()
    def read(self, token_ids: Tensor, feature_layers: tuple[int, ...] = ()) -> Reading:
        """Read texts [B, T] that are filled up at their ends: no row sees what comes after it."""
        x = self.embedding[token_ids]
        features: list[Tensor] = []
        for layer in range(self.config.num_layers):
            x = x + self._attended(layer, self._normed(x, f"model.layers.{layer}.input_layernorm"))
            x = x + self._fed_forward(layer, self._normed(x, f"model.layers.{layer}.post_attention_layernorm"))
            if layer + 1 in feature_layers:
                features.append(x)
        stacked = torch.stack(features, dim=2) if features else x.new_zeros(*x.shape[:2], 0, x.shape[2])
        return Reading(token_ids, stacked, self._normed(x, "model.norm"))

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """States [..., hidden] after the final norm -> logits [..., vocabulary], fp32."""
        with torch.autocast(self.device.type, enabled=False):
            return linear(last_hidden.float(), self.output)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _projected(self, x: Tensor, layer: int, name: str) -> Tensor:
        prefix = f"model.layers.{layer}.{name}"
        return linear(x, self._weights[f"{prefix}.weight"], self._weights.get(f"{prefix}.bias"))

    def _attended(self, layer: int, x: Tensor) -> Tensor:
        num_rows = x.shape[1]
        q, k, v = (
            split_heads(self._projected(x, layer, f"self_attn.{name}_proj"), self.config.head_dim) for name in "qkv"
        )
        if self.config.head_norms:
            q = self._normed(q, f"model.layers.{layer}.self_attn.q_norm")
            k = self._normed(k, f"model.layers.{layer}.self_attn.k_norm")
        cos, sin = self._cos[:num_rows], self._sin[:num_rows]
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        window = self.config.window(layer)
        if window is None:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=x.device).tril()
            attended = scaled_dot_product_attention(q, k, v, attn_mask=seen.triu(1 - window), enable_gqa=True)
        return self._projected(attended.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")

    def _fed_forward(self, layer: int, x: Tensor) -> Tensor:
        gated = silu(self._projected(x, layer, "mlp.gate_proj")) * self._projected(x, layer, "mlp.up_proj")
        return self._projected(gated, layer, "mlp.down_proj")

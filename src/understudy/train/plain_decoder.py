"""A decoder over whole texts in plain torch, for training: the target that teaches, and drafts that are models too.

This is not the serving decoder: that one computes every row alike whatever stands beside it, and is made for few rows.
Here nothing must be exact, many whole texts are read at once, gradients may be wanted, and torch's own attention is the
fastest way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from understudy.models.config import ModelConfig
from understudy.models.heads.layers import rms_norm, split_heads, turn
from understudy.models.rotary import rotary_tables


class PlainDecoder:
    """The layers of a model over weights that are somebody else's, by their Hugging Face names."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, device: torch.device) -> None:
        self.config = config
        self._weights = weights
        cos, sin = rotary_tables(config, config.max_positions)
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in (cos, sin))

    def layer(self, index: int, x: Tensor) -> Tensor:
        """The residual stream [B, T, hidden] after a layer; no row sees what comes after it."""
        prefix = f"model.layers.{index}"
        x = x + self._attended(index, self._normed(x, f"{prefix}.input_layernorm"))
        return x + self._fed_forward(prefix, self._normed(x, f"{prefix}.post_attention_layernorm"))

    def last_norm(self, x: Tensor) -> Tensor:
        """What the output layer wants, [B, T, hidden]."""
        return self._normed(x, "model.norm")

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _projected(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _attended(self, index: int, x: Tensor) -> Tensor:
        num_rows = x.shape[1]
        prefix = f"model.layers.{index}.self_attn"
        q, k, v = (split_heads(self._projected(x, f"{prefix}.{name}_proj"), self.config.head_dim) for name in "qkv")
        if self.config.head_norms:
            q, k = self._normed(q, f"{prefix}.q_norm"), self._normed(k, f"{prefix}.k_norm")
        cos, sin = self._cos[:num_rows], self._sin[:num_rows]
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        window = self.config.window(index)
        if window is None:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=x.device).tril()
            attended = scaled_dot_product_attention(q, k, v, attn_mask=seen.triu(1 - window), enable_gqa=True)
        return self._projected(attended.transpose(1, 2).flatten(2), f"{prefix}.o_proj")

    def _fed_forward(self, prefix: str, x: Tensor) -> Tensor:
        gated = silu(self._projected(x, f"{prefix}.mlp.gate_proj")) * self._projected(x, f"{prefix}.mlp.up_proj")
        return self._projected(gated, f"{prefix}.mlp.down_proj")

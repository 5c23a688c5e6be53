"""The parts that trained drafts are built from: norms, rotary positions, grouped attention, gated feed-forward.

Plain torch, as the target's own layers are defined. A draft decides nothing about the words, so nothing here has to be
computed alike in every batch, as the target's kernels do.

    B  sequences    T  rows of one    H  heads    G  heads of keys and values    D  numbers in a head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from understudy.models.config import ModelConfig
from understudy.models.rotary import rotary_tables


class RmsNorm(nn.Module):
    """Scale rows to a mean square of 1, then by a weight; computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Give [..., size], of the type that came in."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm itself, for weights that are nobody's parameters."""
    return nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class GatedFeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, intermediate_size, bias=False)
        self.up = nn.Linear(size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Give [..., size]."""
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Turns(nn.Module):
    """The target's rotary embedding: cos and sin of every position, scaling and all."""

    cos: Tensor
    sin: Tensor

    def __init__(self, target: ModelConfig) -> None:
        super().__init__()
        cos, sin = rotary_tables(target, target.max_positions)  # [max_positions, D / 2]
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn x [B, heads, T, D] by its rows' positions [T] or [B, T]."""
        cos, sin = self.cos[positions], self.sin[positions]  # [T, D / 2] or [B, T, D / 2]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return turn(x, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (d, d + D/2) of every head."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class KeysValues:
    """What rows leave for others to attend to; keys are turned already."""

    keys: Tensor
    """[B, G, T, D]"""
    values: Tensor
    """[B, G, T, D]"""

    def before(self, later: KeysValues) -> KeysValues:
        """These rows, then the later ones."""
        return KeysValues(
            torch.cat([self.keys, later.keys], dim=2), torch.cat([self.values, later.values], dim=2)
        )  # fmt: skip


class Attention(nn.Module):
    """The projections of grouped attention in the target's shape, from an input of any size."""

    def __init__(self, target: ModelConfig, *, input_size: int) -> None:
        super().__init__()
        self.head_dim = target.head_dim
        self.q = nn.Linear(input_size, target.num_heads * target.head_dim, bias=False)
        self.k = nn.Linear(input_size, target.num_kv_heads * target.head_dim, bias=False)
        self.v = nn.Linear(input_size, target.num_kv_heads * target.head_dim, bias=False)
        self.o = nn.Linear(target.num_heads * target.head_dim, target.hidden_size, bias=False)
        self.turns = Turns(target)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """X [B, T, input] -> turned queries [B, H, T, D]."""
        return self.turns_of(self.q(x), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """X [B, T, input] -> turned keys, and values."""
        return KeysValues(self.turns_of(self.k(x), positions), split_heads(self.v(x), self.head_dim))

    def turns_of(self, x: Tensor, positions: Tensor) -> Tensor:
        """Split [B, T, heads * D] into heads, and turn them: [B, heads, T, D]."""
        turned: Tensor = self.turns(split_heads(x, self.head_dim), positions)
        return turned

    def out(self, attended: Tensor) -> Tensor:
        """Attended heads [B, H, T, D] -> what is added to the residual stream, [B, T, hidden]."""
        y: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return y


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * D] -> [B, heads, T, D]."""
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(1, 2)


def attend(queries: Tensor, seen: KeysValues, mask: Tensor) -> Tensor:
    """[B, H, T, D] over keys of G heads; `mask` [.., T, keys] is true where a row may look.

    Keys are repeated for the heads that share them: no kernel of a GPU that takes a mask would do it by itself.
    """
    heads_by_group = queries.shape[1] // seen.keys.shape[1]
    keys, values = (x.to(queries.dtype).repeat_interleave(heads_by_group, dim=1) for x in (seen.keys, seen.values))
    return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

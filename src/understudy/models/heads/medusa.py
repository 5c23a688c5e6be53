"""Medusa: several small heads on the target's last hidden state, each for one place further ahead.

Head k reads the same state and knows nothing of what the heads before it chose. So a head is cheap and all of them are
one pass, and places far ahead are guessed poorly.

    anchor i   the last position whose states are known; its next token x[i+1] is known too
    head k     guesses x[i+2+k], k = 0, 1, ... from h[i], the state after the target's final norm
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from understudy.models.heads.spec import HeadSpec


class MedusaHead(nn.Module):
    """`spec.num_tokens` heads of `spec.num_layers` residual blocks; the output layer is the target's, frozen."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.heads = nn.ModuleList(
            nn.ModuleList(ResidualBlock(spec.target.hidden_size) for _ in range(spec.num_layers))
            for _ in range(spec.num_tokens)
        )

    def hidden(self, k: int, last_hidden: Tensor) -> Tensor:
        """States [..., hidden] after the final norm -> what head k gives to the output layer, [..., hidden]."""
        x = last_hidden
        blocks = self.heads[k]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x)
        return x

    def forward(self, last_hidden: Tensor) -> Tensor:
        """All heads at once: [..., hidden] -> [..., heads, hidden]."""
        return torch.stack([self.hidden(k, last_hidden) for k in range(self.spec.num_tokens)], dim=-2)


class ResidualBlock(nn.Module):
    """x + silu(linear x). The linear layer begins at zero: an untrained head says what the target says one before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Give [..., size]."""
        return x + nn.functional.silu(self.linear(x))

"""Features of several of the target's layers, made into one state per position.

Layers are numbered by how many have been computed: feature layer n is the residual stream after the first n layers,
before any norm. Each layer's features are normed on their own, because their sizes differ widely.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from understudy.models.heads.layers import RmsNorm
from understudy.models.heads.spec import HeadSpec


class Fusion(nn.Module):
    """Norm the features of each layer, put them side by side, and project them to one hidden state."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        hidden, num_features = spec.target.hidden_size, len(spec.feature_layers)
        self.norms = nn.ModuleList(RmsNorm(hidden, spec.target.rms_norm_eps) for _ in range(num_features))
        self.linear = nn.Linear(num_features * hidden, hidden, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., layers, hidden] -> [..., hidden]."""
        normed = [norm(features[..., place, :]) for place, norm in enumerate(self.norms)]
        fused: Tensor = self.linear(torch.cat(normed, dim=-1))
        return fused

"""The target as a teacher: its features and its laws for whole texts, in plain torch.

Texts are stored as token ids alone and read anew whenever they are trained on: features of millions of tokens would
take terabytes, and reading is much faster than training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from understudy.models.config import ModelConfig
from understudy.train.plain_decoder import PlainDecoder


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A batch of texts, and what the target made of them."""

    token_ids: Tensor
    """[B, T]"""
    features: Tensor
    """[B, T, layers, hidden] the residual stream after each wanted layer; no layers if none were wanted"""
    last_hidden: Tensor
    """[B, T, hidden] the state after the final norm: the output layer times this are the logits"""

    @property
    def is_whole(self) -> bool:
        """Whether it has what a draft reads."""
        return bool(self.features.numel() or self.last_hidden.numel())

    def tokens_alone(self) -> Reading:
        """The texts, to be read again."""
        return Reading(self.token_ids, self.features[:0].clone(), self.last_hidden[:0].clone())


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
        self._decoder = PlainDecoder(config, self._weights, device=self.device)
        self.embedding = self._weights["model.embed_tokens.weight"]
        """[vocabulary, hidden]"""
        output = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
        self.output = output.to(device=self.device, dtype=torch.float32)
        """[vocabulary, hidden], fp32: bf16 would round off differences of a tenth between logits"""

    def computing(self) -> torch.autocast:
        """In what drafts are computed beside it: in bf16 where it is. Their parameters stay fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def read(self, token_ids: Tensor, feature_layers: tuple[int, ...] = ()) -> Reading:
        """Read texts [B, T] that are filled up at their ends: no row sees what comes after it."""
        x = self.embedding[token_ids]
        features: list[Tensor] = []
        for layer in range(self.config.num_layers):
            x = self._decoder.layer(layer, x)
            if layer + 1 in feature_layers:
                features.append(x)
        stacked = torch.stack(features, dim=2) if features else x.new_zeros(*x.shape[:2], 0, x.shape[2])
        return Reading(token_ids, stacked, self._decoder.last_norm(x))

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """States [..., hidden] after the final norm -> logits [..., vocabulary], fp32."""
        with torch.autocast(self.device.type, enabled=False):
            return linear(last_hidden.float(), self.output)

"""A block drafter: one pass guesses a whole block from the target's features, and a small walk makes it hang together.

    anchor i   the last position whose features are known; its next token x[i+1], the anchor's token, is known too
    context    fused features of positions 0 to i. Every draft layer makes keys and values of them: they are injected
    row k      of the block, k = 0 to N - 1, stands at position i + 1 + k and guesses x[i+2+k]. Row 0 holds the
               embedding of the anchor's token, all rows a learned mask embedding; each sees the context and all rows
    Markov     the token before a place adds a low-rank bias to the logits there: W2 W1[token]
    confidence how likely the guess of row k is right if all before it were; the product over rows is the survival

The rows of a block are computed once; the walk then chooses token by token, each from its row and the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from understudy.models.heads.fusion import Fusion
from understudy.models.heads.layers import Attention, GatedFeedForward, KeysValues, RmsNorm, attend
from understudy.models.heads.spec import HeadSpec


class BlockHead(nn.Module):
    """`spec.num_layers` draft layers over a block of `spec.num_tokens` rows."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden, eps = spec.target.hidden_size, spec.target.rms_norm_eps
        self.fusion = Fusion(spec)
        self.context_norm = RmsNorm(hidden, eps)
        self.mask_embeddings = nn.Parameter(torch.empty(spec.num_tokens, hidden))
        self.layers = nn.ModuleList(BlockLayer(spec) for _ in range(spec.num_layers))
        self.output_norm = RmsNorm(hidden, eps)
        num_draft_ids = spec.num_draft_ids
        # one line more than draft ids: all tokens that are none of them share the last
        self.markov_in = nn.Embedding(num_draft_ids + 1, spec.markov_rank)
        self.markov_out = nn.Linear(spec.markov_rank, num_draft_ids, bias=False)
        nn.init.normal_(self.mask_embeddings, std=0.02)
        nn.init.normal_(self.markov_in.weight, std=0.02)
        nn.init.zeros_(self.markov_out.weight)
        self.confidence_out = nn.Linear(hidden + spec.markov_rank, 1)

    def context(self, features: Tensor) -> Tensor:
        """Features [B, T, layers, hidden] -> what layers make keys and values of, [B, T, hidden]: once per position."""
        normed: Tensor = self.context_norm(self.fusion(features))
        return normed

    def forward(self, context: Tensor, anchors: Tensor, anchor_embeddings: Tensor) -> Tensor:
        """Compute a block behind each anchor: what the output layer wants, [B, A, N, hidden].

        context [B, T, hidden] of positions 0 to T - 1, anchors [B, A], anchor_embeddings [B, A, hidden] of the tokens
        after the anchors.
        """
        num_rows = self.spec.num_tokens
        rows = self.mask_embeddings.expand(*anchors.shape, -1, -1)  # [B, A, N, hidden]
        rows = torch.cat([rows[:, :, :1] + anchor_embeddings[:, :, None], rows[:, :, 1:]], dim=2)
        places = torch.arange(num_rows, device=anchors.device)
        positions = (anchors[..., None] + 1 + places).clamp(max=self.spec.target.max_positions - 1)
        mask = block_mask(anchors, num_context=context.shape[1], num_rows=num_rows)[:, None]  # for all heads
        x, positions = rows.flatten(1, 2), positions.flatten(1)
        for layer in self.layers:
            x = layer(x, positions, context, mask)
        normed: Tensor = self.output_norm(x)
        return normed.reshape(*anchors.shape, num_rows, -1)

    def bias(self, before: Tensor) -> Tensor:
        """The bias of the tokens before, [...] places of the draft vocabulary (-1: not in it) -> [..., draft ids]."""
        bias: Tensor = self.markov_out(self.line(before))
        return bias

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Log odds that rows [..., hidden] guess right, given the tokens before them, [...]: the result is [...]."""
        odds: Tensor = self.confidence_out(torch.cat([hidden, self.line(before).to(hidden.dtype)], dim=-1))
        return odds[..., 0]

    def line(self, before: Tensor) -> Tensor:
        """What the bias of the tokens before is made of: [...] -> [..., rank]."""
        line: Tensor = self.markov_in(torch.where(before < 0, self.spec.num_draft_ids, before))
        return line


class BlockLayer(nn.Module):
    """A decoder layer whose rows attend to the context and to each other."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        hidden, eps = spec.target.hidden_size, spec.target.rms_norm_eps
        self.attention_norm = RmsNorm(hidden, eps)
        self.attention = Attention(spec.target, input_size=hidden)
        self.feed_forward_norm = RmsNorm(hidden, eps)
        self.feed_forward = GatedFeedForward(hidden, spec.intermediate_size)

    def injected(self, context: Tensor) -> KeysValues:
        """Keys and values of the context [B, T, hidden], by position: what serving keeps for committed positions."""
        return self.attention.keys_values(context, torch.arange(context.shape[1], device=context.device))

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Compute rows x [B, R, hidden] at positions [B, R]; mask [B, 1, R, T + R] says what they see."""
        normed = self.attention_norm(x)
        seen = self.injected(context).before(self.attention.keys_values(normed, positions))
        x = x + self.attention.out(attend(self.attention.queries(normed, positions), seen, mask))
        rows: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return rows


def block_mask(anchors: Tensor, *, num_context: int, num_rows: int) -> Tensor:
    """Say what the rows of blocks see: [B, A * N, T + A * N], true where they do.

    Row k of anchor a's block sees the context up to position anchors[a], and all rows of its own block.
    """
    num_anchors = anchors.shape[1]
    of_row = anchors.repeat_interleave(num_rows, dim=1)  # [B, A * N]
    sees_context = torch.arange(num_context, device=anchors.device) <= of_row[..., None]
    block = torch.arange(num_anchors, device=anchors.device).repeat_interleave(num_rows)
    same_block = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([sees_context, same_block], dim=-1)

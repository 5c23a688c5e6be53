"""EAGLE-3: one decoder layer that continues the target's features, and is trained on its own outputs.

    anchor i     the last position whose features are known; its next token x[i+1] is known too
    row i        reads a state of position i and the embedding of x[i+1]; guesses x[i+2]
    fed state    of a row: the fused features where the target computed them (a true row), and the output of the row
                 before where it did not (a drafted row)

Serving reads true rows into a cache, drafts rows behind them one by one, and replaces drafted rows by true ones as soon
as the target has computed their positions. Training does the same from many anchors at once (`unroll`): in step s, the
row of anchor i stands at position i + s, and sees the true rows up to i, then its own drafted rows of steps 1 to s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from understudy.models.heads.fusion import Fusion
from understudy.models.heads.layers import Attention, GatedFeedForward, KeysValues, RmsNorm, attend
from understudy.models.heads.spec import HeadSpec

Embed = Callable[[int], Tensor]
"""Given a step from 1 on, the embeddings [B, A, hidden] that it reads; asked when the step before has been given."""


class EagleHead(nn.Module):
    """One decoder layer over [embedding ; fed state]. Embedding and output layer are the target's, frozen."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden, eps = spec.target.hidden_size, spec.target.rms_norm_eps
        self.fusion = Fusion(spec)
        self.embedding_norm = RmsNorm(hidden, eps)
        self.state_norm = RmsNorm(hidden, eps)
        self.attention = Attention(spec.target, input_size=2 * hidden)
        self.feed_forward_norm = RmsNorm(hidden, eps)
        self.feed_forward = GatedFeedForward(hidden, spec.intermediate_size)
        self.output_norm = RmsNorm(hidden, eps)

    def read(
        self, fed: Tensor, embeddings: Tensor, positions: Tensor, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Read rows that follow each other, after those of `past`: as serving does.

        fed and embeddings [B, T, hidden], positions [T]. Returns the states [B, T, hidden] that the next row may be
        fed (the output layer wants `output_norm` of them), and all keys and values with those of the past.
        """
        queries, own = self._project(fed, embeddings, positions)
        seen = own if past is None else past.before(own)
        num_rows, num_keys = fed.shape[1], seen.keys.shape[2]
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=fed.device).tril(num_keys - num_rows)
        return self._finish(fed, attend(queries, seen, mask)), seen

    def unroll(
        self, features: Tensor, embeddings: Tensor, anchors: Tensor, *, embed: Embed, num_steps: int
    ) -> Iterator[Tensor]:
        """Draft from many anchors at once; yield each step's states [B, A, hidden], as `read` would give them.

        features [B, T, layers, hidden] and embeddings [B, T, hidden] of positions 0 to T - 1; anchors [B, A]. What step
        s gives for anchor i is about x[i+2+s]. Positions beyond the model's last are read as the last: nobody may use
        what comes of them.
        """
        positions = torch.arange(features.shape[1], device=features.device)
        states, true_rows = self.read(self.fusion(features), embeddings, positions)
        states = states.gather(1, anchors[..., None].expand(-1, -1, states.shape[-1]))
        yield states
        drafted: list[KeysValues] = []
        for step in range(1, num_steps):
            at = (anchors + step).clamp(max=self.spec.target.max_positions - 1)
            queries, own = self._project(states, embed(step), at)
            drafted.append(own)
            states = self._finish(states, _attend_unrolled(queries, anchors, true_rows, drafted))
            yield states

    def _project(self, fed: Tensor, embeddings: Tensor, positions: Tensor) -> tuple[Tensor, KeysValues]:
        x = torch.cat([self.embedding_norm(embeddings), self.state_norm(fed)], dim=-1)
        return self.attention.queries(x, positions), self.attention.keys_values(x, positions)

    def _finish(self, fed: Tensor, attended: Tensor) -> Tensor:
        x = fed + self.attention.out(attended)
        state: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return state


def _attend_unrolled(queries: Tensor, anchors: Tensor, true_rows: KeysValues, drafted: list[KeysValues]) -> Tensor:
    """Each anchor's row attends to the true rows up to its anchor, and to its own drafted rows: [B, H, A, D].

    The scores of drafted rows are one number for each row and step, so they need no matrix of their own.
    """
    num_groups, num_true, head_dim = true_rows.keys.shape[1:]
    # [B, G, heads by group, A, D]
    q = queries.reshape(len(queries), num_groups, -1, *queries.shape[2:]) * head_dim**-0.5
    scores = torch.einsum("bghad,bgtd->bghat", q, true_rows.keys.to(q.dtype))
    is_later = torch.arange(num_true, device=q.device) > anchors[..., None]  # [B, A, T]
    scores = scores.masked_fill(is_later[:, None, None], -torch.inf)
    own = [torch.einsum("bghad,bgad->bgha", q, rows.keys)[..., None] for rows in drafted]
    weights = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(q.dtype)
    attended = torch.einsum("bghat,bgtd->bghad", weights[..., :num_true], true_rows.values.to(q.dtype))
    for place, rows in enumerate(drafted):
        attended = attended + weights[..., num_true + place, None] * rows.values[:, :, None]
    return attended.flatten(1, 2)

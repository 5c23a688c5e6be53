"""What training makes small: the distance between the draft's law and the target's, as acceptance sees it.

    p   the target's law of the next word, over its whole vocabulary; only its draft ids [D] can be agreed on
    q   the draft's law, over its draft ids [D]
    TV  total variation, 1 - sum of min(p, q): the share of words that no coupling of the two can agree on

Cross-entropy alone spends effort where agreement is lost anyway, so it is only mixed in: its gradient does not vanish
where p and q have nothing in common.

At temperature 0 the target's law is all on its best word. The draft's law at temperature 1 stands against it there: its
own law at 0 has no gradient.

Scores over all draft ids of all guesses of a batch are gigabytes, and torch would keep several copies of them for the
way back. So the gradient is worked out beside the loss, some rows at a time, and nothing of that size is kept:

    d loss / d log q_k   = -(q_k where q_k < p_k, else 0) for 1 - sum of min(p, q), and -p_k for cross-entropy
    d log q_k / d score_j = ((j = k) - q_j) / temperature
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

_MOST_SCORES = 1 << 27
"""Scores that are held at once."""

NUM_LIKELIEST = 64
"""Of the target's law, so many of the likeliest draft ids are kept: what acceptance could still gain from the others is
less than what training can tell."""


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """The target's laws of N words at several temperatures, at their likeliest draft ids."""

    places: Tensor
    """[N, K] places of the draft vocabulary"""
    p: Tensor
    """[temperatures, N, K] what is missing to 1 is on other ids"""

    def at(self, lines: Tensor | slice) -> Laws:
        """Those of some lines [M]."""
        return Laws(self.places[lines], self.p[:, lines])

    def packed(self) -> Laws:
        """The same in a third of the memory; rounding to half precision is far below what training can tell."""
        return Laws(self.places.to(torch.int32), self.p.to(torch.float16))


@torch.no_grad()
def target_laws(logits: Tensor, draft_ids: Tensor, temperatures: Sequence[float]) -> Laws:
    """The target's laws at temperatures, from its logits [N, vocabulary]."""
    logits = logits.float()
    likeliest, places = logits[:, draft_ids].topk(min(NUM_LIKELIEST, len(draft_ids)), dim=-1)
    laws: list[Tensor] = []
    for temperature in temperatures:
        if temperature == 0.0:
            laws.append((draft_ids[places] == logits.argmax(dim=-1, keepdim=True)).to(torch.float32))
        else:
            total = torch.logsumexp(logits / temperature, dim=-1, keepdim=True)
            laws.append((likeliest / temperature - total).exp())
    return Laws(places, torch.stack(laws))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far laws are apart: the mean over temperatures of total variation mixed with cross-entropy."""

    temperatures: tuple[float, ...]
    cross_entropy_share: float

    def measure(self, scores: Tensor, laws: Laws, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the loss [N] of the draft's scores [N, D], how likely the guesses are right [N], and a gradient [N, D].

        A guess is right as often as 1 - TV, and at temperature 0 if the best words agree. The gradient is that of the
        losses times their weights [N], by the scores.
        """
        places, count = laws.places.long(), len(self.temperatures)
        best, best_places = scores.max(dim=-1, keepdim=True)
        at_laws = scores.gather(-1, places)  # [N, K]
        losses, rates = torch.zeros_like(weights), torch.zeros_like(weights)
        named = torch.zeros_like(at_laws)  # of the gradient, what is at the laws' ids alone
        gradient: Tensor | None = None
        for warmth in sorted({temperature or 1.0 for temperature in self.temperatures}):
            q = torch.softmax(scores / warmth if warmth != 1.0 else scores, dim=-1)
            log_q = (at_laws - best) / warmth + q.gather(-1, best_places).log()
            at_q = log_q.exp()
            slopes = torch.zeros_like(log_q)  # d loss / d log q
            for p, temperature in zip(laws.p.float(), self.temperatures, strict=True):
                if (temperature or 1.0) != warmth:
                    continue
                common = torch.minimum(p, at_q).sum(dim=-1)
                losses += (1.0 - self.cross_entropy_share) * (1.0 - common)
                losses -= self.cross_entropy_share * (p * log_q).sum(dim=-1)
                rates += common if temperature else (p * (places == best_places)).sum(dim=-1)
                slopes -= (1.0 - self.cross_entropy_share) * torch.where(at_q < p, at_q, 0.0)
                slopes -= self.cross_entropy_share * p
            slopes *= (weights / (count * warmth))[:, None]
            named += slopes
            share = -slopes.sum(dim=-1, keepdim=True)
            gradient = q.mul_(share) if gradient is None else gradient.addcmul_(q, share)
        assert gradient is not None, "settings have temperatures"
        return losses / count, rates / count, gradient.scatter_add_(1, places, named)


def draft_loss(
    hidden: Tensor,
    output: Tensor,
    laws: Laws,
    distance: Distance,
    *,
    weights: Tensor,
    lines: Tensor | None = None,
    bias_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Give the sum of the losses of guesses times their weights [N], and how likely they are right [N].

    Their scores are hidden [N, hidden] times the frozen output layer [D, hidden], plus lines [N, rank] times bias_out
    [D, rank] where a draft has those.
    """
    arguments = hidden, lines, bias_out, output, laws, distance, weights
    found: tuple[Tensor, Tensor] = _DraftLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lines: Tensor | None,
        bias_out: Tensor | None,
        output: Tensor,
        laws: Laws,
        distance: Distance,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """In fp32: differences of a tenth between scores, which bf16 rounds off, are what laws are made of."""
        with torch.autocast(hidden.device.type, enabled=False):
            rows, columns = hidden.float(), output
            if lines is not None and bias_out is not None:
                rows = torch.cat([rows, lines.float()], dim=-1)
                columns = torch.cat([columns, bias_out.float()], dim=-1)
            num_frozen, num_rows = hidden.shape[1], max(1, _MOST_SCORES // len(output))
            total, rates = rows.new_zeros(()), torch.empty_like(weights)
            by_rows, by_columns = torch.empty_like(rows), torch.zeros_like(columns[:, num_frozen:])
            for first in range(0, len(rows), num_rows):
                part = slice(first, first + num_rows)
                losses, rates[part], gradient = distance.measure(rows[part] @ columns.T, laws.at(part), weights[part])
                total += (losses * weights[part]).sum()
                torch.mm(gradient, columns, out=by_rows[part])
                if lines is not None:
                    by_columns.addmm_(gradient.T, rows[part, num_frozen:])
        ctx.num_frozen, ctx.has_lines = num_frozen, lines is not None
        ctx.save_for_backward(by_rows, by_columns)
        ctx.mark_non_differentiable(rates)
        return total, rates

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """What was worked out on the way, times the slope of what the loss went into."""
        by_rows, by_columns = (gradient * slopes[0] for gradient in ctx.saved_tensors)
        by_lines = by_rows[:, ctx.num_frozen :] if ctx.has_lines else None
        by_bias_out = by_columns if ctx.has_lines else None
        return by_rows[:, : ctx.num_frozen], by_lines, by_bias_out, None, None, None, None


def survival_loss(log_odds: Tensor, accepted: Tensor) -> Tensor:
    """Give the loss [N] of a confidence head's log odds, against how likely the guesses were right [N]."""
    return binary_cross_entropy_with_logits(log_odds.float(), accepted, reduction="none")

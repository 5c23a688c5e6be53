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

from understudy.models.heads.draft_vocabulary import DraftVocabulary

_MOST_SCORES = 1 << 27
"""Scores that are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """The target's laws of N words at several temperatures, as what they are worked out from.

    Whole laws over all draft ids are kilobytes for each word. And the likeliest ids alone will not do: at temperature 1
    a small model has 5 to 20 % of its words outside the 64 likeliest, and a draft that never hears of those learns
    never to say them.
    """

    states: Tensor
    """[N, hidden] after the final norm: times the output layer, these are the logits"""
    log_totals: Tensor
    """[temperatures, N] log of the sum of exp(logit / temperature) over the whole vocabulary; none at 0"""
    best: Tensor
    """[N] the best word's place in the draft vocabulary, or -1"""

    def at(self, lines: Tensor | slice) -> Laws:
        """Those of some lines [M]."""
        return Laws(self.states[lines], self.log_totals[:, lines], self.best[lines])


@torch.no_grad()
def target_laws(states: Tensor, logits: Tensor, vocabulary: DraftVocabulary, temperatures: Sequence[float]) -> Laws:
    """The target's laws at temperatures, from its last states [N, hidden] and their logits [N, vocabulary]."""
    logits = logits.float()
    totals = [
        torch.logsumexp(logits / temperature, dim=-1) if temperature else torch.zeros_like(logits[:, 0])
        for temperature in temperatures
    ]
    return Laws(states, torch.stack(totals), vocabulary.places[logits.argmax(dim=-1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far laws are apart: the mean over temperatures of total variation mixed with cross-entropy."""

    temperatures: tuple[float, ...]
    cross_entropy_share: float

    def measure(self, scores: Tensor, logits: Tensor, laws: Laws, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the loss [N] of the draft's scores [N, D], how likely the guesses are right [N], and a gradient [N, D].

        The target's logits [N, D] are those of the draft ids. A guess is right as often as 1 - TV, and at temperature
        0 if the best words agree. The gradient is that of the losses times their weights [N], by the scores.
        """
        count, variation = len(self.temperatures), 1.0 - self.cross_entropy_share
        losses, rates = torch.zeros_like(weights), torch.zeros_like(weights)
        gradient: Tensor | None = None
        for warmth in sorted({temperature or 1.0 for temperature in self.temperatures}):
            log_q = (scores / warmth if warmth != 1.0 else scores).log_softmax(dim=-1)
            q = log_q.exp()
            slopes = torch.zeros_like(q)  # d loss / d log q
            for log_totals, temperature in zip(laws.log_totals, self.temperatures, strict=True):
                if (temperature or 1.0) != warmth:
                    continue
                if temperature:
                    p = (logits / temperature - log_totals[:, None]).exp_()
                    common = torch.minimum(p, q).sum(dim=-1)
                    losses += variation * (1.0 - common) - self.cross_entropy_share * (p * log_q).sum(dim=-1)
                    rates += common
                    slopes -= torch.where(q < p, variation * q, 0.0).add_(p, alpha=self.cross_entropy_share)
                else:
                    self._add_best(scores, log_q, laws.best, losses=losses, rates=rates, slopes=slopes)
            slopes *= (weights / (count * warmth))[:, None]
            found = slopes.sub_(q.mul_(slopes.sum(dim=-1, keepdim=True)))
            gradient = found if gradient is None else gradient.add_(found)
        assert gradient is not None, "settings have temperatures"
        return losses / count, rates / count, gradient

    def _add_best(
        self, scores: Tensor, log_q: Tensor, best: Tensor, *, losses: Tensor, rates: Tensor, slopes: Tensor
    ) -> None:
        """Add temperature 0: all of the law is on the best word [N], of which others may know nothing."""
        variation, is_known = 1.0 - self.cross_entropy_share, best >= 0
        places = best.clamp(min=0)[:, None]
        at_best = log_q.gather(1, places)[:, 0]
        losses += variation - is_known * (variation * at_best.exp() + self.cross_entropy_share * at_best)
        rates += scores.argmax(dim=-1) == best
        slopes.scatter_add_(1, places, -(is_known * (variation * at_best.exp() + self.cross_entropy_share))[:, None])


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

    Their scores are hidden [N, hidden] times the frozen output layer [D, hidden], which is the target's own, plus lines
    [N, rank] times bias_out [D, rank] where a draft has those.
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
                known = laws.at(part)
                losses, rates[part], gradient = distance.measure(
                    rows[part] @ columns.T, known.states.float() @ output.T, known, weights[part]
                )
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

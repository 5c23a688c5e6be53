"""What training makes small: the distance between the draft's law and the target's, as acceptance sees it.

    p   the target's law of the next word, over its whole vocabulary; only its draft ids [D] can be agreed on
    q   the draft's law, over its draft ids [D]
    TV  total variation, 1 - sum of min(p, q): the share of words that no coupling of the two can agree on

Cross-entropy alone spends effort where agreement is lost anyway, so it is only mixed in: its gradient does not vanish
where p and q have nothing in common.

At temperature 0 the target's law is all on its best word. The draft's law at temperature 1 stands against it there: its
own law at 0 has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

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

    def at(self, lines: Tensor) -> Laws:
        """Those of some lines [M]."""
        return Laws(self.places[lines], self.p[:, lines])


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


def draft_loss(
    draft_logits: Tensor, laws: Laws, temperatures: Sequence[float], *, cross_entropy_share: float
) -> tuple[Tensor, Tensor]:
    """Give the loss [N] of draft logits [N, D], and how likely the guesses are right [N]: means over temperatures.

    The loss is total variation mixed with cross-entropy. A guess is right as often as 1 - TV, and at temperature 0 if
    the best words agree.
    """
    draft_logits = draft_logits.float()
    at_laws = draft_logits.gather(-1, laws.places)  # [N, K]
    warmths = {temperature or 1.0 for temperature in temperatures}
    totals = {warmth: torch.logsumexp(draft_logits / warmth, dim=-1, keepdim=True) for warmth in sorted(warmths)}
    losses: list[Tensor] = []
    rates: list[Tensor] = []
    for p, temperature in zip(laws.p, temperatures, strict=True):
        warmth = temperature or 1.0
        log_q = at_laws / warmth - totals[warmth]
        common = torch.minimum(p, log_q.exp()).sum(dim=-1)
        cross_entropy = -(p * log_q).sum(dim=-1)
        losses.append((1.0 - cross_entropy_share) * (1.0 - common) + cross_entropy_share * cross_entropy)
        if temperature == 0.0:
            is_best = laws.places == draft_logits.detach().argmax(dim=-1, keepdim=True)
            rates.append((p * is_best).sum(dim=-1))
        else:
            rates.append(common.detach())
    return torch.stack(losses).mean(dim=0), torch.stack(rates).mean(dim=0)


def survival_loss(log_odds: Tensor, accepted: Tensor) -> Tensor:
    """Give the loss [N] of a confidence head's log odds, against how likely the guesses were right [N]."""
    return binary_cross_entropy_with_logits(log_odds.float(), accepted, reduction="none")

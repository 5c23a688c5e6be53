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

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

Laws = Tensor
"""[temperatures, N, D] the target's probabilities of the draft ids; what is missing to 1 is on other ids."""


@torch.no_grad()
def target_laws(logits: Tensor, draft_ids: Tensor, temperatures: Sequence[float]) -> Laws:
    """The target's laws at temperatures, from its logits [N, vocabulary]."""
    laws: list[Tensor] = []
    for temperature in temperatures:
        if temperature == 0.0:
            best = logits.argmax(dim=-1, keepdim=True)  # [N, 1]
            laws.append((draft_ids == best).to(torch.float32))
        else:
            scaled = logits.float() / temperature
            laws.append((scaled[:, draft_ids] - scaled.logsumexp(dim=-1, keepdim=True)).exp())
    return torch.stack(laws)


def draft_loss(
    draft_logits: Tensor, laws: Laws, temperatures: Sequence[float], *, cross_entropy_share: float
) -> tuple[Tensor, Tensor]:
    """Give the loss [N] of draft logits [N, D], and how likely the guesses are right [N]: means over temperatures.

    The loss is total variation mixed with cross-entropy. A guess is right as often as 1 - TV, and at temperature 0 if
    the best words agree.
    """
    losses: list[Tensor] = []
    rates: list[Tensor] = []
    for p, temperature in zip(laws, temperatures, strict=True):
        log_q = log_softmax(draft_logits.float() / (temperature or 1.0), dim=-1)
        common = torch.minimum(p, log_q.exp()).sum(dim=-1)
        cross_entropy = -(p * log_q).sum(dim=-1)
        losses.append((1.0 - cross_entropy_share) * (1.0 - common) + cross_entropy_share * cross_entropy)
        if temperature == 0.0:
            rates.append(p.gather(-1, draft_logits.argmax(dim=-1, keepdim=True))[:, 0])
        else:
            rates.append(common.detach())
    return torch.stack(losses).mean(dim=0), torch.stack(rates).mean(dim=0)


def survival_loss(log_odds: Tensor, accepted: Tensor) -> Tensor:
    """Give the loss [N] of a confidence head's log odds, against how likely the guesses were right [N]."""
    return binary_cross_entropy_with_logits(log_odds.float(), accepted, reduction="none")

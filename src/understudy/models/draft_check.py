"""Whether one model makes sense as the draft of another, told before minutes of loading and slow drafting.

A draft of any size leaves the words as they are, so only the plain mistake is refused: the two models in each other's
place. What merely costs speed is told.
"""

from __future__ import annotations

import math

from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.weights import expected_tensors

LARGEST_SHARE = 0.2
"""A draft is computed once per drafted token: above this part of its target, its passes eat what acceptance earns."""


def num_parameters(config: ModelConfig) -> int:
    """Count the weights of a model; an output layer tied to the embedding counts once."""
    return sum(math.prod(shape) for _, shape in expected_tensors(config))


def check_draft(
    target_config: ModelConfig, draft_config: ModelConfig, *, target_name: str, draft_name: str
) -> list[str]:
    """Refuse a draft that is larger than its target; give, in words, what else makes it a poor or an unusual one."""
    target_size, draft_size = num_parameters(target_config), num_parameters(draft_config)
    if draft_size > target_size:
        raise ModelError(
            f"The draft {draft_name} ({_millions(draft_size)}) is larger than its target {target_name} "
            f"({_millions(target_size)}).",
            f"Swap them: {draft_name} as the model and {target_name} as its draft.",
        )
    warnings: list[str] = []
    if draft_size > LARGEST_SHARE * target_size:
        warnings.append(
            f"The draft {draft_name} has {draft_size / target_size:.0%} of its target's size "
            f"({_millions(draft_size)} against {_millions(target_size)}): "
            f"above {LARGEST_SHARE:.0%}, drafting often costs more than it gains."
        )
    if draft_config.architecture != target_config.architecture:
        warnings.append(
            f"The draft {draft_name} is a {draft_config.architecture} model and its target a "
            f"{target_config.architecture} one: this works, but models of one family agree more often."
        )
    if draft_config.max_positions < target_config.max_positions:
        warnings.append(
            f"The draft {draft_name} reads at most {draft_config.max_positions:,} tokens and its target "
            f"{target_config.max_positions:,}: beyond that it drafts nothing."
        )
    return warnings


def _millions(num: int) -> str:
    return f"{num / 1e6:,.1f} million parameters"

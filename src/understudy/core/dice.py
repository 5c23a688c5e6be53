"""How a text's words are drawn, as numbers that a device can read: it then draws them without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Dice:
    """What a word hangs on besides the logits of its row and its position in the text."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int


def dice_of(sampling: SamplingParams, *, seed: int, choice: int) -> Dice | None:
    """The dice of one choice of a request, or None if its words hang on more than these.

    Bias, penalties and a minimum length change logits by what was said before, a grammar masks them, and log
    probabilities are told of them: such words are drawn on the host.
    """
    hangs_on_more = (
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.min_tokens > 0
        or sampling.grammar is not None
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
    )
    if hangs_on_more:
        return None
    return Dice(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed, choice)

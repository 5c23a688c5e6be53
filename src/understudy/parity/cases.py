"""What is asked in a proof: prompts, each with its own sampling parameters and seed, the same under every setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.assembly import Target
from understudy.bench.prompts import Prompt, own_prompts, prompt_ids, spread
from understudy.core.request import SamplingParams
from understudy.errors import InvalidRequest

LEAST_CASES = 8
"""Fewer prompts than this are joined by some of our own, so that every setting has enough to do."""
FIRST_SEED = 20_000
NUM_LOGPROBS = 2
_EXCERPT_CHARACTERS = 60
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"top_p": 0.9, "ignore_eos": True},
    {"frequency_penalty": 0.3, "presence_penalty": 0.3, "ignore_eos": True},
    {"top_k": 40, "min_p": 0.02, "ignore_eos": True},
    {},
    {"stop": ("\n\n",)},
    {"repetition_penalty": 1.1},
    {"min_tokens": 16},
    {"ignore_eos": True},
)
"""What is added to the temperature, in turn over the cases: each of these has state that a draft could disturb.

The first ones ignore the end of text: answers that are sure to be long are needed where blocks must run out.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how it is continued; only the temperature comes from the setting."""

    index: int
    prompt_class: str
    excerpt: str
    """How the prompt begins, so that it can be found."""
    prompt_ids: tuple[int, ...]
    variant: Mapping[str, Any]
    max_tokens: int
    """Already within what the context leaves beside the prompt."""

    @property
    def seed(self) -> int:
        """The seed of every run of this case."""
        return FIRST_SEED + self.index

    @property
    def num_tokens(self) -> int:
        """The most tokens that prompt and answer can come to."""
        return len(self.prompt_ids) + self.max_tokens

    def sampling(self, temperature: float) -> SamplingParams:
        """The parameters of a run at this temperature."""
        values = dict(self.variant)
        if "min_tokens" in values:
            values["min_tokens"] = min(values["min_tokens"], self.max_tokens)
        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, seed=self.seed, logprobs=NUM_LOGPROBS, **values
        )

    def describe(self) -> dict[str, Any]:
        """Say what it is, for the report."""
        return {
            "prompt": self.index,
            "class": self.prompt_class,
            "excerpt": self.excerpt,
            "prompt_tokens": len(self.prompt_ids),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "sampling": dict(self.variant),
        }


@dataclass(frozen=True, slots=True)
class CaseSet:
    """The cases of a proof, the shortest prompt first."""

    cases: tuple[Case, ...]
    page_tokens: int
    """Tokens of one block of the model that they were made for."""
    num_left_out: int = 0
    """Prompts that are longer than the model's context."""


def make_cases(prompts: Sequence[Prompt], target: Target, *, count: int, max_tokens: int) -> CaseSet:
    """Choose `count` prompts (at least 8) of every class in turn, and give each its parameters."""
    context = target.decoder.config.max_positions
    count = max(count, LEAST_CASES)
    chosen = spread(prompts, count)
    encoded = fitting(chosen, target)
    if not encoded:
        raise InvalidRequest(
            f"None of the {len(chosen)} prompts fits in the model's context of {context} tokens.",
            "Give shorter prompts.",
            parameter="prompts",
        )
    num_left_out = len(chosen) - len(encoded)
    if len(encoded) < LEAST_CASES:
        ours = [prompt for prompt in own_prompts() if prompt not in chosen]
        encoded += fitting(spread(ours, len(ours)), target)[: LEAST_CASES - len(encoded)]
    numbered = [(index, *encoded[index % len(encoded)]) for index in range(max(len(encoded), LEAST_CASES))]
    # The shortest first: four of them start together before blocks run short, where blocks are made scarce.
    numbered.sort(key=lambda entry: len(entry[2]))
    cases = [
        Case(
            index,
            prompt.prompt_class,
            excerpt(prompt),
            ids,
            variant=VARIANTS[place % len(VARIANTS)],
            max_tokens=min(max_tokens, context - len(ids)),
        )
        for place, (index, prompt, ids) in enumerate(numbered)
    ]
    return CaseSet(tuple(cases), target.page_tokens, num_left_out)


def fitting(prompts: Sequence[Prompt], target: Target) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Encode prompts, and leave out those that are too long for the model."""
    context = target.decoder.config.max_positions
    encoded = [(prompt, prompt_ids(prompt, target)) for prompt in prompts]
    return [(prompt, ids) for prompt, ids in encoded if 0 < len(ids) < context]


def excerpt(prompt: Prompt) -> str:
    """How a prompt begins, in one line."""
    text = str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text
    return " ".join(text[:_EXCERPT_CHARACTERS].split())

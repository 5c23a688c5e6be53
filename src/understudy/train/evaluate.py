"""How good a draft is, before it serves: its best words against answers that the target gave at temperature 0.

An answer is walked as an engine would walk it. Each cycle begins at an anchor, the draft's chain is compared with the
answer's own words up to the first that differs, and the words that agreed and one more (the target's own) are kept. At
temperature 0 that is what verification does. What it costs, and trees, are measured where they are served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from understudy.train.data import Sample, make_batch
from understudy.train.guesses import Guesser


@dataclass(slots=True)
class Tally:
    """Cycles of one class."""

    num_cycles: int = 0
    num_words: int = 0
    """Words that the cycles kept: those that agreed, and one of the target's own, if the answer went on."""
    asked: list[int] = field(default_factory=list)
    """[guesses] how often guess k was compared: all before it had agreed, and the answer went on"""
    agreed: list[int] = field(default_factory=list)
    """[guesses] how often it was right"""

    def add(self, guesses: Sequence[int], words: Sequence[int]) -> int:
        """Compare the guesses of one cycle with the words that came; give how many of them agreed."""
        num_agreed = 0
        for k, (guess, word) in enumerate(zip(guesses, words, strict=False)):
            while len(self.asked) <= k:
                self.asked.append(0)
                self.agreed.append(0)
            self.asked[k] += 1
            if guess != word:
                break
            self.agreed[k] += 1
            num_agreed += 1
        self.num_cycles += 1
        self.num_words += min(num_agreed + 1, len(words))
        return num_agreed

    def describe(self) -> dict[str, Any]:
        """Tokens per cycle, and how often each place is right if those before it were."""
        return {
            "cycles": self.num_cycles,
            "tokens_per_cycle": self.num_words / max(self.num_cycles, 1),
            "acceptance_by_position": [a / b for a, b in zip(self.agreed, self.asked, strict=True)],
        }


def walk(tally: Tally, sample: Sample, guesses: Sequence[Sequence[int]]) -> None:
    """Walk through an answer; guesses[n] are the chain whose first guess is about answer word n + 1.

    The answer's first word comes from reading the prompt and is no cycle's. The last cycles of an answer are cut short
    by its end: they are counted while a word is left to guess.
    """
    answer = sample.answer_ids
    place = 0  # the answer's last known word
    while place + 1 < len(answer):
        place += 1 + tally.add(guesses[place], answer[place + 1 :])


def evaluate(guesser: Guesser, samples: Iterable[Sample], *, max_length: int) -> dict[str, Tally]:
    """Measure a head on answers that were given at temperature 0, by class; others are left out."""
    tallies: dict[str, Tally] = {}
    for sample in samples:
        num_known = min(len(sample.token_ids), max_length)
        num_answer = num_known - sample.answer_start
        if sample.temperature != 0.0 or num_answer < 2:
            continue
        batch = make_batch([sample], max_length=max_length).to(guesser.teacher.device)
        reading = guesser.teacher.read(batch.token_ids, guesser.head.spec.feature_layers)
        first = sample.answer_start - 1
        anchors = torch.arange(first, first + num_answer - 1, device=guesser.teacher.device)[None]
        with guesser.computing():
            guesses = guesser.greedy(reading, anchors)[0].tolist()
        whole = Sample(
            token_ids=sample.token_ids[:num_known],
            answer_start=sample.answer_start,
            prompt_class=sample.prompt_class,
            temperature=0.0,
        )
        walk(tallies.setdefault(sample.prompt_class, Tally()), whole, guesses)
    return tallies


def describe(tallies: dict[str, Tally]) -> dict[str, Any]:
    """Every class, and the mean over classes of tokens per cycle."""
    by_class = {name: tally.describe() for name, tally in sorted(tallies.items())}
    rates = [told["tokens_per_cycle"] for told in by_class.values()]
    return {"classes": by_class, "mean_tokens_per_cycle": sum(rates) / len(rates) if rates else None}

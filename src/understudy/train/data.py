"""Answers to train on, as a file of JSON lines: token ids, where the answer begins, and how it came about.

    {"tokens": [1, 5, 9, ...], "answer": 17, "class": "math", "temperature": 0.7}

The file only grows, so collecting can stop anywhere and go on: a last line that was cut off is dropped. Which samples
a training step sees is a function of the seed and the step alone, so training can stop anywhere too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from understudy.errors import ConfigError

_AGAIN = "Delete it to collect anew."


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and the target's answer to it."""

    token_ids: tuple[int, ...]
    answer_start: int
    """Where the answer's first token stands."""
    prompt_class: str
    temperature: float

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The answer alone."""
        return self.token_ids[self.answer_start :]


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a file, each on a line of its own."""
    lines = [
        json.dumps(
            {
                "tokens": sample.token_ids,
                "answer": sample.answer_start,
                "class": sample.prompt_class,
                "temperature": sample.temperature,
            },
            separators=(",", ":"),
        )
        for sample in samples
    ]
    _drop_cut_line(path)
    with path.open("a", encoding="utf-8") as opened:
        opened.writelines(f"{line}\n" for line in lines)


def read_samples(path: Path, *, vocab_size: int) -> list[Sample]:
    """Read all whole lines of a file, none if there is no file. What no training could use is refused by its line."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    return [_parse(line, f"{path}, line {number}", vocab_size) for number, line in enumerate(whole.splitlines(), 1)]


def samples_digest(samples: Iterable[Sample]) -> str:
    """Name a set of samples by what is in it."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.token_ids, sample.answer_start]).encode())
    return f"sha256:{digest.hexdigest()}"


def split_samples(samples: Sequence[Sample], *, held_out_share: float) -> tuple[list[Sample], list[Sample]]:
    """Divide into those to train on and those to measure on: every n-th is held out, at least one, by its place."""
    assert 0.0 < held_out_share <= 0.5
    every = round(1.0 / held_out_share)
    held_out = [sample for place, sample in enumerate(samples) if place % every == every - 1]
    kept = [sample for place, sample in enumerate(samples) if place % every != every - 1]
    return (kept, held_out) if held_out else (kept[:-1], kept[-1:])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Texts side by side, filled up at their ends with 0."""

    token_ids: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]"""
    answer_starts: Tensor
    """[B]"""
    num_most_anchors: int
    """Of the text with most: places from which a word of its answer can be guessed"""

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            lengths=self.lengths.to(device),
            answer_starts=self.answer_starts.to(device),
        )

    def is_guessed(self, anchors: Tensor, k: int) -> Tensor:
        """Whether guess k from each anchor [B, A] is about a word of the text, from an anchor that serving has: [B, A].

        Guess k from anchor i is about x[i+2+k]. The first anchor of an answer is the last token of its prompt.
        """
        is_anchor = anchors >= (self.answer_starts - 1)[:, None]
        return is_anchor & (anchors + 2 + k < self.lengths[:, None])


class Batches:
    """All batches of an epoch, in an order that the seed and the epoch decide."""

    def __init__(
        self, samples: Sequence[Sample], *, max_length: int, tokens_per_batch: int, seed: int, length_step: int = 1
    ) -> None:
        """Put texts of like length together, up to so many tokens with what fills them up; cut longer texts off.

        They are filled up to a multiple of `length_step`.
        """
        usable = [sample for sample in samples if min(len(sample.token_ids), max_length) - sample.answer_start >= 2]
        if not usable:
            raise ConfigError(
                f"None of {len(samples)} answers has two words within {max_length} tokens.",
                "Collect longer answers, or allow longer texts.",
            )
        self._seed = seed
        self._max_length = max_length
        self._length_step = length_step
        self._batches: list[list[Sample]] = []
        batch: list[Sample] = []
        for sample in sorted(usable, key=lambda sample: len(sample.token_ids)):
            longest = -(-min(len(sample.token_ids), max_length) // length_step) * length_step
            if batch and longest * (len(batch) + 1) > tokens_per_batch:
                self._batches.append(batch)
                batch = []
            batch.append(sample)
        self._batches.append(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def number_at(self, step: int) -> int:
        """Which batch is a step's."""
        epoch, place = divmod(step, len(self._batches))
        generator = torch.Generator().manual_seed(step_seed(self._seed, epoch))
        return int(torch.randperm(len(self._batches), generator=generator)[place])

    def batch(self, number: int) -> Batch:
        """The batch of a number."""
        return make_batch(self._batches[number], max_length=self._max_length, length_step=self._length_step)


def make_batch(samples: Sequence[Sample], *, max_length: int, length_step: int = 1) -> Batch:
    """Put texts side by side, filled up to a multiple of `length_step`."""
    texts = [sample.token_ids[:max_length] for sample in samples]
    longest = -(-max(map(len, texts)) // length_step) * length_step
    filled = [[*text, *([0] * (longest - len(text)))] for text in texts]
    lengths, starts = [len(text) for text in texts], [sample.answer_start for sample in samples]
    most = max(length - 1 - start for length, start in zip(lengths, starts, strict=True))
    return Batch(torch.tensor(filled), torch.tensor(lengths), torch.tensor(starts), max(most, 0))


def step_seed(seed: int, step: int) -> int:
    """A seed for one step, far from those of other steps and other seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7])


def _drop_cut_line(path: Path) -> None:
    """Cut off what a killed run left of its last line."""
    if path.is_file():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as opened:
                opened.truncate(whole)


def _parse(line: bytes, where: str, vocab_size: int) -> Sample:
    try:
        value: Any = json.loads(line)
        tokens, start = value["tokens"], value["answer"]
        sample = Sample(
            token_ids=tuple(tokens),
            answer_start=start,
            prompt_class=str(value["class"]),
            temperature=float(value["temperature"]),
        )
        is_sound = all(type(t) is int and 0 <= t < vocab_size for t in tokens) and 0 < start <= len(tokens)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ConfigError(f"{where}: this is no sample of this model's answers.", _AGAIN)
    return sample

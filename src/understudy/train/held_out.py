"""Measures a trained draft on the prompts of answers that it did not learn from, as it will serve (train/evaluate.py).

What an arm came to is written down as soon as it is known, with the hash of the weights, so that measuring can stop
between two arms and go on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.assembly import Target, with_draft
from understudy.models.heads.files import SPEC_FILE, is_head_folder, read_declaration, replace_file
from understudy.train.data import Sample
from understudy.train.evaluate import Arm, Evaluation, Ids, describe, spread
from understudy.train.model_draft import read_card

_TEMPERATURES = (0.0, 1.0)
_SHAPES = ("chain", "tree")
_MODEL_SHAPES = ("chain",)
_MODEL_DEPTH = 4
"""Words that a draft which is a model guesses in a cycle."""


@dataclass(frozen=True, slots=True)
class Written:
    """A draft in a folder, as far as measuring must know it before it is loaded."""

    weights_hash: str
    shapes: tuple[str, ...]
    depth: int

    @classmethod
    def read(cls, folder: Path) -> Written:
        """Find out what a folder holds: a network with its spec, or a model with its card."""
        if is_head_folder(folder):
            declared = read_declaration(folder / SPEC_FILE)
            return cls(declared["weights"]["sha256"], _SHAPES, declared["num_tokens"])
        return cls(read_card(folder)["weights"]["sha256"], _MODEL_SHAPES, _MODEL_DEPTH)

    @property
    def arms(self) -> list[Arm]:
        """All ways to draft with it that are measured, by temperature."""
        return [
            Arm(shape=shape, temperature=temperature, max_depth=self.depth)
            for temperature in _TEMPERATURES
            for shape in self.shapes
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a draft is measured on."""

    samples: Sequence[Sample]
    """Of these the prompts alone: what is answered is for the arms to find."""
    prompts_by_class: int
    max_tokens: int

    @property
    def prompts(self) -> dict[str, list[Ids]]:
        """The prompts of every class; those that could not be answered are left out."""
        found: dict[str, list[Ids]] = {}
        for sample in self.samples:
            if sample.answer_ids:
                found.setdefault(sample.prompt_class, []).append(sample.token_ids[: sample.answer_start])
        return {name: spread(asked, self.prompts_by_class) for name, asked in sorted(found.items())}


def measure_held_out(
    load_target: Callable[[], Target],
    folder: Path,
    held_out: HeldOut,
    *,
    notes: Path,
    deadline_s: float = math.inf,
    watcher: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]] | None:
    """Measure the draft of a folder with every arm; None if the clock reaches the deadline before.

    The target is loaded if there is something left to do. `notes` is the file where arms are written down.
    """
    written = Written.read(folder)
    arms = written.arms
    prompts = held_out.prompts
    about = {
        "weights": written.weights_hash,
        "max_tokens": held_out.max_tokens,
        "prompts": {name: len(asked) for name, asked in prompts.items()},
    }
    told = _read_notes(notes, about)
    num_each, num_done = sum(map(len, prompts.values())), 0
    total = num_each * (len(arms) + len(_TEMPERATURES))

    def count() -> None:
        nonlocal num_done
        num_done += 1
        if watcher is not None:
            watcher(num_done, total)

    evaluation: Evaluation | None = None
    for place, arm in enumerate(arms):
        if place < len(told):
            continue
        if time.monotonic() >= deadline_s:
            return None
        if evaluation is None:
            target = load_target()
            drafted = with_draft(target, folder)
            evaluation = Evaluation(target, prompts, max_tokens=held_out.max_tokens, watcher=count)
            num_done = num_each * (place + place // len(written.shapes))
        told.append(describe(arm, evaluation.measure(drafted, arm)))
        replace_file(notes, json.dumps(about | {"arms": told}, indent=1).encode())
    return told


def _read_notes(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms that were measured before, of these weights on these prompts."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    is_same = isinstance(found, dict) and all(found.get(name) == value for name, value in about.items())
    return list(found["arms"]) if is_same else []

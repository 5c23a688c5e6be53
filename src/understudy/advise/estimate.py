"""The answer without a model: somebody's numbers, put into the arithmetic, and what follows from them in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from understudy.advise.arithmetic import (
    CycleCost,
    Point,
    best,
    break_even,
    sequences_displaced,
    speedup,
    stationary_depth,
    table,
)

DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CHANGES = (-0.2, -0.1, 0.0, 0.1)
"""By how much acceptance may be off, or change with the temperature."""
LARGEST_SHARE = 0.2
"""A draft that is larger than this part of its target seldom pays."""
WORTHWHILE = 1.05
"""Below this nobody would notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The memory of a draft model, and what else it could hold."""

    num_bytes: int
    target_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    context: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What somebody knows."""

    acceptance: tuple[float, ...]
    """One number, or one for each place of a draft."""
    cost: CycleCost
    depth: int | None = None
    """A depth that is set already; None looks for the best."""
    batches: tuple[int, ...] = (1,)
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of the advice where acceptance is another."""

    change: float
    acceptance: tuple[float, ...]
    best: Point
    kept: float
    """The speed-up of the depth that was advised before."""


@dataclass(frozen=True, slots=True)
class AtBatch:
    """What becomes of it where several sequences share a pass."""

    batch: int
    best: Point
    break_even: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What follows."""

    question: Question
    points: list[Point]
    best: Point
    break_even: float | None
    """The lowest acceptance at which any depth pays."""
    stationary_depth: float | None
    """Of constant acceptance; None where it differs by place."""
    changes: list[Change]
    batches: list[AtBatch]
    advice: list[str]
    """In words."""

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return asdict(self)


def estimate(question: Question) -> Estimate:
    """Answer a question."""
    cost = question.cost
    depths = sorted({*DEPTHS, *([question.depth] if question.depth is not None else [])})
    found = best(question.acceptance, cost)
    points = table(question.acceptance, cost, sorted({*depths, found.depth}))
    advised = found.depth if question.depth is None else question.depth
    batches = [_at_batch(question, batch) for batch in question.batches]
    constant = len(question.acceptance) == 1
    return Estimate(
        question=question,
        points=points,
        best=found,
        break_even=break_even(cost),
        stationary_depth=stationary_depth(question.acceptance[0], cost) if constant else None,
        changes=[_changed(question, change, advised) for change in CHANGES],
        batches=batches,
        advice=[*_on_depth(question, found), *_on_batches(question, batches), *_on_memory(question.draft)],
    )


def _changed(question: Question, change: float, depth: int) -> Change:
    acceptance = tuple(min(1.0, max(0.0, rate + change)) for rate in question.acceptance)
    return Change(change, acceptance, best(acceptance, question.cost), speedup(acceptance, depth, question.cost))


def _at_batch(question: Question, batch: int) -> AtBatch:
    cost = replace(question.cost, batch=batch)
    return AtBatch(batch, best(question.acceptance, cost), break_even(cost))


def _on_depth(question: Question, found: Point) -> list[str]:
    floor = break_even(question.cost)
    needed = "at no acceptance" if floor is None else f"from an acceptance of {floor:.2f} on"
    said: list[str] = []
    if found.depth == 0:
        said.append(f"Do not speculate: a drafted word costs more than it earns. At these costs it pays {needed}.")
    elif found.speedup < WORTHWHILE:
        said.append(
            f"Hardly worth it: {found.speedup:.2f} times the speed at best, with {_words(found.depth)} drafted ahead."
        )
    else:
        said.append(
            f"Draft {_words(found.depth)} ahead: {found.speedup:.2f} times the speed of plain decoding, with "
            f"{found.words_per_cycle:.2f} words per cycle. It pays {needed}."
        )
    if question.depth is not None and question.depth != found.depth:
        fixed = speedup(question.acceptance, question.depth, question.cost)
        verdict = "slower than plain decoding" if fixed < 1.0 else f"{fixed / found.speedup:.0%} of the best"
        said.append(f"At a depth of {question.depth} it is {fixed:.2f} times the speed: {verdict}.")
    if found.depth:
        lower = _changed(question, -0.2, question.depth or found.depth)
        falls = "a loss" if lower.kept < 1.0 else f"{lower.kept:.2f} times"
        said.append(
            "A higher temperature lowers acceptance. If it falls by 0.2, "
            f"the same depth gives {falls}, and the best one is {lower.best.depth}."
        )
    return said


def _on_batches(question: Question, batches: Sequence[AtBatch]) -> list[str]:
    if len(batches) < 2:
        return []
    if not question.cost.row_cost:
        return ["Rows are taken to cost nothing, so the batch makes no difference: give --row-cost."]
    losing = [at for at in batches if not at.best.depth]
    return [f"From a batch of {losing[0].batch} on, do not speculate."] if losing else []


def _on_memory(draft: Draft | None) -> list[str]:
    if draft is None:
        return []
    said = []
    if draft.target_bytes is not None and draft.num_bytes > LARGEST_SHARE * draft.target_bytes:
        said.append(
            f"The draft has {draft.num_bytes / draft.target_bytes:.0%} of its target's size: above "
            f"{LARGEST_SHARE:.0%}, drafting often costs more than it gains."
        )
    if draft.kv_bytes_per_token is not None:
        count = sequences_displaced(draft.num_bytes, kv_bytes_per_token=draft.kv_bytes_per_token, context=draft.context)
        said.append(
            f"The draft's weights take the memory of {count:.1f} sequences of {draft.context:,} tokens: "
            "where memory limits the batch, that is what it costs."
        )
    return said


def _words(depth: int) -> str:
    return "one word" if depth == 1 else f"{depth} words"

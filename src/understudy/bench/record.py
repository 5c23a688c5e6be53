"""The record of a run, as JSON: {"manifest": {...}, "rows": [...]}. This file is the rows' schema.

    tokens_per_s          tokens of all answers by the time during which at least one was awaited
    speedup               tokens_per_s by the baseline's, over turns in which both did the same work
    acceptance_rate       accepted by drafted positions; by position: matched there by walks that came there
    tokens_per_cycle      emitted tokens by verify passes
    rows_per_cycle        rows of those passes: 1 for the last committed token, and the drafted ones
    bandwidth_gb_s        what the target's passes must read by the seconds in them: weights, keys and values
    ttft, tpot, request   milliseconds to the first token, per token after it, and of the whole request
    identical             every answer is the baseline's (text, token ids, finish reason); of the baseline itself:
                          every repetition is equal to the first

A value is null where there is nothing to tell: acceptance without drafts, the memory and the bandwidth of a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.bench.alternate import Measured, Turn
from understudy.bench.served import ALL, Answer, StepTime
from understudy.bench.statistics import Estimate, Pair, percentile, speedup_estimate
from understudy.core.request import SpeculationCounts

PLAIN = "plain"
"""The drafter of the baseline."""
NONE = "none"
"""The baseline once more, under a name of its own: how far two equal arms differ is what a run cannot tell apart."""
DEFAULT = "default"
"""The drafter setting that a user gets without asking for another."""


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Memory of an arm; None where a server does not tell."""

    target: int | None = None
    draft: int | None = None
    kv: int | None = None

    def describe(self) -> dict[str, int | None]:
        """Put it into plain values."""
        return {"target": self.target, "draft": self.draft, "kv": self.kv}


@dataclass(frozen=True, slots=True)
class PassBytes:
    """What a pass of the target must read."""

    weights: int
    """Once, whatever its rows."""
    per_key: int
    """For each token that it attends to."""


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """What is known of an arm without measuring."""

    name: str
    weights: str = "unknown"
    numerics: str = "unknown"
    memory: MemoryBytes = field(default_factory=MemoryBytes)
    drafters: tuple[str, ...] = ()
    pass_bytes: PassBytes | None = None
    """None where a server does not tell."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of milliseconds over requests."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Take them from the values."""
        return cls(*(percentile(values, share) for share in (0.50, 0.95, 0.99)))

    def describe(self) -> dict[str, float | None]:
        """Put it into plain values."""
        return {"p50": _rounded(self.p50), "p95": _rounded(self.p95), "p99": _rounded(self.p99)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm on one class under one temperature and concurrency."""

    prompt_class: str
    drafter: str
    temperature: float
    concurrency: int | None
    """None in an open loop."""
    weights: str
    numerics: str
    tokens_per_s: float | None
    speedup: Estimate | None
    """None where there is no baseline."""
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    tokens_per_cycle: float | None
    rows_per_cycle: float | None
    bandwidth_gb_s: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    request_ms: Percentiles
    memory: MemoryBytes
    identical: bool

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "class": self.prompt_class,
            "drafter": self.drafter,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
            "weights": self.weights,
            "numerics": self.numerics,
            "tokens_per_s": _rounded(self.tokens_per_s),
            "speedup": _rounded(self.speedup.value if self.speedup else None, 4),
            "speedup_low": _rounded(self.speedup.low if self.speedup else None, 4),
            "speedup_high": _rounded(self.speedup.high if self.speedup else None, 4),
            "acceptance_rate": _rounded(self.acceptance_rate, 4),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "tokens_per_cycle": _rounded(self.tokens_per_cycle, 4),
            "rows_per_cycle": _rounded(self.rows_per_cycle, 4),
            "bandwidth_gb_s": _rounded(self.bandwidth_gb_s),
            "ttft_ms": self.ttft_ms.describe(),
            "tpot_ms": self.tpot_ms.describe(),
            "request_ms": self.request_ms.describe(),
            "memory_bytes": self.memory.describe(),
            "identical": self.identical,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The turns behind one row."""

    prompt_class: str
    temperature: float
    concurrency: int | None
    arm: ArmFacts
    baseline: ArmFacts
    turns: Sequence[Turn]

    @property
    def answers(self) -> list[Answer]:
        """All answers of the arm."""
        return [answer for turn in self.turns for answer in turn.served[self.arm.name].answers]

    @property
    def timed(self) -> list[Answer]:
        """Those of its answers whose latency means something: not those that only got a loop going."""
        return [
            answer for turn in self.turns for answer in turn.served[self.arm.name].answers[turn.unit.num_starting :]
        ]

    @property
    def busy_s(self) -> float:
        """Time of the arm."""
        return sum(turn.served[self.arm.name].busy_s for turn in self.turns)

    @property
    def pairs(self) -> list[Pair]:
        """What the baseline and the arm took, turn by turn. The same answers are the same tokens, however counted."""
        pairs = []
        for turn in self.turns:
            base, arm = turn.served[self.baseline.name], turn.served[self.arm.name]
            arm_tokens = base.num_tokens if arm.said == base.said else arm.num_tokens
            pairs.append(Pair(base.busy_s, base.num_tokens, arm.busy_s, arm_tokens))
        return pairs

    @property
    def steps(self) -> StepTime:
        """Where it went."""
        steps = StepTime()
        for turn in self.turns:
            steps.add(turn.served[self.arm.name].steps)
        return steps

    @property
    def key(self) -> dict[str, Any]:
        """What names the row."""
        return {
            "class": self.prompt_class,
            "drafter": self.arm.name,
            "temperature": self.temperature,
            "concurrency": self.concurrency,
        }


def groups(measured: Measured, arms: Sequence[ArmFacts]) -> Iterator[Group]:
    """Yield the groups of all rows; the first arm is the baseline."""
    conditions = dict.fromkeys((turn.unit.temperature, turn.unit.concurrency) for turn in measured.turns)
    for temperature, concurrency in conditions:
        here = [t for t in measured.turns if (t.unit.temperature, t.unit.concurrency) == (temperature, concurrency)]
        for name in (*dict.fromkeys(turn.unit.prompt_class for turn in here), ALL):
            for arm in arms:
                yield Group(
                    prompt_class=name,
                    temperature=temperature,
                    concurrency=concurrency,
                    arm=arm,
                    baseline=arms[0],
                    turns=[turn for turn in here if name in (ALL, turn.unit.prompt_class)],
                )


def row_of(group: Group) -> Row:
    """Sum up a group."""
    answers, timed = group.answers, group.timed
    num_tokens = sum(answer.num_tokens for answer in answers)
    told = [answer for answer in answers if answer.counts is not None]
    counts = _counts(told)
    return Row(
        prompt_class=group.prompt_class,
        drafter=group.arm.name,
        temperature=group.temperature,
        concurrency=group.concurrency,
        weights=group.arm.weights,
        numerics=group.arm.numerics,
        tokens_per_s=_ratio(num_tokens, group.busy_s),
        speedup=_speedup(group),
        acceptance_rate=_ratio(counts.accepted, counts.drafted),
        acceptance_by_position=tuple(
            matched / reached
            for matched, reached in zip(counts.matched_by_position, counts.reached_by_position, strict=True)
            if reached
        ),
        tokens_per_cycle=_ratio(sum(answer.num_tokens for answer in told), counts.cycles),
        rows_per_cycle=_ratio(counts.cycles + counts.rows, counts.cycles),
        bandwidth_gb_s=_bandwidth_gb_s(group),
        ttft_ms=Percentiles.of([a.ttft_ms for a in timed if a.ttft_ms is not None]),
        tpot_ms=Percentiles.of([a.tpot_ms for a in timed if a.tpot_ms is not None]),
        request_ms=Percentiles.of([a.request_ms for a in timed]),
        memory=group.arm.memory,
        identical=_identical(group),
    )


def samples_of(group: Group) -> dict[str, Any]:
    """The single latencies behind a row's percentiles, for whoever draws distributions."""
    answers = group.timed
    return {
        **group.key,
        "ttft_ms": [round(a.ttft_ms, 3) for a in answers if a.ttft_ms is not None],
        "tpot_ms": [round(a.tpot_ms, 3) for a in answers if a.tpot_ms is not None],
        "request_ms": [round(a.request_ms, 3) for a in answers],
    }


def cycle_time_of(group: Group) -> dict[str, Any] | None:
    """Where the time of a row's steps went, in mean seconds of a step; None where a server does not tell.

    A GPU is at the next pass while the host tells of the last one: `hidden_s` of `sample_s` took nobody's time.
    """
    steps = group.steps
    if not steps.num_steps:
        return None
    inside_s = steps.draft_s + steps.forward_s + steps.sample_s
    return {
        **group.key,
        "num_steps": steps.num_steps,
        "draft_s": round(steps.draft_s / steps.num_steps, 9),
        "forward_s": round(steps.forward_s / steps.num_steps, 9),
        "sample_s": round(steps.sample_s / steps.num_steps, 9),
        "other_s": round(max(0.0, group.busy_s - inside_s) / steps.num_steps, 9),
        "hidden_s": round(max(0.0, inside_s - group.busy_s) / steps.num_steps, 9),
    }


def _bandwidth_gb_s(group: Group) -> float | None:
    read, steps = group.arm.pass_bytes, group.steps
    if read is None:
        return None
    return _ratio((steps.num_steps * read.weights + steps.num_keys * read.per_key) / 1e9, steps.forward_s)


def _speedup(group: Group) -> Estimate | None:
    if group.arm.name == group.baseline.name:
        return Estimate(1.0, 1.0, 1.0) if group.arm.name == PLAIN else None
    return speedup_estimate(group.pairs)


def _identical(group: Group) -> bool:
    """Compare with the baseline's answer of the same turn, and the baseline with its own first to the question."""
    is_baseline = group.arm.name == group.baseline.name
    first: dict[tuple[str, int], Answer] = {}  # by question and the length that its answer may have
    for turn in group.turns:
        arm, base = turn.served[group.arm.name], turn.served[group.baseline.name]
        for question, found, theirs in zip(turn.unit.questions, arm.answers, base.answers, strict=True):
            key = question.name, question.max_tokens
            expected = first.setdefault(key, theirs) if is_baseline else theirs
            if found.said != expected.said:
                return False
    return True


def _counts(answers: Sequence[Answer]) -> SpeculationCounts:
    counts = SpeculationCounts()
    for answer in answers:
        if answer.counts is not None:
            counts.add(answer.counts)
    return counts


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)

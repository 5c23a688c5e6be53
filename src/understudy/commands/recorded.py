"""Recorded traffic as transcripts: what a folder holds, and what cannot be replayed, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from understudy.advise.replay import ALL
from understudy.advise.transcript import Transcript
from understudy.advise.what_if import classes_of
from understudy.core.request import SpeculationCounts
from understudy.errors import ConfigError
from understudy.server.record import RecordedRequest, read_records

_MOST_TOKENS = 2**31
"""Ids beyond it are no ids."""


@dataclass(frozen=True, slots=True)
class Records:
    """What a folder holds. All of it is replayed: what one class said is history for the others."""

    requests: tuple[RecordedRequest, ...]
    transcripts: tuple[Transcript, ...]
    left_out: dict[str, int]
    """Reason -> choices that cannot be replayed."""
    num_torn: int
    """Lines that are no records: a server died while it wrote."""
    classes: tuple[str, ...]
    """Those that are told of: the ones asked for, or each one and all together."""

    @property
    def largest_token(self) -> int:
        """The largest id of any prompt or answer."""
        return max(token for t in self.transcripts for token in (*t.request.prompt_ids, *t.answer_ids))


@dataclass(frozen=True, slots=True)
class Summary:
    """What was recorded of one class."""

    workload_class: str
    num_requests: int
    num_tokens: int
    counts: SpeculationCounts | None
    """What drafts did at the time, if every record tells."""

    @property
    def tokens_per_cycle(self) -> float | None:
        """At the time."""
        return None if self.counts is None else self.num_tokens / max(1, self.counts.cycles)

    def describe(self) -> str:
        """Say it in a line."""
        asked = f"{self.num_requests} requests, {self.num_tokens} tokens"
        counts = self.counts
        if counts is None:
            return f"{asked}; what drafts did at the time is not in all of the records"
        drafted = f"{counts.accepted} of {counts.drafted} drafted accepted" if counts.drafted else "nothing drafted"
        return f"{asked}; at the time {self.tokens_per_cycle:.2f} tokens per cycle, {drafted}"

    def to_json(self) -> dict[str, Any]:
        """Put it into plain values."""
        counts = None if self.counts is None else asdict(self.counts)
        return {
            "class": self.workload_class,
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            "recorded": counts,
        }


def read_folder(directory: Path, *, classes: Sequence[str] = ()) -> Records:
    """Read the records of a folder, all classes if none is named."""
    if not directory.is_dir():
        raise ConfigError(f"There is no folder {directory}.", "Name the one given to `understudy serve --record`.")
    torn: list[str] = []
    everything = tuple(read_records(directory, tell=torn.append))
    if not everything:
        lost = f", only {len(torn)} lines that are none" if torn else ""
        raise ConfigError(f"There are no records in {directory}{lost}.", "`understudy serve --record DIR` writes them.")
    there = {record.request.workload_class for record in everything}
    unknown = [name for name in classes if name not in there]
    if unknown:
        raise ConfigError(f"No record is of class {unknown[0]!r}.", f"There are {', '.join(sorted(there))}.")
    left_out: Counter[str] = Counter()
    transcripts = [t for record in everything for t in _transcripts(record, left_out)]
    if not transcripts:
        raise ConfigError(f"Nothing in {directory} can be replayed: {'; '.join(left_out)}.")
    told = tuple(classes) or tuple(classes_of(transcripts))
    return Records(everything, tuple(transcripts), dict(left_out), len(torn), told)


def summaries_of(records: Records) -> list[Summary]:
    """What was recorded, by class."""
    return [_summary(name, records) for name in records.classes]


def _transcripts(record: RecordedRequest, left_out: Counter[str]) -> list[Transcript]:
    found = []
    for choice, answer in enumerate(record.answers):
        if record.seed is None or not answer:
            left_out["they ended before a word was said"] += 1
            continue
        if not all(0 <= token < _MOST_TOKENS for token in (*record.request.prompt_ids, *answer)):
            left_out["they hold tokens that no vocabulary has"] += 1
            continue
        found.append(
            Transcript(
                request=record.request,
                answer_ids=answer,
                seed=record.seed,
                choice=choice,
                finished=record.outcome == "finished",
                run=record.run,
                arrived_s=record.arrived_s,
                ended_s=record.arrived_s + max(0.0, record.ended_s or 0.0),
            )
        )
    return found


def _summary(name: str, records: Records) -> Summary:
    requests = [r for r in records.requests if name in (ALL, r.request.workload_class)]
    transcripts = [t for t in records.transcripts if name in (ALL, t.workload_class)]
    counts: SpeculationCounts | None = SpeculationCounts()
    for record in requests:
        if counts is not None and record.speculation is not None:
            counts.add(record.speculation)
        else:
            counts = None
    return Summary(name, len(requests), sum(t.num_tokens for t in transcripts), counts)

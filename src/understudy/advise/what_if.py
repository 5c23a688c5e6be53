"""What other settings would have done with recorded traffic, by class.

Every setting is one drafter at one depth, forced, or the engine's own rule, which chooses row by row. Each is
scored on every transcript; then time is modelled for as many texts at once as are asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from understudy.advise.replay import ALL, Watcher, replayable, score, score_policy
from understudy.advise.scores import Score, TimeModel, by_class, speedup
from understudy.advise.settings import Machine, Setting
from understudy.advise.transcript import Transcript
from understudy.bench.statistics import Estimate

LEAST_TRANSCRIPTS = 5
"""Fewer of a class say too little about how much they differ: nothing is advised on them."""
EXACT_AND_MODELLED = (
    "At a given depth, acceptance and tokens per cycle are exact: words do not depend on drafts. Time is modelled from "
    "what passes cost and what asking took, with texts of the same kind in each pass; where the engine decides (auto), "
    "it decides by that cost."
)

Told = Callable[[str, int, int], None]
"""What is being replayed, how many texts are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting for one class, at one number of texts at once."""

    workload_class: str
    drafter: str
    depth: int | None
    concurrency: int
    num_texts: int
    cycles: int
    drafted: int
    accepted: int
    rows_per_cycle: float
    tokens_per_cycle: float
    acceptance: float | None
    acceptance_by_position: tuple[float, ...]
    speedup: Estimate | None

    @property
    def pays(self) -> bool:
        """Whether it is faster than plain at the lower end of its interval."""
        return self.speedup is not None and self.num_texts >= LEAST_TRANSCRIPTS and self.speedup.low > 1.0

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Found:
    """All that was found out."""

    rows: tuple[Row, ...]
    cut: tuple[str, ...]
    """Settings that the budget left no time for."""
    left_out: dict[str, int]
    """Reason -> transcripts that the engine's own rule was not replayed on."""

    def best(self, workload_class: str, concurrency: int) -> Row | None:
        """The fastest setting that pays for a class; None: do not speculate."""
        paying = [row for row in self.rows_of(workload_class, concurrency) if row.pays]
        return max(paying, key=_speed, default=None)

    def rows_of(self, workload_class: str, concurrency: int) -> list[Row]:
        """The rows of a class, in order of the settings."""
        return [row for row in self.rows if (row.workload_class, row.concurrency) == (workload_class, concurrency)]


def what_if(
    transcripts: Sequence[Transcript],
    settings: Sequence[Setting],
    *,
    machine: Machine,
    concurrencies: Sequence[int] = (1,),
    max_rows: int = 32,
    budget_s: float = math.inf,
    told: Told | None = None,
) -> Found:
    """Score every setting, in order, until the time is over."""
    deadline_s = time.monotonic() + budget_s
    kept, left_out = replayable(transcripts)
    rows: list[Row] = []
    cut: list[str] = []
    for setting in settings:

        def watch(done: int, total: int, name: str = str(setting)) -> None:
            if told is not None:
                told(name, done, total)
            if time.monotonic() > deadline_s and done < total:
                raise _OutOfTime

        try:
            for found in _score(setting, transcripts if setting.depths else kept, machine, max_rows, watch):
                rows += _rows(found, setting, machine, concurrencies)
        except _OutOfTime:
            cut.append(str(setting))
    return Found(tuple(rows), tuple(cut), {entry.reason: len(entry.transcripts) for entry in left_out})


def _score(
    setting: Setting, transcripts: Sequence[Transcript], machine: Machine, max_rows: int, watcher: Watcher
) -> list[Score]:
    limits = machine.limits
    if setting.depths is None:
        return [score_policy(setting.make, transcripts, cost=machine.cost, limits=limits, watcher=watcher)]
    return score(
        lambda: setting.make()[0],
        transcripts,
        depths=setting.depths,
        max_rows=max_rows,
        limits=limits,
        watcher=watcher,
    )


class _OutOfTime(Exception):
    """The budget is spent."""


def _rows(found: Score, setting: Setting, machine: Machine, concurrencies: Sequence[int]) -> list[Row]:
    rows = []
    classes = by_class(found)
    for part in [*classes, found] if len(classes) > 1 else classes:
        # the engine's own rule was replayed for one text at a time: among many it would buy less
        for concurrency in concurrencies if found.depth is not None else [c for c in concurrencies if c == 1]:
            model = TimeModel(machine.cost, machine.draft_cost, batch=concurrency)
            rows.append(
                Row(
                    workload_class=part.workload_class,
                    drafter=setting.name,
                    depth=found.depth,
                    concurrency=concurrency,
                    num_texts=len(part.scores),
                    cycles=part.counts.cycles,
                    drafted=part.counts.drafted,
                    accepted=part.counts.accepted,
                    rows_per_cycle=part.rows_per_cycle,
                    tokens_per_cycle=part.tokens_per_cycle,
                    acceptance=part.acceptance,
                    acceptance_by_position=tuple(part.acceptance_by_position),
                    speedup=speedup(part.scores, model),
                )
            )
    return rows


def _speed(row: Row) -> float:
    return 0.0 if row.speedup is None else row.speedup.value


def classes_of(transcripts: Sequence[Transcript]) -> list[str]:
    """The classes there are, in order of the alphabet, and all of them together where there are several."""
    names = sorted({transcript.workload_class for transcript in transcripts})
    return [*names, ALL] if len(names) > 1 else names

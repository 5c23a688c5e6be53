"""What a cycle takes on this costs, put together from measured parts, and how long texts take that share passes.

    cycle = the target's pass over all rows and contexts        measured: `measure_passes`
          + asking: as timed in the replay for drafters that look things up; for a draft model its passes, measured
          + what the engine does beside that, for a step, a sequence and a word      measured: `fit_host`

Texts share passes in lanes: `concurrency` of them at once, and when one ends the next one takes its place. Every lane
waits for the longest draft of all. Passes over prompts are left out, on both sides: this is the time of decoding.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from understudy.advise.scores import Score, ScoredCycle
from understudy.advise.transcript import Transcript
from understudy.bench.statistics import Estimate, Pair, speedup_estimate
from understudy.control.cost import CostModel, Load
from understudy.core.events import Cycle

TimeStep = Callable[[int, int], float]
"""Seconds of one pass over so many rows of a sequence of that length."""

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
_LEAST_REPEATS = 3
_MOST_REPEATS = 15
_LEAST_STEPS = 3
"""The median of fewer steps may be another program's time."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """What the engine does in a step beside the pass and the drafting."""

    step_s: float = 0.0
    """Once."""
    sequence_s: float = 0.0
    """For each sequence, with the one word that every pass says."""
    word_s: float = 0.0
    """For each word beyond that."""

    def seconds(self, num_sequences: int, num_words: int) -> float:
        """Of one step."""
        further = max(0, num_words - num_sequences)
        return self.step_s + num_sequences * self.sequence_s + further * self.word_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things cost here."""

    cost: CostModel
    draft_cost: CostModel | None = None
    host: HostCost = HostCost()

    def step_s(self, cycles: Sequence[ScoredCycle]) -> float:
        """Seconds of one step of the engine: a cycle of each of some texts, in one pass."""
        load = Load.of((1 + cycle.rows, cycle.context) for cycle in cycles)
        words = sum(cycle.emitted for cycle in cycles)
        return self.cost.step_s(load) + self.host.seconds(len(cycles), words) + self._asking_s(cycles)

    def _asking_s(self, cycles: Sequence[ScoredCycle]) -> float:
        """Looking things up, one text after the other; and a draft model's passes, which the texts share."""
        looking_s = sum(cycle.asking_s for cycle in cycles)
        reading = [cycle for cycle in cycles if cycle.read_rows]
        if not reading:
            return looking_s
        assert self.draft_cost is not None, "a draft model drafted: what its passes cost must be known"
        first = Load.of((c.read_rows, max(0, c.context + 1 - c.read_rows)) for c in reading)
        further = (
            Load.of((1, c.context + number) for c in reading if c.draft_passes > number)
            for number in range(1, max(cycle.draft_passes for cycle in reading))
        )
        return looking_s + sum(map(self.draft_cost.step_s, (first, *further)))


class SharedCost(CostModel):
    """What a pass costs one of several texts that do the same in it: for a rule that decides for one text.

    With n texts, r rows of each cost what n * r rows cost. It stays as it was measured: whoever replays one text alone
    has nothing to correct it by.
    """

    @classmethod
    def of(cls, cost: CostModel, num_texts: int) -> SharedCost:
        """The cost of a pass that this many texts share."""
        rows_s = {rows: cost.step_s(Load(num_texts * rows, 0, 0)) for rows in cost.rows_s}
        scale = cost.drift * num_texts
        return cls(rows_s, scale * cost.per_key_s, scale * cost.per_read_s)

    def observe(self, load: Load, seconds: float, base: Load | None = None) -> None:
        """Take no notice."""


def plain_cycles(transcript: Transcript) -> list[ScoredCycle]:
    """The cycles of a text without drafts: one for each word but the first, which the prompt's pass says."""
    first = len(transcript.request.prompt_ids)
    contexts = range(first, first + transcript.num_tokens - 1)
    return [ScoredCycle(context=c, rows=0, depth=0, accepted=0, emitted=1, asking_s=0.0) for c in contexts]


def seconds_of(texts: Sequence[Sequence[ScoredCycle]], costs: Costs, concurrency: int) -> list[float]:
    """Seconds that each text's lane took, as its share of the steps that it was in."""
    spent_s = [0.0] * len(texts)
    waiting = deque((index, deque(cycles)) for index, cycles in enumerate(texts) if cycles)
    lanes: list[tuple[int, deque[ScoredCycle]]] = []
    while waiting or lanes:
        while waiting and len(lanes) < concurrency:
            lanes.append(waiting.popleft())
        step_s = costs.step_s([cycles.popleft() for _, cycles in lanes])
        for index, _ in lanes:
            spent_s[index] += step_s / len(lanes)
        lanes = [(index, cycles) for index, cycles in lanes if cycles]
    return spent_s


def expected_speedup(score: Score, costs: Costs, *, concurrency: int = 1) -> Estimate | None:
    """Speed of decoding by the speed of plain decoding, with the interval that drawing texts again and again gives.

    None where no text has a second word.
    """
    long = [found for found in score.scores if found.transcript.num_tokens > 1]
    plain_s = seconds_of([plain_cycles(found.transcript) for found in long], costs, concurrency)
    spent_s = seconds_of([found.cycles for found in long], costs, concurrency)
    words = [found.transcript.num_tokens - 1 for found in long]
    return speedup_estimate([Pair(*line) for line in zip(plain_s, words, spent_s, words, strict=True)])


class PassProfile:
    """What passes took, each beside a pass of one row, so that a machine that drifts does not matter.

    What decides is the ratio of passes to each other. So each is compared with a pass of one row right before it, and
    the median of the ratios counts.
    """

    def __init__(self, time_step: TimeStep, *, long_context: int, most_rows: int) -> None:
        self._time_step = time_step
        self._long_context = long_context
        self._grid = [rows for rows in _ROWS if rows <= max(8, most_rows)]
        points = [*((rows, 0) for rows in self._grid), (1, long_context), (8, long_context)]
        self._ratios: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        self._ones: list[float] = []
        time_step(1, 0)  # the first pass pays for compiling and for touching memory

    def sample(self) -> None:
        """Time every kind of pass once more."""
        for point, ratios in self._ratios.items():
            one_s = self._time_step(1, 0)
            self._ones.append(one_s)
            ratios.append(self._time_step(*point) / one_s)

    def model(self) -> CostModel:
        """The cost of passes, from all that was timed."""
        one_s = statistics.median(self._ones)
        seconds = {point: one_s * statistics.median(found) for point, found in self._ratios.items()}
        # a larger pass takes no less time: where it seems so, the smaller one was disturbed
        table = {rows: min(seconds[more, 0] for more in self._grid if more >= rows) for rows in self._grid}
        long = self._long_context
        one = max(0.0, seconds[1, long] - seconds[1, 0]) / long  # per key and per read
        eight = max(0.0, seconds[8, long] - seconds[8, 0]) / long  # per key and eight times per read
        per_read = max(0.0, (eight - one) / 7)
        return CostModel(table, max(0.0, one - per_read), per_read)


def measure_passes(profile: PassProfile, *, budget_s: float = 10.0) -> CostModel:
    """Measure what rows and context cost, for as long as there is time and it makes a difference."""
    started_s = time.monotonic()
    for number in range(_MOST_REPEATS):
        if number >= _LEAST_REPEATS and time.monotonic() - started_s > budget_s:
            break
        profile.sample()
    return profile.model()


def fit_host(cycles: Iterable[Cycle]) -> HostCost:
    """What steps took beside the pass and the drafting, fitted to the medians of steps of the same size.

    Steps over prompts are left out. With nothing to go by it is nothing.
    """
    by_size: dict[tuple[int, int], list[float]] = {}
    for cycle in cycles:
        if cycle.num_prompt_rows == 0 and cycle.num_sequences:
            further = max(0, cycle.num_emitted - cycle.num_sequences)
            host_s = cycle.total_s - cycle.forward_s - cycle.draft_s
            by_size.setdefault((cycle.num_sequences, further), []).append(host_s)
    often = {size: found for size, found in by_size.items() if len(found) >= _LEAST_STEPS}
    by_size = often or by_size
    if not by_size:
        return HostCost()
    sizes = np.array([(1, *size) for size in by_size], dtype=float)
    seconds = np.array([statistics.median(found) for found in by_size.values()])
    weights = np.sqrt([len(found) for found in by_size.values()])
    parts = [part for part in range(3) if sizes[:, part].any()]
    while parts:
        fitted = np.linalg.lstsq(sizes[:, parts] * weights[:, None], seconds * weights, rcond=None)[0]
        if fitted.min() >= 0.0:
            break
        parts.pop(int(fitted.argmin()))  # nothing takes less than no time: left out, and the others anew
    found = dict(zip(parts, map(float, fitted), strict=True)) if parts else {}
    return HostCost(*(found.get(part, 0.0) for part in range(3)))

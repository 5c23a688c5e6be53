"""What a replay found, and the time that it would have taken.

Acceptance is exact: words do not depend on drafts. Time is modelled, out of measured parts:

    cycle = the target's pass over its rows and context
          + what asking took: as timed while replaying for drafters that only look things up,
            or the passes of a draft model, in the cost that was measured for them

With `batch` above one, that many texts of the same kind share each pass: rows, contexts and asking add up. A real batch
mixes texts that are good and bad to draft for; this one does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from understudy.advise.transcript import Transcript
from understudy.bench.statistics import BOOTSTRAP_SEED, CONFIDENCE, NUM_RESAMPLES, Estimate
from understudy.control.cost import CostModel, Load
from understudy.core.request import SpeculationCounts


@dataclass(frozen=True, slots=True)
class ScoredCycle:
    """One draft and one walk along the known words. The prompt's pass, which says the first word, is none."""

    context: int
    """Tokens in the target's cache before it."""
    rows: int
    """Drafted nodes that were verified, beside the one row that every pass computes."""
    depth: int
    """Drafted positions on the longest path."""
    accepted: int
    emitted: int
    """Words said: accepted and the bonus, unless the text ended on an accepted one."""
    asking_s: float
    """Seconds of this thread that asking and choosing took, the passes of a draft model not counted."""
    draft_passes: int = 0
    """Passes of a draft model."""
    read_rows: int = 0
    """Rows of the first of them: what it had not read yet."""


@dataclass(frozen=True, slots=True)
class TranscriptScore:
    """One transcript under one setting."""

    transcript: Transcript
    counts: SpeculationCounts
    """As the engine would have counted, the pass over the prompt included."""
    cycles: tuple[ScoredCycle, ...]


@dataclass(frozen=True)
class Score:
    """Transcripts of one class (or of all) under one setting."""

    workload_class: str
    drafter: str
    """Names with a plus between where several drafted."""
    depth: int | None
    """None where the engine's policy chose."""
    scores: tuple[TranscriptScore, ...]

    @cached_property
    def counts(self) -> SpeculationCounts:
        """Those of all transcripts."""
        total = SpeculationCounts()
        for score in self.scores:
            total.add(score.counts)
        return total

    @property
    def num_tokens(self) -> int:
        """Words said."""
        return sum(score.transcript.num_tokens for score in self.scores)

    @property
    def acceptance(self) -> float | None:
        """Accepted by drafted positions; None where nothing was drafted."""
        return self.counts.accepted / self.counts.drafted if self.counts.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Matched by walks that came there, from the first position on."""
        counts = self.counts
        return [m / r for m, r in zip(counts.matched_by_position, counts.reached_by_position, strict=True)]

    @property
    def tokens_per_cycle(self) -> float:
        """Words per pass, the prompt's pass included."""
        return self.num_tokens / max(1, self.counts.cycles)

    @property
    def rows_per_cycle(self) -> float:
        """Drafted rows per cycle after the prompt's."""
        return self.counts.rows / max(1, sum(len(score.cycles) for score in self.scores))


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of cycles, out of measured parts."""

    cost: CostModel
    """Of the target's passes."""
    draft_cost: CostModel | None = None
    """Of a draft model's; needed where one drafted."""
    batch: int = 1
    """Texts of the same kind that share each pass."""
    word_s: float = 0.0
    """What drawing a word costs beyond the pass, with and without drafts alike."""
    with_prompt: bool = False
    """Whether the pass over the prompt counts, on both sides alike."""

    def cycle_s(self, cycle: ScoredCycle) -> float:
        """Seconds of one cycle, as each of the batch waits for it."""
        target_s = self.cost.step_s(self._load(1 + cycle.rows, cycle.context))
        return target_s + self.batch * (cycle.asking_s + cycle.emitted * self.word_s) + self._passes_s(cycle)

    def spent_s(self, score: TranscriptScore) -> float:
        """Seconds of a whole transcript as it was replayed."""
        return self._prompt_s(score.transcript) + sum(map(self.cycle_s, score.cycles))

    def plain_s(self, transcript: Transcript) -> float:
        """Seconds of the same words without drafts: a pass for each but the first, which the prompt's pass says."""
        first, num_passes = len(transcript.request.prompt_ids), transcript.num_tokens - 1
        # a pass of one row takes longer with each token of context by the same amount: the mean is that of the ends
        ends_s = [self.cost.step_s(self._load(1, context)) for context in (first, first + max(0, num_passes - 1))]
        return self._prompt_s(transcript) + num_passes * (sum(ends_s) / 2 + self.batch * self.word_s)

    def _load(self, rows: int, context: int) -> Load:
        return Load(self.batch * rows, self.batch * context, self.batch * rows * context)

    def _prompt_s(self, transcript: Transcript) -> float:
        return self.cost.step_s(self._load(len(transcript.request.prompt_ids), 0)) if self.with_prompt else 0.0

    def _passes_s(self, cycle: ScoredCycle) -> float:
        if not cycle.read_rows:
            return 0.0
        assert self.draft_cost is not None, "a draft model drafted: what its passes cost must be given"
        read_s = self.draft_cost.step_s(self._load(cycle.read_rows, max(0, cycle.context + 1 - cycle.read_rows)))
        further = max(0, cycle.draft_passes - 1)
        return read_s + further * self.draft_cost.step_s(self._load(1, cycle.context + 1))


def modelled_s(scores: Iterable[TranscriptScore], model: TimeModel) -> float:
    """Seconds that the transcripts would have taken, one after the other."""
    return sum(map(model.spent_s, scores))


def speedup(scores: Sequence[TranscriptScore], model: TimeModel) -> Estimate | None:
    """Plain seconds by modelled seconds, with the interval that drawing transcripts again and again gives.

    None where no transcript has a second word. A single transcript says nothing about the spread: its interval is
    the point.
    """
    long = [score for score in scores if score.transcript.num_tokens > 1]
    if not long:
        return None
    plain_s = np.array([model.plain_s(score.transcript) for score in long])
    spent_s = np.array([model.spent_s(score) for score in long])
    value = float(plain_s.sum() / spent_s.sum())
    if len(long) == 1:
        return Estimate(value, value, value)
    draw = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = (draw.integers(len(long), size=len(long)) for _ in range(NUM_RESAMPLES))
    ratios = [plain_s[chosen].sum() / spent_s[chosen].sum() for chosen in drawn]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def by_class(score: Score) -> list[Score]:
    """The same, apart for each class, in order of the alphabet."""
    classes = sorted({found.transcript.workload_class for found in score.scores})
    return [
        Score(name, score.drafter, score.depth, tuple(s for s in score.scores if s.transcript.workload_class == name))
        for name in classes
    ]

"""A draft model scored at every depth by reading each text once.

A draft model says one word after the other, and while its words are right what it has read is the text itself. So
whether its next word is right depends on the place in the text alone, not on the depth or on where a cycle began:

    text        t1 t2 t3 t4 t5 t6
    its words   t1 t2 x  t4 t5 t6     after t2 a cycle of any depth accepts nothing; after t3 it accepts t4, t5, t6

One word is asked for at each place, which costs a pass of the draft for each word of the text. All depths follow from
that without another pass. `replay.score` finds the same, pass by pass and depth by depth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from understudy.advise.replay import ALL, Limits
from understudy.advise.scores import Score, ScoredCycle, TranscriptScore
from understudy.advise.transcript import Transcript
from understudy.control.cost import CostModel, Load
from understudy.control.planning import MOST_READ_ROWS
from understudy.core.request import SpeculationCounts
from understudy.drafters.base import Budget, Context, PricedDrafter
from understudy.sampling.noise import NoiseKey

Watcher = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Read:
    """A text, and at which places of its answer a draft model's word was right."""

    transcript: Transcript
    rights: tuple[bool, ...]
    """For each word of the answer but the first, which comes with the prompt's pass."""


@dataclass(slots=True)
class Reading:
    """What reading came to."""

    texts: list[Read] = field(default_factory=list)
    guess_s: float = 0.0
    """What a word of the draft costs beyond its pass."""


def read(
    drafter: PricedDrafter,
    transcripts: Sequence[Transcript],
    *,
    cost: CostModel,
    has_time: Callable[[], bool] = lambda: True,
    watcher: Watcher | None = None,
) -> Reading:
    """Ask for one word at each place of each text, until the time is up; the first text is always read."""
    reading = Reading()
    beyond_s: list[float] = []
    for number, transcript in enumerate(transcripts):
        if number and not has_time():
            break
        reading.texts.append(Read(transcript, tuple(_rights(drafter, transcript, number, cost, beyond_s))))
        if watcher is not None:
            watcher(number + 1, len(transcripts))
    reading.guess_s = max(0.0, statistics.median(beyond_s)) if beyond_s else 0.0
    return reading


def score_chains(
    reading: Reading, *, name: str, depths: Sequence[int], limits: Limits | None = None
) -> list[Score]:  # fmt: skip
    """Score the draft at each depth."""
    limits = limits or Limits()
    return [
        Score(ALL, name, depth, tuple(_walked(text, depth, limits, reading.guess_s, name) for text in reading.texts))
        for depth in depths
    ]


def _rights(
    drafter: PricedDrafter, transcript: Transcript, number: int, cost: CostModel, beyond_s: list[float]
) -> list[bool]:
    request, answer = transcript.request, transcript.answer_ids
    context = Context(
        number,
        [*request.prompt_ids, answer[0]],
        len(request.prompt_ids),
        request.tenant,
        request.sampling.temperature,
        NoiseKey(transcript.seed, transcript.choice),
        request.sampling,
    )
    rights = []
    drafter.start(context)
    for word in answer[1:]:
        started_s = time.perf_counter()
        (draft,) = drafter.propose([context], [Budget(1, 1)])
        seconds = time.perf_counter() - started_s
        while not len(draft) and drafter.num_unread(context) > 1:  # a long text is read in pieces
            (draft,) = drafter.propose([context], [Budget(1, 1)])
        rights.append(draft.tokens[:1] == (word,))
        if rights[:-1]:
            beyond_s.append(seconds - cost.step_s(Load.of([(1, len(context.tokens) - 1)])))
        context.tokens.append(word)
    drafter.stop(context, finished=transcript.finished)
    return rights


def _walked(text: Read, depth: int, limits: Limits, guess_s: float, name: str) -> TranscriptScore:
    """The cycles of a text at one depth."""
    transcript, request = text.transcript, text.transcript.request
    num_prompt = len(request.prompt_ids)
    most = min(request.sampling.max_tokens, limits.max_context - num_prompt)
    counts = SpeculationCounts(cycles=1)
    cycles: list[ScoredCycle] = []
    said, unread = 1, num_prompt + 1
    while said < transcript.num_tokens:
        wanted = min(depth, most - said - 1)
        reads = min(unread, MOST_READ_ROWS) if wanted > 0 else 0
        drafted = wanted if reads == unread else 0
        run = _run(text.rights, said - 1, drafted)
        emitted = min(run + 1, transcript.num_tokens - said)
        accepted = min(run, emitted)
        ends = said + emitted == transcript.num_tokens
        _count(counts, drafted=drafted, accepted=accepted, emitted=emitted, ends=ends, name=name)
        cycles.append(
            ScoredCycle(
                context=num_prompt + said - 1,
                rows=drafted,
                depth=drafted,
                accepted=accepted,
                emitted=emitted,
                asking_s=drafted * guess_s,
                draft_passes=drafted or min(1, reads),
                read_rows=reads,
            )
        )
        # the last word of a draft has no row in the draft's cache yet
        unread += emitted - reads - min(accepted, max(0, drafted - 1))
        said += emitted
    return TranscriptScore(transcript, counts, tuple(cycles))


def _run(rights: Sequence[bool], start: int, most: int) -> int:
    """How many words from a place on are right, up to a limit."""
    count = 0
    while count < most and start + count < len(rights) and rights[start + count]:
        count += 1
    return count


def _count(counts: SpeculationCounts, *, drafted: int, accepted: int, emitted: int, ends: bool, name: str) -> None:
    counts.cycles += 1
    counts.drafted += drafted
    counts.rows += drafted
    counts.accepted += accepted
    decided = min(emitted, drafted)
    counts.rejected += (decided if ends else drafted) - accepted
    counts.add_walk(place < accepted for place in range(decided))
    counts.add_draft([name] * drafted, range(accepted))
    if drafted:
        counts.proposed[name] = counts.proposed.get(name, 0) + drafted

"""Scores drafters on finished texts, without the target.

Every emitted token is the target's own, whatever was drafted. So what any drafter would have drafted for a finished
text, and how much of it would have been accepted, can be found out afterwards, exactly: the engine's own drafting code
is asked as it would have been, and the walk along its draft follows the words that are known.

    say     the pass over the prompt says the first word; nothing is drafted beside it
    draft   engine/drafting.py proposes, with the committed words in front of it, and buys
    walk    sampling/verify.py walks the draft; the target's word is the one that it did say
    learn   statistics and ledger see what they would have seen; a whole answer becomes history at its end

`score` forces one drafter at one depth, as bench and verify do. `score_policy` lets the engine's own rule decide whom
to ask and which rows to buy, as it would have for this text alone, in passes of a given cost.

What cannot be replayed is `lookahead`, which learns from rows that the target computes for it, and a trained draft,
which guesses from the target's hidden states: no target is here.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from understudy.advise.scores import Score, ScoredCycle, TranscriptScore
from understudy.advise.shared_draft import SharedDraft
from understudy.advise.transcript import Transcript
from understudy.config import TRAINED_DRAFTERS
from understudy.control.cost import CostModel, Load
from understudy.control.health import Health
from understudy.control.ledger import Ledger
from understudy.core.events import Event, Fallback
from understudy.core.request import Speculation, SpeculationCounts
from understudy.drafters.base import Context, Drafter, PricedDrafter
from understudy.engine.drafting import Drafting
from understudy.engine.proposal import Proposal
from understudy.engine.sequence import Sequence as EngineSequence
from understudy.sampling.noise import NoiseKey
from understudy.sampling.verify import Verdict, walk

ALL = "all"
"""Stands for all classes together."""
NO_LIMIT = 2**31 - 1

Watcher = Callable[[int, int], None]
"""Told how many texts are done and how many there are; may raise to end a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine's configuration and its model say."""

    vocab_size: int = NO_LIMIT
    max_context: int = NO_LIMIT
    """Longest text, prompt and answer: no draft reaches beyond it."""
    max_rows_per_step: int = 256
    """As on a CPU; no draft is that large."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Transcripts that a replay would have to guess about."""

    reason: str
    transcripts: tuple[Transcript, ...]


def refusal(drafter: str) -> str:
    """Why a drafter cannot be replayed; empty if it can."""
    return _REFUSALS.get(drafter, "")


_FROM_STATES = "it guesses from hidden states of the target, which a text does not hold"
_REFUSALS = {
    **dict.fromkeys(TRAINED_DRAFTERS, _FROM_STATES),
    "lookahead": "it learns from rows that the target computes for it, which a record does not hold",
    "forced": "it asks the grammar, which is at hand only where the tokenizer is",
}


def replayable(transcripts: Sequence[Transcript]) -> tuple[list[Transcript], list[LeftOut]]:
    """Those that `score_policy` can replay, and the others with the reason.

    A grammar drafts what it forces in every engine, and it is not at hand here. `score` replays them all the same: the
    one drafter that it forces does not know of grammars.
    """
    bound = tuple(t for t in transcripts if t.request.sampling.grammar is not None)
    kept = [t for t in transcripts if t.request.sampling.grammar is None]
    return kept, [
        LeftOut("bound by a grammar, which drafts too and is not at hand in a replay", bound)
    ] if bound else []


def score(
    make_drafter: Callable[[], Drafter],
    transcripts: Sequence[Transcript],
    *,
    depths: Sequence[int],
    max_rows: int = Speculation().max_rows,
    limits: Limits | None = None,
    watcher: Watcher | None = None,
) -> list[Score]:
    """Score one drafter at each depth, all classes together; `by_class` takes a score apart.

    `make_drafter` makes a new one, which has learned nothing, for each run. One that only looks things up is made and
    asked anew for each depth; all depths share the passes of a draft model.
    """
    drafter = _checked(make_drafter())
    name = drafter.name
    lanes = [Speculation(forced=True, max_depth=depth, max_rows=max_rows, drafter=name) for depth in depths]
    shares = hasattr(drafter, "cost")
    del drafter
    watched = _Watched(watcher, len(transcripts) * (1 if shares else len(depths)))
    found: list[list[TranscriptScore]] = []
    for group in [lanes] if shares else [[lane] for lane in lanes]:
        replay = _Replay(lambda: [make_drafter()], CostModel({1: 1.0}), limits or Limits(), group, shares=shares)
        rows = list(replay.all(transcripts, watched))
        found += [[row[place] for row in rows] for place in range(len(group))]
    return [Score(ALL, name, depth, tuple(column)) for depth, column in zip(depths, found, strict=True)]


def score_policy(
    make_drafters: Callable[[], Sequence[Drafter]],
    transcripts: Sequence[Transcript],
    *,
    cost: CostModel,
    limits: Limits | None = None,
    watcher: Watcher | None = None,
) -> Score:
    """Score what the engine's own rule would have bought of these drafters, with passes of this cost.

    Each text is alone in its passes. What the rule has learned of one text it knows when the next one arrives.
    """
    kept, left_out = replayable(transcripts)
    assert not left_out, "leave out what cannot be replayed first, and say so"
    names = [_checked(drafter).name for drafter in make_drafters()]
    replay = _Replay(make_drafters, cost, limits or Limits(), [None])
    found = tuple(row[0] for row in replay.all(kept, _Watched(watcher, len(kept))))
    return Score(ALL, "+".join(names), None, found)


def _checked(drafter: Drafter) -> Drafter:
    assert not hasattr(drafter, "scout"), f"{drafter.name} cannot be replayed: {refusal('lookahead')}"
    return drafter


class _Watched:
    """Counts texts for whoever watches."""

    def __init__(self, watcher: Watcher | None, total: int) -> None:
        self._watcher = watcher
        self._total = total
        self._num_done = 0

    def step(self) -> None:
        self._num_done += 1
        if self._watcher is not None:
            self._watcher(self._num_done, self._total)


class _Replayed(EngineSequence):
    """A sequence of which all words are known. It has no cache and no sampler: nobody computes for it."""

    def __init__(
        self, sequence_id: int, transcript: Transcript, *, speculation: Speculation | None, max_context: int
    ) -> None:
        request = transcript.request
        self.sequence_id = sequence_id
        self.request = request if speculation is None else replace(request, speculation=speculation)
        self.transcript = transcript
        self.choice = transcript.choice
        self.tokens = list(request.prompt_ids)
        self.counts = SpeculationCounts()
        self.ledger, self.health = Ledger(), Health()
        self.unpaid_s, self.num_resting = 0.0, 0
        self.finish_reason = None
        self._num_prompt = len(request.prompt_ids)
        self._max_tokens = min(request.sampling.max_tokens, max_context - self._num_prompt)
        self.context = Context(
            sequence_id,
            self.tokens,
            self._num_prompt,
            request.tenant,
            request.sampling.temperature,
            NoiseKey(transcript.seed, transcript.choice),
            request.sampling,
            prediction_ids=request.prediction_ids,
        )

    def say(self, proposal: Proposal) -> Verdict:
        """Walk along the draft as the target did speak."""
        verdict = Verdict(proposal.bought)
        answer = self.transcript.answer_ids
        for word in walk(proposal.bought, lambda row: answer[self.num_generated]):
            verdict.words.append(word)
            self.tokens.append(word.token)
            if self.num_generated == len(answer):
                verdict.cut = True
                self.finish_reason = "stop" if self.transcript.finished else "abort"
                break
        verdict.count(self.counts, proposal.drafts)
        return verdict


@dataclass(slots=True)
class _Lane:
    """One of the settings that are replayed side by side."""

    speculation: Speculation | None
    """What replaces the requests' own."""
    drafting: Drafting
    priced: PricedDrafter | None


@dataclass(slots=True)
class _Replay:
    """Settings that share their drafters, from the first transcript to the last."""

    make_drafters: Callable[[], Sequence[Drafter]]
    cost: CostModel
    limits: Limits
    speculations: Sequence[Speculation | None]
    shares: bool = False
    """Whether the one drafter is a model whose chains serve all settings."""
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def all(self, transcripts: Sequence[Transcript], watched: _Watched) -> Iterator[list[TranscriptScore]]:
        """Score them under each setting, run by run, in order of arrival."""
        for run in dict.fromkeys(transcript.run for transcript in transcripts):
            yield from self._run([t for t in transcripts if t.run == run], watched)

    def _run(self, transcripts: Sequence[Transcript], watched: _Watched) -> Iterator[list[TranscriptScore]]:
        drafters = list(self.make_drafters())
        shared = SharedDraft(cast(PricedDrafter, drafters[0])) if self.shares else None
        lanes = [self._lane(speculation, drafters if shared is None else [shared]) for speculation in self.speculations]
        ending: list[tuple[float, int, Drafting, _Replayed]] = []  # a heap, by the time of the end
        for transcript in sorted(transcripts, key=lambda t: t.arrived_s):
            while ending and ending[0][0] <= transcript.arrived_s:
                _, _, drafting, ended = heapq.heappop(ending)
                drafting.stop(ended)
            if shared is not None:
                shared.begin()
            sequences = [self._start(lane, transcript) for lane in lanes]
            cycles = self._side_by_side(lanes, sequences)
            for lane, sequence in zip(lanes, sequences, strict=True):
                heapq.heappush(ending, (transcript.ended_s, sequence.sequence_id, lane.drafting, sequence))
            watched.step()
            yield [
                TranscriptScore(transcript, sequence.counts, tuple(said))
                for sequence, said in zip(sequences, cycles, strict=True)
            ]

    def _lane(self, speculation: Speculation | None, drafters: Sequence[Drafter]) -> _Lane:
        drafting = Drafting(drafters, cost=self.cost, vocab_size=self.limits.vocab_size, emit=_fail)
        priced = next((cast(PricedDrafter, drafter) for drafter in drafters if hasattr(drafter, "cost")), None)
        return _Lane(speculation, drafting, priced)

    def _start(self, lane: _Lane, transcript: Transcript) -> _Replayed:
        sequence = _Replayed(
            next(self._ids), transcript, speculation=lane.speculation, max_context=self.limits.max_context
        )
        lane.drafting.start(sequence)
        return sequence

    def _side_by_side(self, lanes: Sequence[_Lane], sequences: Sequence[_Replayed]) -> list[list[ScoredCycle]]:
        """Replay one text in every lane: who has said least goes on, and of equals whose drafts reach furthest."""
        going = {place: self._cycles(lane, sequences[place]) for place, lane in enumerate(lanes)}
        cycles: list[list[ScoredCycle]] = [[] for _ in lanes]
        while going:
            place = min(going, key=lambda i: (len(sequences[i].tokens), -sequences[i].request.speculation.max_depth))
            cycle = next(going[place], None)
            if cycle is None:
                del going[place]
            else:
                cycles[place].append(cycle)
        return cycles

    def _cycles(self, lane: _Lane, sequence: _Replayed) -> Iterator[ScoredCycle]:
        sequence.say(Proposal())  # with the prompt's pass
        while sequence.finish_reason is None:
            context = len(sequence.tokens) - 1
            base = Load.of([(1, context)])
            reading = _Reading(lane.priced, sequence.context)
            started_s = time.thread_time()
            (proposal,), _ = lane.drafting.propose(
                [sequence], base, max_rows=self.limits.max_rows_per_step - base.rows, num_emitting=1
            )
            asking_s = time.thread_time() - started_s
            draft_passes, read_rows = reading.came_to(proposal)
            verdict = sequence.say(proposal)
            lane.drafting.observe(sequence, proposal, [word.token for word in verdict.words], verdict.path)
            plain_s = self.cost.step_s(base)
            load = Load.of([(1 + len(proposal.bought), context)])
            sequence.ledger.add(
                plain_step_s=plain_s, step_s=self.cost.step_s(load) + asking_s, num_words=len(verdict.words)
            )
            lane.drafting.settle(
                [sequence],
                base=base,
                load=load,
                forward_s=self.cost.step_s(load),
                drafting=lane.drafting.take_time(),
            )
            yield ScoredCycle(
                context=context,
                rows=len(proposal.bought),
                depth=proposal.bought.depth,
                accepted=verdict.num_accepted,
                emitted=len(verdict.words),
                asking_s=0.0 if read_rows else asking_s,
                draft_passes=draft_passes,
                read_rows=read_rows,
            )


class _Reading:
    """What a draft model, if there is one, computed in a cycle: seen by what it has left to read."""

    def __init__(self, drafter: PricedDrafter | None, context: Context) -> None:
        self._drafter = drafter
        self._context = context
        self._num_unread = 0 if drafter is None else drafter.num_unread(context)

    def came_to(self, proposal: Proposal) -> tuple[int, int]:
        """Its passes, and the rows of the first of them; no rows where it was not asked."""
        drafter = self._drafter
        if drafter is None:
            return 0, 0
        num_passes = max((d.depth for d in proposal.drafts if len(d) and d.sources[0] == drafter.name), default=0)
        if num_passes:
            return num_passes, self._num_unread
        num_read = self._num_unread - drafter.num_unread(self._context)  # a piece of a long text, and no guess yet
        return min(1, num_read), num_read


def _fail(event: Event) -> None:
    """Let no drafter's failure pass for a draft that was empty."""
    if isinstance(event, Fallback):
        raise RuntimeError(f"{event.what}: {event.reason}")

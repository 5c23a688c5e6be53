"""The whole of `understudy advise`: let the target speak once, measure what passes cost, score everything, advise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from understudy.advise.arithmetic import sequences_displaced
from understudy.advise.chains import read, score_chains
from understudy.advise.collect import Collected, collect
from understudy.advise.recommend import DEPTHS, Advice, recommend
from understudy.advise.replay import Limits, score, score_policy
from understudy.advise.scores import Score
from understudy.advise.settings import without_trained
from understudy.advise.timing import Costs, PassProfile, SharedCost, fit_host, measure_passes
from understudy.advise.transcript import Transcript
from understudy.bench.workloads import Question
from understudy.config import MODEL, default_drafters
from understudy.control.cost import CostModel
from understudy.control.planning import MOST_READ_ROWS
from understudy.core.events import Cycle
from understudy.drafters.base import Drafter, PricedDrafter

if TYPE_CHECKING:
    from understudy.assembly import Target

AT_ONCE = 8
"""Answers that the target computes together while it is only to speak."""
FREE_DRAFTERS = ("suffix", "ngram")
_LONG_CONTEXT = 1024
_MEASURING_SHARE = 0.05
"""Of the budget, for what passes cost; of each model."""
_DRAFT_SHARE = 0.5
"""Of the budget, for reading the answers with a draft model."""
_FEW_TEXTS = 16
"""Answers that the engine's own rule is replayed on where a draft model takes part."""


class Watcher(Protocol):
    """Is told how far the work is."""

    def at(self, what: str, *, done: int = 0, total: int | None = None) -> None:
        """Say what is being done."""


@dataclass(slots=True)
class Study:
    """What was found out."""

    advice: list[Advice] = field(default_factory=list)
    costs: Costs | None = None
    num_answers: int = 0
    num_wanted: int = 0
    num_words: int = 0
    collecting_s: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    """Of the draft, if there is one."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        costs = self.costs
        return {
            "answers": self.num_answers,
            "words": self.num_words,
            "collecting_s": round(self.collecting_s, 3),
            "interrupted": self.interrupted,
            "cost": None if costs is None else _cost(costs.cost),
            "draft_cost": None if costs is None or costs.draft_cost is None else _cost(costs.draft_cost),
            "host": None if costs is None else asdict(costs.host),
            "memory": self.memory,
            "advice": [found.describe() for found in self.advice],
        }


def study(
    target: Target,
    questions: Mapping[str, Sequence[Question]],
    *,
    temperatures: Sequence[float],
    concurrencies: Sequence[int],
    budget_s: float,
    watcher: Watcher,
) -> Study:
    """Find out. An interruption while the target speaks leaves advice on what it has said; a later one leaves none."""
    found = Study()
    target, left_out = without_trained(target)
    found.notes += left_out
    if not target.is_row_invariant:
        found.notes.append("Rows depend on their neighbours on this costs: an engine drafts nothing here.")
    try:
        watcher.at("asking the target")
        collected = collect(
            target,
            questions,
            temperatures=temperatures,
            at_once=AT_ONCE,
            budget_s=budget_s,
            watcher=lambda done, total: watcher.at("asking the target", done=done, total=total),
        )
        _tell(found, collected)
        if not collected.transcripts:
            return found
        watcher.at("measuring what a row costs")
        costs = measure_costs(
            target, collected.cycles, concurrencies=concurrencies, budget_s=_MEASURING_SHARE * budget_s
        )
        replays = Replays(target, collected.transcripts, costs, watcher)
        scores = replays.of_drafters(budget_s=budget_s)
        own_rule = {concurrency: replays.of_own_rule(concurrency) for concurrency in concurrencies}
        watcher.at("putting it together")
        found.advice = recommend(scores, costs, concurrencies=concurrencies, own_rule=own_rule)
        found.costs = costs
        _weigh_memory(found, target, collected.transcripts)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def profile_of(target: Target, *, most_rows: int, of_draft: bool = False) -> PassProfile:
    """A profile of the passes of a target, or of its draft, with nothing in it yet."""
    from understudy.assembly import DraftModel, pass_timer

    decoder = target.decoder
    if of_draft:
        assert isinstance(target.draft, DraftModel), "only a model's passes are those of a decoder"
        decoder = target.draft.decoder
    long = min(_LONG_CONTEXT, decoder.config.max_positions // 2)
    timer = pass_timer(decoder, page_tokens=target.page_tokens, num_tokens=long + max(8, most_rows))
    return PassProfile(timer, long_context=long, most_rows=most_rows)


def measure_costs(target: Target, cycles: Sequence[Cycle], *, concurrencies: Sequence[int], budget_s: float) -> Costs:
    """Measure what passes cost, and take from the steps of a run what else a step takes."""
    most = max(concurrencies)
    cost = measure_passes(profile_of(target, most_rows=most * (1 + max(DEPTHS))), budget_s=budget_s)
    draft_cost: CostModel | None = None
    if target.draft_kind == MODEL:
        profile = profile_of(target, most_rows=max(2 * most, MOST_READ_ROWS), of_draft=True)
        draft_cost = measure_passes(profile, budget_s=budget_s)
    return Costs(cost=cost, draft_cost=draft_cost, host=fit_host(cycles))


class Replays:
    """What was said, replayed with every drafter and depth, and with the engine's own rule.

    A draft model is slow to replay. It reads as many texts as it has time for, and the own rule is replayed on few.
    """

    def __init__(
        self, target: Target, transcripts: Sequence[Transcript], costs: Costs, watcher: Watcher
    ) -> None:  # fmt: skip
        self._target = target
        self._transcripts = transcripts
        self._costs = costs
        self._watcher = watcher
        model = target.decoder.config
        self._limits = Limits(vocab_size=model.vocab_size, max_context=model.max_positions)
        longest = max(len(t.request.prompt_ids) + t.num_tokens for t in transcripts) + max(DEPTHS) + 1
        self._num_blocks = -(-longest // target.page_tokens) + 1

    def of_drafters(self, *, budget_s: float) -> list[Score]:
        """Each drafter at each depth."""
        scores: list[Score] = []
        for name in FREE_DRAFTERS:
            scores += score(
                partial(self._drafter, name),
                self._transcripts,
                depths=DEPTHS,
                limits=self._limits,
                watcher=self._at(f"replaying {name}"),
            )
        cost = self._costs.draft_cost
        if cost is not None:
            until_s = time.monotonic() + _DRAFT_SHARE * budget_s
            reading = read(
                cast(PricedDrafter, self._drafter("model")),
                self._transcripts,
                cost=cost,
                has_time=lambda: time.monotonic() < until_s,
                watcher=self._at("reading with the draft"),
            )
            scores += score_chains(reading, name="model", depths=DEPTHS, limits=self._limits)
        return scores

    def of_own_rule(self, concurrency: int) -> Score:
        """What the engine's own rule would have bought where so many texts of the same kind share a pass."""
        has_draft = self._target.draft is not None
        names = default_drafters(self._target.draft_kind)
        return score_policy(
            lambda: [self._drafter(name, concurrency) for name in names],
            self._transcripts[:_FEW_TEXTS] if has_draft else self._transcripts,
            cost=SharedCost.of(self._costs.cost, concurrency),
            limits=self._limits,
            watcher=self._at(f"replaying the engine's own rule, {concurrency} at once"),
        )

    def _drafter(self, name: str, concurrency: int = 1) -> Drafter:
        from understudy.assembly import make_drafter

        cost = self._costs.draft_cost
        shared = None if cost is None else SharedCost.of(cost, concurrency)
        return make_drafter(name, self._target, num_blocks=self._num_blocks, draft_cost=shared)

    def _at(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self._watcher.at(what, done=done, total=total)


def _tell(found: Study, collected: Collected) -> None:
    found.num_answers = len(collected.transcripts)
    found.num_wanted = collected.num_wanted
    found.num_words = sum(transcript.num_tokens for transcript in collected.transcripts)
    found.collecting_s = collected.seconds
    found.interrupted = collected.interrupted
    if collected.num_failed:
        found.notes.append(f"{collected.num_failed} answers ended in an error and were left out.")


def _weigh_memory(found: Study, target: Target, transcripts: Sequence[Transcript]) -> None:
    """Say what the draft's memory would have held."""
    draft = target.draft
    if draft is None:
        return
    lengths = [len(t.request.prompt_ids) + t.num_tokens for t in transcripts]
    context = max(lengths)
    num_sequences = sequences_displaced(
        draft.num_bytes, kv_bytes_per_token=target.kv_bytes_per_token, context=context
    )  # fmt: skip
    share = draft.kv_bytes_per_token / target.kv_bytes_per_token
    found.memory = {
        "draft_bytes": draft.num_bytes,
        "draft_share_of_target": draft.num_bytes / target.num_bytes,
        "context": context,
        "sequences_displaced": round(num_sequences, 2),
        "kv_share_of_target": share,
    }
    weights = "are the target's own"
    if draft.num_bytes:
        held = f"{num_sequences:.1f} sequences of {context:,} tokens"
        weights = f"take {draft.num_bytes / 2**20:,.1f} MiB, the memory of {held}"
    found.notes.append(
        f"The draft's weights {weights}; each sequence takes {share:.0%} more memory for the draft's cache. "
        "Where memory limits the batch, that is what a draft costs."
    )


def _cost(cost: CostModel) -> dict[str, Any]:
    return {"rows_s": cost.rows_s, "per_key_s": cost.per_key_s, "per_read_s": cost.per_read_s}

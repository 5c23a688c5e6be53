"""The drafters of an engine: asked, merged, bought by the policy, and never trusted.

free drafters      are asked for every sequence in every step
priced drafters    (a draft model) are asked where the plan expects that to pay for their time
scouting drafters  (lookahead) may have rows of their own in the target's pass, where those pay

What each proposes is calibrated by what its proposals were worth so far, merged into one tree, and the rows that pay
are bought, best first.

Whatever a drafter does, plain decoding goes on: one that raises or returns something malformed loses its say in that
step, with an event; one that keeps failing is switched off, with an event. Tokens that do not exist and nodes beyond
the budget are left out without a word: a draft may know a larger vocabulary than its target.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from understudy.control.cost import CostModel, Load
from understudy.control.planning import (
    MOST_DEPTH,
    MOST_READ_ROWS,
    Allowance,
    AnswerLengths,
    Plan,
    Prospect,
    Worth,
    asking_s,
    plan,
)
from understudy.control.policy import Offer, choose
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.draft import EMPTY, Draft, is_tree, is_well_typed, merge
from understudy.core.events import EventSink, Fallback
from understudy.drafters.base import Budget, Context, Drafter, PricedDrafter
from understudy.engine.scouting import Scouting
from understudy.engine.sequence import Sequence

Answer = TypeVar("Answer")

_MOST_FAILURES = 3
"""Failures without a good proposal in between after which a drafter is switched off."""


_SHARED_ROWS = 48
_LEAST_ROWS = 4
"""Rows that the sequences of a step share, and that each may have at least."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """All that was proposed for one sequence, and the part of it that is verified."""

    drafts: tuple[Draft, ...] = ()
    """What each drafter proposed, as it stated it."""
    bought: Draft = EMPTY
    scouts: Draft = EMPTY
    """Rows that a drafter learns from. They are no draft: whatever they say, they are forgotten after the pass."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A long text that is read to learn how good its drafts are: paid for once, read in several cycles."""

    sequence_id: int
    num_unread: int

    def goes_on(self, sequence: Sequence, prospect: Prospect) -> bool:
        """Whether this is the text, and what was paid for has brought it forward."""
        return sequence.sequence_id == self.sequence_id and prospect.num_unread < self.num_unread


class Drafting:
    """Asks every drafter, and buys what pays."""

    def __init__(self, drafters: Items[Drafter], *, cost: CostModel, vocab_size: int, emit: EventSink) -> None:
        # the free ones first: what they offer need not be paid for
        self._drafters = sorted(drafters, key=lambda drafter: getattr(drafter, "cost", None) is not None)
        self._failures = {drafter.name: 0 for drafter in drafters}
        self._cost = cost
        self._vocab_size = vocab_size
        self._emit = emit
        self._allowance = Allowance()
        self._lengths = AnswerLengths()
        self._worth = Worth()
        self._all_free = not any(hasattr(drafter, "cost") or hasattr(drafter, "scout") for drafter in drafters)
        self._probes: dict[str, _Probe] = {}  # by drafter
        self._scouting = Scouting(self._drafters, cost, self._allowance, self._guard, vocab_size=vocab_size)
        self.stats = AcceptanceStats()

    @property
    def names(self) -> list[str]:
        """The drafters that this engine was built with, those that were switched off included."""
        return list(self._failures)

    def start(self, sequence: Sequence) -> None:
        """Introduce a sequence to every drafter, unless it forbids drafts: off costs nothing."""
        budget = _budget(sequence)
        if budget.max_depth <= 0 or budget.max_rows <= 0:
            return
        for drafter in list(self._drafters):
            self._guard(drafter, partial(drafter.start, sequence.context))

    def stop(self, sequence: Sequence) -> None:
        """Tell every drafter that a sequence ended."""
        finished = sequence.finish_reason in ("stop", "length")
        if finished:
            self._lengths.observe(sequence.request.workload_class, sequence.num_generated)
        for drafter in list(self._drafters):
            self._guard(drafter, partial(drafter.stop, sequence.context, finished=finished))

    def propose(
        self, sequences: Items[Sequence], base: Load, *, max_rows: int, num_emitting: int
    ) -> tuple[list[Proposal], str]:
        """Return a proposal for each sequence, and the reason for what was bought; see `choose` for the numbers."""
        if not self._drafters or max_rows <= 0:
            return [Proposal()] * len(sequences), "no drafter" if not self._drafters else "no row is left"
        if not sequences:
            return [], "nothing is drafted beside a prompt"
        budgets = [_budget(sequence, len(sequences)) for sequence in sequences]
        asked = [index for index, budget in enumerate(budgets) if budget.max_rows > 0 and budget.max_depth > 0]
        if not asked:
            return [Proposal()] * len(sequences), "speculation is off for every sequence of this step"
        kind = sequences[0].request.workload_class if len(sequences) == 1 else f"{len(sequences)} sequences"
        may_rest = self._all_free and not any(sequence.request.speculation.forced for sequence in sequences)
        if may_rest and not self._worth.asks(kind):
            return [Proposal()] * len(sequences), "asking does not pay for its time at present"
        started = time.perf_counter()
        reading_s = 0.0
        drafts: list[list[Draft]] = [[] for _ in sequences]
        for drafter in list(self._drafters):
            allowed = [i for i in asked if sequences[i].request.speculation.drafter in (None, drafter.name)]
            asked_at = time.perf_counter()
            found = self._ask(drafter, [sequences[i] for i in allowed], [budgets[i] for i in allowed],
                              [drafts[i] for i in allowed], base, num_emitting)  # fmt: skip
            reading_s += _reading_s(drafter, found, time.perf_counter() - asked_at, base)
            for index, draft in zip(allowed, found, strict=False):
                drafts[index].append(draft)
        trees = [self._merged(*item) for item in zip(sequences, drafts, budgets, strict=True)]
        offers = [
            Offer(context=len(s.tokens), survival=survival_of(tree), forced=s.request.speculation.forced)
            for s, tree in zip(sequences, trees, strict=True)
        ]
        spent_s = time.perf_counter() - started - reading_s  # what is read once serves many cycles
        decision = choose(offers, base, self._cost, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s)
        self._worth.observe(kind, saved=1.0 - 1.0 / decision.gain, spent=spent_s / self._cost.step_s(base))
        bought = [tree.keep(nodes) for tree, nodes in zip(trees, decision.nodes, strict=True)]
        scouts = self._scouting.choose(sequences, bought, base, max_rows=max_rows, num_emitting=num_emitting)
        return [Proposal(tuple(drafts[i]), bought[i], scouts[i]) for i in range(len(sequences))], decision.reason

    def observe(self, sequence: Sequence, proposal: Proposal, words: Items[int]) -> None:
        """Learn from what the target said where something had been proposed."""
        request = sequence.request
        for draft in proposal.drafts:
            if len(draft):
                self.stats.observe(request.workload_class, draft, words, temperature=request.sampling.temperature)
        if len(proposal.scouts):
            self._scouting.observe(sequence, proposal.bought, words)

    def learn(self, sequence: Sequence, words: Callable[[], list[int]]) -> None:
        """Give the scouting drafter what the target said after its rows."""
        self._scouting.learn(sequence, words)

    def _ask(
        self,
        drafter: Drafter,
        sequences: Items[Sequence],
        budgets: Items[Budget],
        before: Items[Items[Draft]],
        base: Load,
        num_emitting: int,
    ) -> list[Draft]:
        """One drafter's drafts for the sequences that allow it; none at all if it failed or was not worth asking."""
        if not sequences:
            return []
        asked = list(range(len(sequences)))
        cost: CostModel | None = getattr(drafter, "cost", None)
        if cost is not None:
            priced = cast(PricedDrafter, drafter)
            planned = self._guard(
                drafter, partial(self._plan, priced, sequences, budgets, before, base, num_emitting)
            )  # fmt: skip
            asked, budgets = planned or ([], budgets)
        if not asked:
            return []
        answer = self._guard(
            drafter, partial(_ask, drafter, [sequences[i].context for i in asked], [budgets[i] for i in asked])
        )
        if answer is None:
            return []
        self._failures[drafter.name] = (
            0  # only a good proposal makes up for failures: a start that does nothing does not
        )
        drafts = [EMPTY] * len(sequences)
        for index, draft in zip(asked, answer, strict=True):
            drafts[index] = self._clipped(draft, budgets[index])
        return drafts

    def _plan(
        self,
        drafter: PricedDrafter,
        sequences: Items[Sequence],
        budgets: Items[Budget],
        before: Items[Items[Draft]],
        base: Load,
        num_emitting: int,
    ) -> tuple[list[int], list[Budget]]:
        """Whom to ask a drafter that costs time, and until when it is worth going on."""
        prospects = [self._prospect(drafter, *item) for item in zip(sequences, budgets, before, strict=True)]
        chosen = plan(prospects, base, target=self._cost, drafter=drafter.cost, num_emitting=num_emitting)
        asked = set(chosen.asked)
        if not asked:
            asked = self._probe(drafter, sequences, prospects, base)
        forced = {index for index, s in enumerate(sequences) if s.request.speculation.forced}
        limited = [
            budget if index in forced else self._limited(drafter, sequence, budget, chosen)
            for index, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True))
        ]
        return sorted(asked | forced), limited

    def _probe(
        self, drafter: PricedDrafter, sequences: Items[Sequence], prospects: Items[Prospect], base: Load
    ) -> set[int]:
        """Whom to ask although it is not expected to pay: one, now and then. A long text that was begun is read on."""
        name = drafter.name
        self._allowance.save(name, self._cost.step_s(base))
        usual = [index for index, sequence in enumerate(sequences) if not sequence.request.speculation.forced]
        begun = self._probes.pop(name, None)
        going = (index for index in usual if begun and begun.goes_on(sequences[index], prospects[index]))
        chosen = next(going, None)
        if chosen is None:
            if not usual or not self._allowance.spend(name, asking_s([prospects[usual[0]]], drafter.cost)):
                return set()
            chosen = usual[0]
        if prospects[chosen].num_unread > MOST_READ_ROWS:
            self._probes[name] = _Probe(sequences[chosen].sequence_id, prospects[chosen].num_unread)
        return {chosen}

    def _prospect(self, drafter: PricedDrafter, sequence: Sequence, budget: Budget, before: Items[Draft]) -> Prospect:
        request = sequence.request
        free = merge([self._calibrated(sequence, draft) for draft in before])
        return Prospect(
            context=len(sequence.tokens),
            num_unread=max(1, int(drafter.num_unread(sequence.context))),
            acceptance=[
                self.stats.acceptance_at(
                    request.workload_class, drafter.name, position, temperature=request.sampling.temperature
                )
                for position in range(1, min(budget.max_depth, budget.max_rows, MOST_DEPTH) + 1)
            ],
            free_tokens=sum(survival_of(free)),
            num_left=self._lengths.num_left(
                request.workload_class, num_generated=sequence.num_generated, num_allowed=sequence.num_left
            ),
        )

    def _limited(self, drafter: Drafter, sequence: Sequence, budget: Budget, chosen: Plan) -> Budget:
        """A budget under which a draft goes on for as long as its next token is expected to pay."""
        request = sequence.request

        def goes_on(draft: Draft) -> bool:
            survival = survival_of(self._calibrated(sequence, draft))[-1]
            following = self.stats.acceptance_at(
                request.workload_class, drafter.name, len(draft) + 1, temperature=request.sampling.temperature
            )
            return bool(chosen.asked) and chosen.is_worth(survival * following)

        return replace(budget, max_depth=min(budget.max_depth, MOST_DEPTH), goes_on=goes_on)

    def _merged(self, sequence: Sequence, drafts: Items[Draft], budget: Budget) -> Draft:
        """All drafts in one tree, each calibrated first; of too many nodes the likeliest, whoever proposed them."""
        tree = merge([self._calibrated(sequence, draft) for draft in drafts if len(draft)])
        if len(tree) <= budget.max_rows:
            return tree
        survival = survival_of(tree)  # never larger than the parent's, who stands before its children
        return tree.keep(sorted(range(len(tree)), key=lambda node: -survival[node])[: budget.max_rows])

    def _clipped(self, draft: Draft, budget: Budget) -> Draft:
        return draft.clipped(vocab_size=self._vocab_size, max_depth=budget.max_depth, max_rows=budget.max_rows)

    def _calibrated(self, sequence: Sequence, draft: Draft) -> Draft:
        request = sequence.request
        return self.stats.calibrated(request.workload_class, draft, temperature=request.sampling.temperature)

    def _guard(self, drafter: Drafter, call: Callable[[], Answer]) -> Answer | None:
        """Run one call of a drafter; its failure is an event and nothing more."""
        try:
            answer = call()
        except Exception as error:
            self._failures[drafter.name] += 1
            self._emit(Fallback(f"drafter {drafter.name}", f"left out of this step: {type(error).__name__}: {error}"))
            if self._failures[drafter.name] >= _MOST_FAILURES and drafter in self._drafters:
                self._drafters.remove(drafter)
                self._emit(
                    Fallback(f"drafter {drafter.name}", f"switched off after {_MOST_FAILURES} failures in a row")
                )
            return None
        return answer


def _ask(drafter: Drafter, contexts: Items[Context], budgets: Items[Budget]) -> list[Draft]:
    """Ask one drafter, and refuse an answer that is not one well-formed draft for each sequence."""
    drafts = drafter.propose(contexts, budgets)
    whole = isinstance(drafts, list) and len(drafts) == len(contexts)
    if not whole or not all(isinstance(draft, Draft) for draft in drafts):
        raise TypeError(f"propose() must return a list of {len(contexts)} drafts")
    if not all(is_tree(draft) and is_well_typed(draft) for draft in drafts):
        raise TypeError("propose() returned a draft whose entries are no tree of tokens")
    return drafts


def _reading_s(drafter: Drafter, drafts: Items[Draft], seconds: float, base: Load) -> float:
    """What of the seconds that a drafter took went into reading, not into the passes of these drafts."""
    cost: CostModel | None = getattr(drafter, "cost", None)
    if cost is None or not drafts:
        return 0.0
    count = sum(len(draft) > 0 for draft in drafts)
    passes_s = max(draft.depth for draft in drafts) * cost.step_s(Load(count, base.keys, base.keys))
    return max(0.0, seconds - passes_s)


def _budget(sequence: Sequence, num_sequences: int = 1) -> Budget:
    """A draft may reach up to the last token but one: the bonus is always there.

    Where many share a step, few rows of each can pay, and proposing the others would cost time for nothing.
    """
    wanted = sequence.request.speculation
    if not wanted.enabled:
        return Budget(0, 0)
    useful = wanted.max_rows if wanted.forced else max(_LEAST_ROWS, _SHARED_ROWS // num_sequences)
    return Budget(
        max_depth=min(wanted.max_depth, sequence.num_left - 1),
        max_rows=min(wanted.max_rows, useful),
    )

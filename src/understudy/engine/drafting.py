"""The drafters of an engine: asked, merged, bought by the policy, and never trusted.

free drafters      are asked for every sequence in every step
rare drafters      (forced, prediction) are asked for the few sequences that concern them
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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from understudy.control.classes import ClassNames
from understudy.control.cost import CostModel, Load
from understudy.control.planning import Allowance, AnswerLengths, Worth
from understudy.control.policy import Decision, Offer, choose
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.draft import EMPTY, ROOT, Draft, is_tree, is_well_typed, merge
from understudy.core.events import EventSink, Fallback
from understudy.core.switches import ALL_ON, Switches
from understudy.drafters.base import Budget, Context, Drafter, PricedDrafter, RareDrafter
from understudy.engine.pricing import Pricing
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


class Drafting:
    """Asks every drafter, and buys what pays."""

    def __init__(self, drafters: Items[Drafter], *, cost: CostModel, vocab_size: int, emit: EventSink) -> None:
        # the free ones first: what they offer need not be paid for
        self._drafters = sorted(drafters, key=lambda drafter: getattr(drafter, "cost", None) is not None)
        self._failures = {drafter.name: 0 for drafter in drafters}
        self._cost = cost
        self._vocab_size = vocab_size
        self._emit = emit
        self._lengths = AnswerLengths()
        self._worth = Worth()
        self._classes = ClassNames()
        self._all_free = not any(hasattr(drafter, "cost") or hasattr(drafter, "scout") for drafter in drafters)
        self._rare = {drafter.name: cast(RareDrafter, drafter) for drafter in drafters if hasattr(drafter, "concerns")}
        self._concerned: dict[int, frozenset[str]] = {}  # by sequence id, where there are any: rare drafters
        self._certain = frozenset(name for name, drafter in self._rare.items() if drafter.is_certain)
        allowance = Allowance()
        self._scouting = Scouting(self._drafters, cost, allowance, self._guard, vocab_size=vocab_size)
        self.stats = AcceptanceStats()
        self._pricing = Pricing(cost, self.stats, allowance, self._lengths, calibrated=self._calibrated)
        self.switches = ALL_ON
        """May be replaced between two steps; the next one obeys."""

    @property
    def names(self) -> list[str]:
        """The drafters that this engine was built with, those that were switched off included."""
        return list(self._failures)

    def start(self, sequence: Sequence) -> None:
        """Introduce a sequence to every drafter, unless it forbids drafts: off costs nothing."""
        concerned = [
            name for name, rare in self._rare.items() if self._guard(rare, partial(rare.concerns, sequence.context))
        ]
        if concerned:
            self._concerned[sequence.sequence_id] = frozenset(concerned)
        if not _reaches(_budget(sequence, self.switches)):
            return
        for drafter in [drafter for drafter in self._drafters if self._concerns(drafter.name, sequence)]:
            self._guard(drafter, partial(drafter.start, sequence.context))

    def stop(self, sequence: Sequence) -> None:
        """Tell every drafter that a sequence ended."""
        finished = sequence.finish_reason in ("stop", "length")
        if finished:
            self._lengths.observe(sequence.request.workload_class, sequence.num_generated)
        for drafter in [drafter for drafter in self._drafters if self._concerns(drafter.name, sequence)]:
            self._guard(drafter, partial(drafter.stop, sequence.context, finished=finished))
        self._concerned.pop(sequence.sequence_id, None)

    def propose(
        self, sequences: Items[Sequence], base: Load, *, max_rows: int, num_emitting: int
    ) -> tuple[list[Proposal], str]:
        """Return a proposal for each sequence, and the reason for what was bought; see `choose` for the numbers."""
        if not self._drafters or max_rows <= 0:
            return [Proposal()] * len(sequences), "no drafter" if not self._drafters else "no row is left"
        if not sequences:
            return [], "nothing is drafted beside a prompt"
        budgets = [_budget(sequence, self.switches, len(sequences)) for sequence in sequences]
        kind = self._kind(sequences)
        reason = self._reason_not_to_ask(sequences, budgets, kind)
        if reason:
            return [Proposal()] * len(sequences), reason
        started = time.perf_counter()
        drafts, reading_s = self._ask_all(sequences, budgets, base, num_emitting)
        trees = [self._merged(*item) for item in zip(sequences, drafts, budgets, strict=True)]
        spent_s = time.perf_counter() - started - reading_s  # what is read once serves many cycles
        decision = self._buy(sequences, trees, base, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s)
        self._worth.observe(kind, saved=1.0 - 1.0 / decision.gain, spent=spent_s / self._cost.step_s(base))
        bought = [tree.keep(nodes) for tree, nodes in zip(trees, decision.nodes, strict=True)]
        scouts = self._scouting.choose(
            sequences, bought, base, switches=self.switches, max_rows=max_rows, num_emitting=num_emitting
        )
        return [Proposal(tuple(drafts[i]), bought[i], scouts[i]) for i in range(len(sequences))], decision.reason

    def _reason_not_to_ask(self, sequences: Items[Sequence], budgets: Items[Budget], kind: str) -> str:
        """Why no drafter is asked in this step; empty if they are."""
        if not any(map(_reaches, budgets)):
            return "speculation is off for every sequence of this step"
        may_rest = self._all_free and not any(sequence.request.speculation.forced for sequence in sequences)
        if may_rest and not self._worth.asks(kind):
            return "asking does not pay for its time at present"
        return ""

    def _kind(self, sequences: Items[Sequence]) -> str:
        """The kind of a step, by which it is learned whether asking pays: that differs where rare drafters speak."""
        count = len(sequences)
        kind = f"{count} sequences" if count > 1 else self._classes.known(sequences[0].request.workload_class)
        has_rare = self._concerned and any(sequence.sequence_id in self._concerned for sequence in sequences)
        return f"{kind}, with a grammar or a prediction" if has_rare else kind

    def _ask_all(
        self, sequences: Items[Sequence], budgets: Items[Budget], base: Load, num_emitting: int
    ) -> tuple[list[list[Draft]], float]:
        """What each drafter proposes for each sequence, and the seconds that went into reading."""
        asked = [index for index, budget in enumerate(budgets) if _reaches(budget)]
        drafts: list[list[Draft]] = [[] for _ in sequences]
        reading_s = 0.0
        for drafter in [drafter for drafter in self._drafters if self.switches.allows(drafter.name)]:
            if drafter.name in self._rare and not self._concerned:
                continue
            allowed = [i for i in asked if sequences[i].request.speculation.drafter in (None, drafter.name)]
            if drafter.name in self._rare:
                allowed = [i for i in allowed if self._concerns(drafter.name, sequences[i])]
            if not allowed:
                continue
            asked_at = time.perf_counter()
            found = self._ask(drafter, [sequences[i] for i in allowed], [budgets[i] for i in allowed],
                              [drafts[i] for i in allowed], base, num_emitting)  # fmt: skip
            reading_s += _reading_s(drafter, found, time.perf_counter() - asked_at, base)
            for index, draft in zip(allowed, found, strict=False):
                drafts[index].append(draft)
        return drafts, reading_s

    def _concerns(self, name: str, sequence: Sequence) -> bool:
        """Whether a drafter could have something to say for a sequence."""
        return name not in self._rare or name in self._concerned.get(sequence.sequence_id, ())

    def _buy(
        self,
        sequences: Items[Sequence],
        trees: Items[Draft],
        base: Load,
        *,
        max_rows: int,
        num_emitting: int,
        spent_s: float,
    ) -> Decision:
        """Choose the rows that pay."""
        plain_s = self._cost.step_s(base)
        offers = [
            Offer(
                context=len(s.tokens),
                survival=survival_of(tree),
                room_s=s.ledger.room_s(plain_s),
                forced=s.request.speculation.forced,
            )
            for s, tree in zip(sequences, trees, strict=True)
        ]
        return choose(offers, base, self._cost, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s)

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
        asked = list(range(len(sequences)))
        cost: CostModel | None = getattr(drafter, "cost", None)
        if cost is not None:
            priced = cast(PricedDrafter, drafter)
            planned = self._guard(
                drafter, partial(self._pricing.plan, priced, sequences, budgets, before, base, num_emitting)
            )
            asked, budgets = planned or ([], budgets)
        if not asked:
            return []
        answer = self._guard(
            drafter, partial(_ask, drafter, [sequences[i].context for i in asked], [budgets[i] for i in asked])
        )
        if answer is None:
            return []
        # only a good proposal makes up for failures: a start that does nothing does not
        self._failures[drafter.name] = 0
        drafts = [EMPTY] * len(sequences)
        for index, draft in zip(asked, answer, strict=True):
            drafts[index] = self._clipped(draft, budgets[index])
        return drafts

    def _merged(self, sequence: Sequence, drafts: Items[Draft], budget: Budget) -> Draft:
        """All drafts in one tree, each calibrated first; of too many nodes the likeliest, whoever proposed them."""
        tree = merge([self._calibrated(sequence, draft) for draft in drafts if len(draft)])
        if sequence.sequence_id in self._concerned:
            tree = _without_rivals(tree, self._certain)
        if len(tree) <= budget.max_rows:
            return tree
        survival = survival_of(tree)  # never larger than the parent's, who stands before its children
        return tree.keep(sorted(range(len(tree)), key=lambda node: -survival[node])[: budget.max_rows])

    def _clipped(self, draft: Draft, budget: Budget) -> Draft:
        return draft.clipped(vocab_size=self._vocab_size, max_depth=budget.max_depth, max_rows=budget.max_rows)

    def _calibrated(self, sequence: Sequence, draft: Draft) -> Draft:
        request = sequence.request
        if len(draft) and draft.sources[0] in self._certain:
            return draft
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


def _without_rivals(tree: Draft, certain: frozenset[str]) -> Draft:
    """The tree without what facts rule out: beside a token that is certain, guesses would only lower its survival."""
    facts = {parent: node for node, parent in enumerate(tree.parents) if tree.sources[node] in certain}
    kept = {ROOT}
    for node, parent in enumerate(tree.parents):
        if parent in kept and facts.get(parent, node) == node:
            kept.add(node)
    return tree.keep(kept - {ROOT})


def _reading_s(drafter: Drafter, drafts: Items[Draft], seconds: float, base: Load) -> float:
    """What of the seconds that a drafter took went into reading, not into the passes of these drafts."""
    cost: CostModel | None = getattr(drafter, "cost", None)
    if cost is None or not drafts:
        return 0.0
    count = sum(len(draft) > 0 for draft in drafts)
    passes_s = max(draft.depth for draft in drafts) * cost.step_s(Load(count, base.keys, base.keys))
    return max(0.0, seconds - passes_s)


def _reaches(budget: Budget) -> bool:
    return budget.max_rows > 0 and budget.max_depth > 0


def _budget(sequence: Sequence, switches: Switches, num_sequences: int = 1) -> Budget:
    """A draft may reach up to the last token but one: the bonus is always there.

    Where many share a step, few rows of each can pay, and proposing the others would cost time for nothing.
    """
    wanted = sequence.request.speculation
    depth = switches.depth_of(wanted, sequence.request.workload_class)
    if not depth:
        return Budget(0, 0)
    useful = wanted.max_rows if wanted.forced else max(_LEAST_ROWS, _SHARED_ROWS // num_sequences)
    return Budget(
        max_depth=min(depth, sequence.num_left - 1),
        max_rows=min(wanted.max_rows, useful),
    )

"""The drafters of an engine: asked, merged, bought by the policy, and never trusted.

Whatever a drafter does, plain decoding goes on: one that raises or returns something malformed loses its say in that
step, with an event; one that keeps failing is switched off, with an event. Tokens that do not exist and nodes beyond
the budget are left out without a word: a draft may know a larger vocabulary than its target.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from understudy.control.cost import CostModel, Load
from understudy.control.policy import Offer, choose
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import EMPTY, Draft, is_tree, merge
from understudy.core.events import EventSink, Fallback
from understudy.drafters.base import Budget, Context, Drafter
from understudy.engine.sequence import Sequence

Answer = TypeVar("Answer")

_MOST_FAILURES = 3
"""Failures without a good proposal in between after which a drafter is switched off."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """All that was proposed for one sequence, and the part of it that is verified."""

    offered: Draft = EMPTY
    bought: Draft = EMPTY


class Drafting:
    """Asks every drafter, and buys what pays."""

    def __init__(self, drafters: Items[Drafter], *, cost: CostModel, vocab_size: int, emit: EventSink) -> None:
        self._drafters = list(drafters)
        self._failures = {drafter.name: 0 for drafter in drafters}
        self._cost = cost
        self._vocab_size = vocab_size
        self._emit = emit
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
        for drafter in list(self._drafters):
            self._guard(drafter, partial(drafter.stop, sequence.context, finished=finished))

    def propose(
        self, sequences: Items[Sequence], base: Load, *, max_rows: int, num_emitting: int
    ) -> tuple[list[Proposal], str]:
        """Return a proposal for each sequence, and the reason for what was bought; see `choose` for the numbers."""
        if not self._drafters or max_rows <= 0:
            return [Proposal()] * len(sequences), "no drafter" if not self._drafters else "no row is left"
        budgets = [_budget(sequence) for sequence in sequences]
        asked = [index for index, budget in enumerate(budgets) if budget.max_rows > 0 and budget.max_depth > 0]
        if not asked:
            return [Proposal()] * len(sequences), "speculation is off for every sequence of this step"
        offered = [EMPTY] * len(sequences)
        for index, drafts in zip(
            asked, self._ask([sequences[i] for i in asked], [budgets[i] for i in asked]), strict=True
        ):
            budget = budgets[index]
            offered[index] = merge(drafts).clipped(
                vocab_size=self._vocab_size, max_depth=budget.max_depth, max_rows=budget.max_rows
            )
        offers = [self._offer(sequence, draft) for sequence, draft in zip(sequences, offered, strict=True)]
        decision = choose(offers, base, self._cost, max_rows=max_rows, num_emitting=num_emitting)
        return [
            Proposal(draft, draft.keep(nodes)) for draft, nodes in zip(offered, decision.nodes, strict=True)
        ], decision.reason

    def observe(self, sequence: Sequence, proposal: Proposal, words: Items[int]) -> None:
        """Learn from what the target said where something had been proposed."""
        if len(proposal.offered):
            self.stats.observe(sequence.request.workload_class, proposal.offered, words)

    def _ask(self, sequences: Items[Sequence], budgets: Items[Budget]) -> list[list[Draft]]:
        """Ask every drafter once for all sequences that allow it."""
        drafts: list[list[Draft]] = [[] for _ in sequences]
        for drafter in list(self._drafters):
            allowed = [i for i, s in enumerate(sequences) if s.request.speculation.drafter in (None, drafter.name)]
            if not allowed:
                continue
            contexts = [sequences[i].context for i in allowed]
            limits = [budgets[i] for i in allowed]
            answer = self._guard(drafter, partial(_ask, drafter, contexts, limits))
            if answer is not None:  # only a good proposal makes up for failures: a start that does nothing does not
                self._failures[drafter.name] = 0
            for index, draft in zip(allowed, answer or (), strict=False):
                drafts[index].append(draft)
        return drafts

    def _offer(self, sequence: Sequence, draft: Draft) -> Offer:
        return Offer(
            context=len(sequence.tokens),
            survival=self.stats.survival(sequence.request.workload_class, draft),
            forced=sequence.request.speculation.forced,
        )

    def _guard(self, drafter: Drafter, call: Callable[[], Answer]) -> Answer | None:
        """Run one call of a drafter; its failure is an event and nothing more."""
        try:
            answer = call()
        except Exception as error:
            self._failures[drafter.name] += 1
            self._emit(Fallback(f"drafter {drafter.name}", f"left out of this step: {type(error).__name__}: {error}"))
            if self._failures[drafter.name] >= _MOST_FAILURES:
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
    if not all(is_tree(draft) and _is_well_typed(draft) for draft in drafts):
        raise TypeError("propose() returned a draft whose entries are no tree of tokens")
    return drafts


def _is_well_typed(draft: Draft) -> bool:
    """Whether every entry is of its kind: what is computed with later must not raise there."""
    whole = all(isinstance(number, int) for column in (draft.tokens, draft.parents) for number in column)
    named = all(isinstance(source, str) for source in draft.sources)
    return whole and named and all(isinstance(number, int | float) for number in draft.confidence)


def _budget(sequence: Sequence) -> Budget:
    """A draft may reach up to the last token but one: the bonus is always there."""
    wanted = sequence.request.speculation
    if not wanted.enabled:
        return Budget(0, 0)
    return Budget(max_depth=min(wanted.max_depth, sequence.num_left - 1), max_rows=wanted.max_rows)

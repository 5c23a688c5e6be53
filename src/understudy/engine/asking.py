"""The drafters of an engine: whom to ask for whom, and what they answered. None of them is trusted.

free drafters      are asked for every sequence in every step
rare drafters      (forced, prediction) are asked for the few sequences that concern them
priced drafters    (a draft model) are asked where the plan expects that to pay for their time

Whatever a drafter does, plain decoding goes on: one that raises or returns something malformed loses its say in that
step, with an event; one that keeps failing is switched off for a while, with an event, and tried again with texts that
begin after that. Tokens that do not exist and nodes beyond the budget are left out without a word: a draft may know a
larger vocabulary than its target.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from understudy.control.classes import Line
from understudy.control.controller import PLANNING, Controller, counted
from understudy.control.cost import Load
from understudy.core.draft import EMPTY, ROOT, Draft, is_tree, is_well_typed
from understudy.core.events import Decided, EventSink, Fallback
from understudy.core.switches import Switches
from understudy.drafters.base import AheadDrafter, Budget, Context, Drafter, PricedDrafter, RareDrafter
from understudy.engine.pricing import Pricing, passes_s
from understudy.engine.proposal import Reading
from understudy.engine.sequence import Sequence

Answer = TypeVar("Answer")

_MOST_FAILURES = 3
"""Failures without a good proposal in between after which a drafter is switched off."""
_REST_STEPS = 1024
"""Steps after which it is tried again; twice as many each further time."""
_MOST_DOUBLINGS = 8
NO_BUDGET = Budget(0, 0)
_SHARED_ROWS = 48
_LEAST_ROWS = 4
"""Rows that the sequences of a step share, and that each may have at least."""


@dataclass(slots=True)
class Answers:
    """What was proposed in a step, and what asking took."""

    drafts: list[list[Draft]]
    """By sequence, one of each drafter that was asked for it."""
    seconds: dict[str, dict[Line, float]] = field(default_factory=dict)
    """By drafter and line, without what went into reading."""
    readings: list[Reading] = field(default_factory=list)
    """What is read once serves many cycles."""
    passes_s: dict[str, float] = field(default_factory=dict)
    """By drafter that costs time, if it drafted: what its passes are expected to take."""
    ready_s: float = 0.0
    """When the last guess is expected to be there, by the clock, if nobody waited for it."""

    @property
    def has_offers(self) -> bool:
        """Whether anybody proposed anything."""
        return any(draft.tokens for drafts in self.drafts for draft in drafts)

    def with_choosing(self, spent_s: float) -> dict[str, dict[Line, float]]:
        """The seconds, if so much was spent in all: choosing and waiting are shared by all who were asked."""
        asked_s = sum(sum(seconds.values()) for seconds in self.seconds.values())
        factor = max(1.0, spent_s / asked_s) if asked_s > 0.0 else 1.0
        return {
            drafter: {name: factor * one_s for name, one_s in seconds.items()}
            for drafter, seconds in self.seconds.items()
        }


@dataclass(frozen=True, slots=True)
class _Found:
    """What one drafter answered."""

    drafts: list[Draft] = field(default_factory=list)
    """One for each sequence; none at all if it failed or was not asked."""
    asked: list[int] = field(default_factory=list)
    """For whom it was asked."""
    is_reading: bool = False
    """Whether it had to read texts first."""


@dataclass(slots=True)
class _Record:
    """How a drafter has behaved."""

    num_failures: int = 0
    num_rests: int = 0
    num_steps_left: int = 0
    """Of its rest."""
    first_id: int = 0
    """It has met the sequences from this one on."""


class Asking:
    """Asks drafters, and survives whatever they do."""

    def __init__(
        self, drafters: Items[Drafter], *, vocab_size: int, emit: EventSink, clock: Callable[[], float]
    ) -> None:
        # the free ones first: what they offer need not be paid for
        self._all = sorted(drafters, key=lambda drafter: getattr(drafter, "cost", None) is not None)
        self.active = list(self._all)
        """Those that are not switched off."""
        self._records = {drafter.name: _Record() for drafter in drafters}
        self._vocab_size = vocab_size
        self._emit = emit
        self._clock = clock
        self._ahead = [cast(AheadDrafter, drafter) for drafter in drafters if hasattr(drafter, "take_words")]
        self.seeing = frozenset(drafter.name for drafter in drafters if hasattr(drafter, "see"))
        """Those that guess from hidden states of the target."""
        self._rare = {drafter.name: cast(RareDrafter, drafter) for drafter in drafters if hasattr(drafter, "concerns")}
        self._concerned: dict[int, frozenset[str]] = {}  # by sequence id, where there are any: rare drafters
        self._next_id = 0
        self.certain = frozenset(name for name, drafter in self._rare.items() if drafter.is_certain)
        """Those whose proposals are facts."""
        self.planned: dict[str, frozenset[int]] = {}
        """By drafter that costs time, the sequences for which it was asked last because that is expected to pay."""
        self.left_out: set[str] = set()
        """Those that have failed already in this step."""

    @property
    def rare(self) -> frozenset[str]:
        """Those that speak for few sequences, each from what it alone was given."""
        return frozenset(self._rare)

    @property
    def names(self) -> list[str]:
        """All drafters, those that were switched off included."""
        return list(self._records)

    def start(self, sequence: Sequence, *, may_draft: bool) -> None:
        """Introduce a sequence to every drafter, unless it forbids drafts: off costs nothing."""
        self._next_id = sequence.sequence_id + 1
        concerned = [
            name for name, rare in self._rare.items() if self.guard(rare, partial(rare.concerns, sequence.context))
        ]
        if concerned:
            self._concerned[sequence.sequence_id] = frozenset(concerned)
        if may_draft:
            for drafter in [drafter for drafter in self.active if self._has_met(drafter.name, sequence)]:
                self.guard(drafter, partial(drafter.start, sequence.context))

    def stop(self, sequence: Sequence, *, finished: bool) -> None:
        """Tell every drafter that a sequence ended."""
        for drafter in [drafter for drafter in self.active if self._has_met(drafter.name, sequence)]:
            self.guard(drafter, partial(drafter.stop, sequence.context, finished=finished))
        self._concerned.pop(sequence.sequence_id, None)

    def is_active(self, drafter: Drafter, sequence: Sequence) -> bool:
        """Whether a drafter is not switched off, and was introduced to a sequence."""
        return drafter in self.active and self._has_met(drafter.name, sequence)

    def is_concerned(self, sequence: Sequence) -> bool:
        """Whether a rare drafter could have something to say for a sequence."""
        return sequence.sequence_id in self._concerned

    def ask_all(
        self,
        sequences: Items[Sequence],
        budgets: Items[Budget],
        *,
        switches: Switches,
        controller: Controller,
        pricing: Pricing,
        base: Load,
        num_emitting: int,
    ) -> Answers:
        """What each drafter proposes for each sequence."""
        self._return_rested()
        asked = [index for index, budget in enumerate(budgets) if reaches(budget)]
        answers = Answers([[] for _ in sequences])
        names = {drafter.name for drafter in self.active if switches.allows(drafter.name)} - self.left_out
        for drafter in [drafter for drafter in self.active if drafter.name in names]:
            allowed = self._allowed(drafter.name, sequences, asked, controller)
            if not allowed:
                continue
            group = [sequences[i] for i in allowed]
            limits = [_capped(budgets[i], sequences[i], drafter.name, controller) for i in allowed]
            before = [answers.drafts[i] for i in allowed]
            started = self._clock()
            others = [sequences[i] for i in set(range(len(sequences))).difference(allowed)]
            found = self._ask(drafter, group, others, limits, before, controller, pricing, base, num_emitting)
            answers.ready_s = max(answers.ready_s, getattr(drafter, "ready_s", 0.0))
            seconds = max(self._clock(), answers.ready_s) - started
            asked_for = [group[i] for i in found.asked] or group  # who was weighed and left out pays for nothing else
            reading_s = 0.0
            if getattr(drafter, "cost", None) is not None and any(map(len, found.drafts)):
                answers.passes_s[drafter.name] = passes_s(cast(PricedDrafter, drafter), found.drafts, base)
            if found.is_reading and found.drafts:
                reading_s = max(0.0, seconds - answers.passes_s.get(drafter.name, 0.0))
            taken = answers.seconds.setdefault(drafter.name if found.asked else PLANNING, {})
            for line, one_s in _shared_out(seconds - reading_s, asked_for).items():
                taken[line] = taken.get(line, 0.0) + one_s  # several may be planned for, and none of them asked
            if reading_s:
                answers.readings.append(Reading(asked_for, reading_s))
            for index, draft in zip(allowed, found.drafts, strict=False):
                answers.drafts[index].append(draft)
        return answers

    def _allowed(self, name: str, sequences: Items[Sequence], asked: Items[int], controller: Controller) -> list[int]:
        """The sequences for which a drafter is asked in this step."""
        if name in self._rare and not self._concerned:
            return []
        wanted = [
            index
            for index in asked
            if sequences[index].request.speculation.drafter in (None, name)
            and self._has_met(name, sequences[index])
            and not (sequences[index].is_hidden and name in self.seeing)
        ]
        # once for each line and step: a breaker counts how often it was asked
        open_to = {line for line in {sequences[index].line for index in wanted} if controller.asks(line, name)}
        return [
            index for index in wanted if sequences[index].line in open_to or sequences[index].request.speculation.forced
        ]

    def _has_met(self, name: str, sequence: Sequence) -> bool:
        """Whether a drafter was introduced to a sequence, and could have something to say for it."""
        if name in self._rare and name not in self._concerned.get(sequence.sequence_id, ()):
            return False
        return sequence.sequence_id >= self._records[name].first_id

    def _ask(
        self,
        drafter: Drafter,
        sequences: Items[Sequence],
        others: Items[Sequence],
        budgets: Items[Budget],
        before: Items[Items[Draft]],
        controller: Controller,
        pricing: Pricing,
        base: Load,
        num_emitting: int,
    ) -> _Found:
        """One drafter's drafts for the sequences that allow it; none at all if it failed or was not worth asking."""
        asked = list(range(len(sequences)))
        is_reading = False
        if getattr(drafter, "cost", None) is not None:
            planned = self.guard(
                drafter,
                partial(
                    pricing.plan,
                    cast(PricedDrafter, drafter),
                    sequences,
                    budgets,
                    before,
                    base,
                    num_emitting,
                    controller,
                    others,
                ),
            )
            if planned is None:
                return _Found()
            asked, budgets, is_reading = planned.indexes, planned.budgets, planned.is_reading
            expected = asked if planned.is_planned else []
            self.planned[drafter.name] = frozenset(sequences[i].sequence_id for i in expected)
        if not asked:
            return _Found()
        contexts, limits = [sequences[i].context for i in asked], [budgets[i] for i in asked]
        answer = self.guard(drafter, partial(_ask, drafter, contexts, limits))
        if answer is None:
            return _Found([], asked, is_reading)
        # only a proposal makes up for failures: a start that does nothing does not, nor does having nothing to say
        if any(map(len, answer)):
            self._records[drafter.name].num_failures = 0
        drafts = [EMPTY] * len(sequences)
        unseen: frozenset[int] = getattr(drafter, "unseen", frozenset())
        for index, draft in zip(asked, answer, strict=True):
            budget = budgets[index]
            drafts[index] = draft.clipped(
                vocab_size=self._vocab_size, max_depth=budget.max_depth, max_rows=budget.max_rows, unseen=unseen
            )
        return _Found(drafts, asked, is_reading)

    def take_words(self) -> dict[int, tuple[int, float]]:
        """The words, and how sure they are, of all numbers that drafters named in their place."""
        words: dict[int, tuple[int, float]] = {}
        for drafter in self._ahead:
            words |= self.guard(drafter, drafter.take_words) or {}
        return words

    def guard(self, drafter: Drafter, call: Callable[[], Answer]) -> Answer | None:
        """Run one call of a drafter; its failure is an event and nothing more."""
        try:
            return call()
        except Exception as error:
            record = self._records[drafter.name]
            record.num_failures += 1
            self._emit(Fallback(f"drafter {drafter.name}", f"left out of this step: {type(error).__name__}: {error}"))
            if record.num_failures >= _MOST_FAILURES and drafter in self.active:
                self.active.remove(drafter)
                record.num_steps_left = _REST_STEPS << min(record.num_rests, _MOST_DOUBLINGS)
                record.num_rests += 1
                reason = f"switched off after {_MOST_FAILURES} failures in a row"
                self._emit(Fallback(f"drafter {drafter.name}", reason))
                self._emit(Decided("breaker", f"all, {drafter.name}", "off", f"{reason}: {error}"))
            return None

    def _return_rested(self) -> None:
        """Let those that have rested try again, with the sequences that they will meet from now on."""
        if len(self.active) == len(self._all):
            return
        for drafter in [drafter for drafter in self._all if drafter not in self.active]:
            record = self._records[drafter.name]
            record.num_steps_left -= 1
            if record.num_steps_left <= 0:
                record.first_id, record.num_failures = self._next_id, 0
                self.active[:] = [one for one in self._all if one in self.active or one is drafter]
                self._emit(Decided("breaker", f"all, {drafter.name}", "probing", "it has rested after its failures"))


def _ask(drafter: Drafter, contexts: Items[Context], budgets: Items[Budget]) -> list[Draft]:
    """Ask one drafter, and refuse an answer that is not one well-formed draft for each sequence."""
    drafts = drafter.propose(contexts, budgets)
    whole = isinstance(drafts, list) and len(drafts) == len(contexts)
    if not whole or not all(isinstance(draft, Draft) for draft in drafts):
        raise TypeError(f"propose() must return a list of {len(contexts)} drafts")
    if not all(is_tree(draft) and is_well_typed(draft) for draft in drafts):
        raise TypeError("propose() returned a draft whose entries are no tree of tokens")
    return drafts


def _capped(budget: Budget, sequence: Sequence, name: str, controller: Controller) -> Budget:
    """The budget, no deeper than the control plane allows this drafter."""
    request = sequence.request
    if request.speculation.forced:
        return budget
    depth = controller.depth(request.workload_class, name, request.sampling.temperature)
    return budget if depth >= budget.max_depth else replace(budget, max_depth=depth)


def _shared_out(seconds: float, sequences: Items[Sequence]) -> dict[Line, float]:
    """Seconds by line, the same for each sequence."""
    counts = counted(sequence.line for sequence in sequences)
    return {name: seconds * count / len(sequences) for name, count in counts.items()}


def budget_of(sequence: Sequence, switches: Switches, num_sequences: int = 1) -> Budget:
    """A draft may reach up to the last token but one: the bonus is always there.

    Where many share a step, few rows of each can pay, and proposing the others would cost time for nothing.
    """
    wanted = sequence.request.speculation
    depth = switches.depth_of(wanted, sequence.request.workload_class)
    if not depth or (sequence.num_resting and not wanted.forced):
        return NO_BUDGET
    useful = wanted.max_rows if wanted.forced else max(_LEAST_ROWS, _SHARED_ROWS // num_sequences)
    return Budget(
        max_depth=min(depth, sequence.num_left - 1),
        max_rows=min(wanted.max_rows, useful),
    )


def reaches(budget: Budget) -> bool:
    """Whether a budget leaves room for anything."""
    return budget.max_rows > 0 and budget.max_depth > 0


def without_rivals(tree: Draft, certain: frozenset[str]) -> Draft:
    """The tree without what facts rule out: beside a token that is certain, guesses would only lower its survival."""
    facts = {parent: node for node, parent in enumerate(tree.parents) if tree.sources[node] in certain}
    kept = {ROOT}
    for node, parent in enumerate(tree.parents):
        if parent in kept and facts.get(parent, node) == node:
            kept.add(node)
    return tree.keep(kept - {ROOT})

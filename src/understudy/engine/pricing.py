"""Whom to ask a drafter that costs time: the sequences of a step, weighed by control/planning.py.

A sequence is turned into what the plan needs to know of it: how far its drafts are likely to be right, what comes free
already, and how much of its text the drafter has yet to read. Where the plan says no, one sequence is asked now and
then all the same, or nobody would learn that things have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial

from understudy.control.controller import Controller, counted
from understudy.control.cost import CostModel, Load
from understudy.control.planning import (
    MOST_DEPTH,
    MOST_READ_ROWS,
    Allowance,
    AnswerLengths,
    Plan,
    Prospect,
    asking_s,
    plan,
)
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.draft import Draft, merge
from understudy.drafters.base import Budget, Drafter, PricedDrafter
from understudy.engine.sequence import Sequence

_PLAN_CYCLES = 3
_NOBODY_CYCLES = 8
"""Cycles for which a plan holds: one that asks somebody, and one that asks nobody, which is dear to find out anew."""
_OVERHEAD_WEIGHT = 0.25
_MOST_SURPRISE = 0.25
"""Share of a plain step by which a single step may take more beside the drafter's passes than was believed."""
_WAITING_STEPS = 16
"""For which a text that gains nothing must stand it that others are drafted for."""
_FEW_UNREAD = MOST_DEPTH + 1
"""After a draft a few words are unread, whatever became of it."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """A long text that is read to learn how good its drafts are: paid for once, read in several cycles."""

    sequence_id: int
    num_unread: int

    def goes_on(self, sequence: Sequence, num_unread: int) -> bool:
        """Whether this is the text, and what was paid for has brought it forward."""
        return sequence.sequence_id == self.sequence_id and num_unread < self.num_unread


@dataclass(frozen=True, slots=True)
class _Held:
    """A plan, and for how many cycles more it holds: what it hangs on moves slowly."""

    ids: tuple[int, ...]
    plan: Plan
    num_cycles: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Whom to ask, and how far."""

    indexes: list[int]
    budgets: list[Budget]
    """Of all sequences, asked or not."""
    is_reading: bool
    """Whether some of them have a text that must be read first."""
    is_planned: bool = True
    """Whether asking is expected to pay, or forced: then it will be so in the next cycle."""


class Pricing:
    """Plans the asking of drafters that cost time."""

    def __init__(
        self,
        cost: CostModel,
        stats: AcceptanceStats,
        allowance: Allowance,
        lengths: AnswerLengths,
        *,
        calibrated: Callable[[Sequence, Draft], Draft],
    ) -> None:
        self._cost = cost
        self._stats = stats
        self._allowance = allowance
        self._lengths = lengths
        self._calibrated = calibrated
        self._probes: dict[str, _Probe] = {}  # by drafter
        self._held: dict[str, _Held] = {}  # likewise
        self._overhead_s: dict[tuple[str, int], float] = {}  # likewise, and by number of texts, as a power of two

    def plan(
        self,
        drafter: PricedDrafter,
        sequences: Items[Sequence],
        budgets: Items[Budget],
        before: Items[Items[Draft]],
        base: Load,
        num_emitting: int,
        controller: Controller,
        others: Items[Sequence] = (),
    ) -> Asked:
        """Whom to ask a drafter that costs time, and until when it is worth going on. `others` are in the same step."""
        forced = {index for index, s in enumerate(sequences) if s.request.speculation.forced}
        if len(forced) == len(sequences):  # there is nothing to weigh
            is_reading = any(drafter.num_unread(sequence.context) > _FEW_UNREAD for sequence in sequences)
            return Asked(sorted(forced), list(budgets), is_reading)
        unread = [max(1, int(drafter.num_unread(sequence.context))) for sequence in sequences]
        is_alone = not any(len(draft) for drafts in before for draft in drafts)
        chosen = self._held_plan(drafter.name, sequences, unread, is_alone=is_alone)
        plain_s = self._cost.step_s(base)
        if chosen is None:
            items = zip(sequences, budgets, before, unread, strict=True)
            patience_s = partial(self._patience_s, plain_s=plain_s, num_texts=len(sequences) + len(others))
            chosen = plan(
                [self._prospect(drafter, *item, patience_s(item[0])) for item in items],
                base,
                target=self._cost,
                drafter=drafter.cost,
                num_emitting=num_emitting,
                is_one_pass=_is_one_pass(drafter),
                rows_per_guess=_rows_per_guess(drafter),
                overhead_s=self._overhead_s.get((drafter.name, len(sequences).bit_length()), 0.0),
                others_patience_s=min(map(patience_s, others), default=math.inf),
            )
            num_cycles = _PLAN_CYCLES if chosen.asked else _NOBODY_CYCLES
            # beside words that come free fewer are asked: that says nothing of the next step
            self._held[drafter.name] = _Held(_ids(sequences), chosen, num_cycles if is_alone else 0)
        asked = set(chosen.asked)
        if asked:
            texts = counted(sequences[index].request.workload_class for index in asked)
            if not controller.permits_asking(texts, chosen.drafting_s, base=base, load=chosen.load):
                asked = set()
        else:
            asked = self._probe(drafter, sequences, unread, plain_s)
        if not asked and not forced:
            return Asked([], list(budgets), is_reading=False, is_planned=False)
        limited = self._limited(drafter, sequences, budgets, chosen)
        if sum(unread[index] for index in asked) > MOST_READ_ROWS and not forced:  # nobody makes passes for a few
            limited = [replace(budget, max_depth=min(1, budget.max_depth)) for budget in limited]
        is_reading = any(unread[index] > _FEW_UNREAD for index in asked | forced)
        return Asked(sorted(asked | forced), limited, is_reading, is_planned=bool(chosen.asked or forced))

    def learn(self, name: str, num_texts: int, overhead_s: float, base: Load) -> None:
        """Count a step in which asking took so much beside the drafter's passes: the host's work."""
        key = name, num_texts.bit_length()
        known_s = self._overhead_s.get(key, 0.0)
        most_s = _MOST_SURPRISE * self._cost.step_s(base)
        surprise_s = min(most_s, max(-most_s, overhead_s - known_s))
        self._overhead_s[key] = max(0.0, known_s + _OVERHEAD_WEIGHT * surprise_s)

    def _held_plan(self, name: str, sequences: Items[Sequence], unread: Items[int], *, is_alone: bool) -> Plan | None:
        """The plan of the last cycles, if it was one for the same texts.

        One that asks somebody holds only where they have nothing new to be read, and nothing comes free (`is_alone`).
        """
        held = self._held.get(name)
        if held is None or not held.num_cycles or held.ids != _ids(sequences):
            return None
        if held.plan.asked and (max(unread) > _FEW_UNREAD or not is_alone):
            return None
        self._held[name] = replace(held, num_cycles=held.num_cycles - 1)
        return held.plan

    def _probe(
        self, drafter: PricedDrafter, sequences: Items[Sequence], unread: Items[int], plain_s: float
    ) -> set[int]:
        """Whom to ask although it is not expected to pay: one, now and then. A long text that was begun is read on."""
        name = drafter.name
        self._allowance.save(name, plain_s)
        usual = [index for index, sequence in enumerate(sequences) if not sequence.request.speculation.forced]
        begun = self._probes.pop(name, None)
        going = (index for index in usual if begun and begun.goes_on(sequences[index], unread[index]))
        chosen = next(going, None)
        if chosen is None:
            if not usual:
                return set()
            chosen = usual[0]
            seconds = asking_s(len(sequences[chosen].tokens), unread[chosen], drafter.cost)
            if not self._allowance.spend(name, seconds):
                return set()
        if unread[chosen] > MOST_READ_ROWS:
            self._probes[name] = _Probe(sequences[chosen].sequence_id, unread[chosen])
        return {chosen}

    def _prospect(
        self,
        drafter: PricedDrafter,
        sequence: Sequence,
        budget: Budget,
        before: Items[Draft],
        num_unread: int,
        patience_s: float,
    ) -> Prospect:
        request = sequence.request
        free = merge([self._calibrated(sequence, draft) for draft in before])
        most_guesses = -(-budget.max_rows // _rows_per_guess(drafter))  # the last guess may do without a rival
        return Prospect(
            context=len(sequence.tokens),
            num_unread=num_unread,
            acceptance=[
                self._stats.acceptance_at(
                    request.workload_class, drafter.name, position, temperature=request.sampling.temperature
                )
                for position in range(1, min(budget.max_depth, most_guesses, MOST_DEPTH) + 1)
            ],
            free_tokens=sum(survival_of(free)),
            num_left=self._num_left(sequence),
            patience_s=patience_s,
        )

    def _num_left(self, sequence: Sequence) -> float:
        """Words that it is still expected to say."""
        name = sequence.request.workload_class
        return self._lengths.num_left(name, num_generated=sequence.num_generated, num_allowed=sequence.num_left)

    def _patience_s(self, sequence: Sequence, *, plain_s: float, num_texts: int) -> float:
        """How much later than plainly its words may be in each of the next steps."""
        if sequence.request.speculation.forced:
            return math.inf
        num_steps = max(1.0, min(self._num_left(sequence), _WAITING_STEPS))
        return sequence.ledger.patience_s(plain_s, num_steps, num_texts)

    def _limited(
        self, drafter: Drafter, sequences: Items[Sequence], budgets: Items[Budget], chosen: Plan
    ) -> list[Budget]:
        """Budgets under which a draft goes on for as long as its next token is expected to pay; not where it is forced.

        Texts of one kind are judged alike, so they share a judge.
        """
        judges: dict[tuple[str, float], Callable[[Draft], bool]] = {}
        limited: list[Budget] = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            request = sequence.request
            if request.speculation.forced:
                limited.append(budget)
                continue
            kind = request.workload_class, request.sampling.temperature
            judge = judges.get(kind) or judges.setdefault(kind, self._judge(drafter.name, *kind, chosen))
            limited.append(Budget(min(budget.max_depth, MOST_DEPTH), budget.max_rows, judge))
        return limited

    def _judge(self, name: str, workload_class: str, temperature: float, chosen: Plan) -> Callable[[Draft], bool]:
        """Whether a chain of one kind is worth one more token. Nothing is learned while it is in use."""
        stats, group = self._stats, self._stats.group(workload_class, temperature)
        following: dict[int, float] = {}  # by length of the chain: how often the token behind it is right

        def goes_on(chain: Draft) -> bool:
            if not chosen.asked:
                return False
            length = len(chain)
            if length not in following:
                following[length] = stats.acceptance_at(workload_class, name, length + 1, temperature=temperature)
            return chosen.is_worth(stats.chain_survival(group, chain) * following[length])

        return goes_on


def passes_s(drafter: PricedDrafter, drafts: Items[Draft], base: Load) -> float:
    """What the passes of these drafts are expected to take, without what was read before them."""
    count = sum(len(draft) > 0 for draft in drafts)
    num_passes = min(1, count) if _is_one_pass(drafter) else max((draft.depth for draft in drafts), default=0)
    return num_passes * drafter.cost.step_s(Load(count, base.keys, base.keys))


def _is_one_pass(drafter: PricedDrafter) -> bool:
    return bool(getattr(drafter, "is_one_pass", False))


def _rows_per_guess(drafter: PricedDrafter) -> int:
    return int(getattr(drafter, "rows_per_guess", 1))


def _ids(sequences: Items[Sequence]) -> tuple[int, ...]:
    return tuple(sequence.sequence_id for sequence in sequences)

"""What is drafted in a step: proposals merged into one tree for each sequence, and the rows of it that pay.

What each drafter proposes (asking.py) is calibrated by what its proposals were worth so far, merged into one tree, and
the rows that pay are bought (buying.py), best first; where a drafter learns from rows of its own, those ride beside
them. The control plane (control/controller.py) says who may be asked, and is told what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from understudy.control.breaker import Tally
from understudy.control.choosing import BELIEVED
from understudy.control.classes import ClassNames, Line
from understudy.control.controller import READING, Controller, counted
from understudy.control.cost import CostModel, Load
from understudy.control.planning import Allowance, AnswerLengths, Worth
from understudy.control.policy import NOTHING, Decision, prepare
from understudy.control.rules import START_DEPTH
from understudy.control.stats import AcceptanceStats, survival_of
from understudy.core.control import ControlView, Learned, Policy
from understudy.core.draft import Draft, merge
from understudy.core.events import Decided, EventSink
from understudy.core.switches import ALL_ON
from understudy.drafters.base import Budget, Drafter
from understudy.engine.asking import NO_BUDGET, Answers, Asking, budget_of, reaches, without_rivals
from understudy.engine.buying import Buyer, stated
from understudy.engine.early import Early
from understudy.engine.pricing import Pricing
from understudy.engine.proposal import NO_TIME, DraftingTime, Proposal, Reading
from understudy.engine.scheduler import Share
from understudy.engine.scouting import Scouting
from understudy.engine.sequence import Sequence
from understudy.engine.showing import Showing
from understudy.runtime.runner import Answer

_BESIDE_A_PROMPT = "nothing is drafted beside a prompt"
_NOT_WORTH_IT = "asking does not pay for its time at present"
_LEFT_ALONE = "drafts bring too little where texts share their steps"
_MOST_ASLEEP = 15
"""Steps of a rest of which nothing is written down: only what is looked at costs nothing, and machines change."""
_REST_STEPS = 8
"""For which nothing is drafted for a text whose drafts have suddenly become wrong."""
_PAYING_WORDS = 16
"""Words over which the reading of a text is written down in the ledgers."""


class Drafting:
    """Asks every drafter, and buys what pays."""

    def __init__(
        self,
        drafters: Items[Drafter],
        *,
        cost: CostModel,
        vocab_size: int,
        emit: EventSink,
        policy: Policy | None = None,
        control_share: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cost = cost
        self._emit = emit
        self._clock = clock
        self._lengths = AnswerLengths()
        self._worth = Worth()
        self._weighed: str | None = None  # the kind of the last step, if it was
        self._classes = ClassNames()
        self._asking = Asking(drafters, vocab_size=vocab_size, emit=emit, clock=clock)
        allowance = Allowance()
        self._scouting = Scouting(self._asking.active, cost, allowance, self._asking.guard, vocab_size=vocab_size)
        self.early = Early(self._asking, drafters, clock)
        prepare()
        trusted = {drafter.name: drafter.trust for drafter in drafters if hasattr(drafter, "trust")}
        self.stats = AcceptanceStats(self._asking.certain, trusted)
        self._pricing = Pricing(cost, self.stats, allowance, self._lengths, calibrated=self._calibrated)
        self.controller = Controller(
            cost,
            self.stats,
            self._lengths,
            policy=policy,
            control_share=control_share if drafters else 0.0,
            exempt=self._asking.rare,
            emit=emit,
        )
        self._buyer = Buyer(cost, self.stats, self.controller)
        self.showing = Showing(self._asking, drafters, self.controller.sharing)
        self._num_asleep, self._num_slept, self._slept_s = 0, 0, 0.0
        self._asleep_because = ""
        self._left_alone: frozenset[Line] = frozenset()  # in the present step
        self.is_asleep = False
        """Whether the present step is one of which nothing is written down."""
        self._time = NO_TIME
        self._left_s: dict[Line, float] = {}  # reading of texts that ended before it was written down
        self.switches = ALL_ON
        """May be replaced between two steps; the next one obeys."""

    @property
    def names(self) -> list[str]:
        """The drafters that this engine was built with, those that were switched off included."""
        return self._asking.names

    def explain(self) -> ControlView:
        """How things stand."""
        return self.controller.explain()

    def recall(self, learned: Learned) -> None:
        """Begin with what an earlier engine has learned."""
        self.controller.recall(learned)

    def start(self, sequence: Sequence) -> None:
        """Introduce a sequence to every drafter, unless it forbids drafts."""
        self._num_asleep = 0
        self._asking.start(sequence, may_draft=reaches(budget_of(sequence, self.switches)))

    def stop(self, sequence: Sequence) -> None:
        """Tell every drafter that a sequence ended."""
        self._num_asleep = 0
        finished = sequence.finish_reason in ("stop", "length")
        if finished:
            self._lengths.observe(sequence.request.workload_class, sequence.num_generated)
        self._asking.stop(sequence, finished=finished)
        self.showing.stop()
        self._left_s[sequence.line] = self._left_s.get(sequence.line, 0.0) + sequence.unpaid_s
        sequence.unpaid_s = 0.0

    def reason_to_rest(self, sequences: Items[Sequence], *, is_beside_prompt: bool = False) -> str:
        """Why no drafter is asked in the next step; empty if they are. To be asked once for each step."""
        self.is_asleep = False
        self._left_alone = frozenset()
        if not self._asking.names:
            return "no drafter"
        is_forced = any(sequence.request.speculation.forced for sequence in sequences)
        if not sequences or (is_beside_prompt and not is_forced):
            return _BESIDE_A_PROMPT
        if not any(reaches(budget_of(sequence, self.switches, len(sequences))) for sequence in sequences):
            return "speculation is off for every sequence of this step"
        if is_forced:
            return ""
        texts = [sequence.sequence_id for sequence in sequences]
        return self.controller.begin(texts) or self._reason_to_sleep(sequences)

    def _reason_to_sleep(self, sequences: Items[Sequence]) -> str:
        """Why nobody is asked in this step, and in how many of the next ones; empty if somebody is."""
        num_slept, self._num_slept = self._num_slept, 0
        slept_s, self._slept_s = self._slept_s, 0.0
        lines = [sequence.line for sequence in sequences]
        self._left_alone = self.controller.sharing.resting(lines, num_slept=num_slept, slept_s=slept_s)
        if self._left_alone and all(map(self._is_left_alone, sequences)):
            self._sleep(sequences, _MOST_ASLEEP, _LEFT_ALONE)
            return _LEFT_ALONE
        num_resting = self._worth.num_resting(self._kind(sequences), num_slept)
        self._sleep(sequences, num_resting - 1)
        return _NOT_WORTH_IT if num_resting else ""

    def _is_left_alone(self, sequence: Sequence) -> bool:
        """Whether its line is; what a grammar or a prediction says is no guess, and has nothing to do with its line."""
        return sequence.line in self._left_alone and not self._asking.is_concerned(sequence)

    def propose(
        self,
        sequences: Items[Sequence],
        base: Load,
        *,
        max_rows: int,
        num_emitting: int,
        has_to_ask: bool = False,
        idle_since_s: float | None = None,
    ) -> tuple[list[Proposal], str]:
        """Return a proposal for each sequence, and the reason for what was bought; see `choose` for the numbers.

        `has_to_ask`: it is known already that there is no reason to rest in this step. `idle_since_s`: since when a
        device waits; where nothing is asked the next pass is on its way by then, so that time is drafting's.
        """
        self._weighed = None
        self.is_asleep = self._num_asleep > 0 and bool(sequences) and not has_to_ask and idle_since_s is None
        if self.is_asleep:  # the same texts as in the last step, after which nobody was to be asked
            self._num_asleep -= 1
            self._num_slept += 1
            self.controller.switchback.is_plain([sequence.sequence_id for sequence in sequences])
            return [Proposal()] * len(sequences), self._asleep_because
        reason = "" if has_to_ask and sequences else self.reason_to_rest(sequences)
        if not reason and max_rows <= 0:
            reason = "no row is left"
        if reason:
            return [Proposal()] * len(sequences), reason
        started = self._clock() if idle_since_s is None else idle_since_s
        self.showing.tell(self.switches)
        budgets = [
            NO_BUDGET if self._is_left_alone(sequence) else budget_of(sequence, self.switches, len(sequences))
            for sequence in sequences
        ]
        answers = self._asking.ask_all(
            sequences,
            budgets,
            switches=self.switches,
            controller=self.controller,
            pricing=self._pricing,
            base=base,
            num_emitting=num_emitting,
        )
        if not answers.has_offers and not self._scouting.is_possible:
            return self._without_offers(sequences, base, answers, started)
        merged = [self._merged(*item) for item in zip(sequences, answers.drafts, budgets, strict=True)]
        trees = [tree for tree, _ in merged]
        reading_s = sum(reading.seconds for reading in answers.readings)
        spent_s = max(self._clock(), answers.ready_s) - started - reading_s
        plain_s = self._cost.step_s(base)
        offers = stated(sequences, merged, plain_s)
        asked_s = answers.with_choosing(spent_s)
        decision, refusal = self._buyer.buy(
            sequences, offers, base, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s, asked_s=asked_s
        )
        in_passes_s = sum(sum(answers.seconds[name].values()) for name in answers.passes_s)
        if not answers.readings:  # what is read now pays later, and only if it is read to its end
            self._weigh(sequences, max(0.0, spent_s - in_passes_s) / plain_s, decision)
        bought = [tree.keep(nodes) for tree, nodes in zip(trees, decision.nodes, strict=True)]
        scouts = self._scouting.choose(
            sequences,
            bought,
            base,
            switches=self.switches,
            max_rows=max_rows,
            num_emitting=num_emitting,
            permits=lambda name, seconds: self.controller.permits_asking({name: 1}, seconds),
        )
        proposals = [Proposal(tuple(answers.drafts[i]), bought[i], scouts[i]) for i in range(len(sequences))]
        ended = max(self._clock(), answers.ready_s)
        asked_s = answers.with_choosing(ended - started - reading_s)
        self._time = DraftingTime(ended - started, asked_s, answers.ready_s, answers.passes_s, tuple(answers.readings))
        return proposals, f"{decision.reason}{refusal}"

    def _without_offers(
        self, sequences: Items[Sequence], base: Load, answers: Answers, started_s: float
    ) -> tuple[list[Proposal], str]:
        """What most steps of a text come to that cannot be guessed: there is nothing to merge or to buy."""
        reading_s = sum(reading.seconds for reading in answers.readings)
        spent_s = max(self._clock(), answers.ready_s) - started_s - reading_s
        if not answers.readings:
            self._weigh(sequences, spent_s / self._cost.step_s(base), NOTHING)
        asked_s = answers.with_choosing(spent_s)
        self._time = DraftingTime(spent_s + reading_s, asked_s, answers.ready_s, {}, tuple(answers.readings))
        return [Proposal()] * len(sequences), NOTHING.reason

    def _weigh(self, sequences: Items[Sequence], spent: float, decision: Decision) -> None:
        """Learn whether asking pays for its time, but for passes of a draft, which are for the ledgers."""
        if any(sequence.request.speculation.forced for sequence in sequences):  # a proof, whatever it costs
            return
        self._weighed = self._kind(sequences)
        self._worth.observe(self._weighed, saved=1.0 - 1.0 / decision.gain, spent=spent)
        self._sleep(sequences, self._worth.num_to_rest(self._weighed))

    def _sleep(self, sequences: Items[Sequence], num_steps: int, reason: str = _NOT_WORTH_IT) -> None:
        """Sleep through the next steps, but not before what was read is paid for."""
        wakeful = bool(self._left_s) or any(sequence.unpaid_s for sequence in sequences)
        self._num_asleep = 0 if wakeful else min(num_steps, _MOST_ASLEEP)
        self._asleep_because = reason

    def forget_asking(self) -> None:
        """Take back what the asking of this step was found to be worth: it was disturbed."""
        if self._weighed is not None:
            self._worth.take_back()
            self._num_asleep = 0

    def waited(self, seconds: float, base: Load) -> None:
        """Count for how long a device waited besides, until a pass without a draft was launched."""
        if self._weighed is not None:
            self._worth.observe(self._weighed, saved=0.0, spent=seconds / self._cost.step_s(base))

    def take_time(self) -> DraftingTime:
        """What proposing took since the last call."""
        time, self._time = self._time, NO_TIME
        return self.early.settle(time)

    def seen(self, proposals: list[Proposal]) -> list[Proposal]:
        """The proposals with the words that drafters had named before anybody saw them."""
        words = self._asking.take_words()
        return [proposal.with_words(words) for proposal in proposals] if words else proposals

    def _kind(self, sequences: Items[Sequence]) -> str:
        """The kind of a step, by number of texts, by which it is learned whether asking pays, and by rare drafters."""
        most = 1 << (len(sequences) - 1).bit_length()
        kind = f"up to {most} sequences" if most > 1 else str(self._classes.known_line(sequences[0].line))
        has_rare = any(map(self._asking.is_concerned, sequences))
        return f"{kind}, with a grammar or a prediction" if has_rare else kind

    def observe(self, sequence: Sequence, proposal: Proposal, words: Items[int], path: Items[int]) -> None:
        """Learn from what the target said where something had been proposed; `path` are the accepted nodes."""
        request = sequence.request
        drafted = accepted = 0
        own = [proposal.bought.sources[node] for node in path]
        for draft in proposal.spelled():
            if len(draft) and words:
                matched = self.stats.observe(
                    request.workload_class, draft, words, temperature=request.sampling.temperature
                )
                tally = Tally(min(draft.depth, len(words), START_DEPTH, matched + 1), min(matched, START_DEPTH))
                source = draft.sources[0]
                tally.num_shared = sum(other != source for other in own[:matched])
                self.controller.count(sequence.line, source, tally)
                drafted, accepted = drafted + tally.drafted, accepted + tally.accepted
        if len(proposal.bought):
            for source, tally in _bought(proposal.bought, path).items():
                self.controller.count(sequence.line, source, tally)
        self._watch(sequence, drafted, accepted)
        if len(proposal.scouts):
            rows = Tally(num_scouts=len(proposal.scouts))
            self.controller.count(sequence.line, proposal.scouts.sources[0], rows)
            self._scouting.observe(sequence, proposal.bought, words)

    def _watch(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Look after the health of one text's drafts."""
        sequence.num_resting = max(0, sequence.num_resting - 1)
        alarm = sequence.health.observe(drafted=drafted, accepted=accepted)
        if alarm is None:
            return
        action = "a text that repeats itself looks so"
        if alarm.kind == "fall":
            sequence.num_resting = _REST_STEPS
            action = f"nothing is drafted for it for {_REST_STEPS} steps"
        reason = f"acceptance went from {alarm.before:.0%} to {alarm.after:.0%} within this text: {action}"
        subject = f"{sequence.request.workload_class}, request {sequence.request.request_id}"
        self._emit(Decided("health", subject, f"sudden {alarm.kind}", reason))

    def sleep_through(self, base: Load, forward_s: float) -> None:
        """Write nothing of a step into the ledgers, whose words came plainly; a control group counts it."""
        self._slept_s += forward_s
        if self.controller.switchback.share:
            self.controller.switchback.observe(plain_s=self._cost.step_s(base), spent_s=forward_s)

    def forget_step(self) -> None:
        """Write nothing of a step into the ledgers: what it took says nothing of those to come."""
        self.controller.forget_step()

    def settle(
        self, sequences: Items[Sequence], *, base: Load, load: Load, forward_s: float, drafting: DraftingTime
    ) -> None:
        """Write a step into the ledgers: `sequences` spoke in it, `base` is what it computed without drafts."""
        self._owe(drafting.readings)
        for name, passes_s in ({} if drafting.readings else drafting.passes_s).items():
            self._pricing.learn(name, len(sequences), sum(drafting.asked_s[name].values()) - passes_s, base)
        if any(sequence.request.speculation.forced for sequence in sequences):  # a proof, whatever it costs
            self.controller.forget_step()
            return
        paid, self._left_s = self._left_s, {}
        for sequence in sequences:
            if sequence.unpaid_s:
                part_s = sequence.unpaid_s / (_PAYING_WORDS - sequence.num_generated % _PAYING_WORDS)
                sequence.unpaid_s -= part_s
                paid[sequence.line] = paid.get(sequence.line, 0.0) + part_s
        texts = counted(sequence.line for sequence in sequences)
        seconds = {**drafting.asked_s, READING: paid}
        self.controller.settle(texts, base=base, load=load, forward_s=forward_s, drafting_s=seconds)

    def _owe(self, readings: Items[Reading]) -> None:
        """Note what was read, to be paid for while the texts go on; not where it was forced."""
        for reading in readings:
            one_s = reading.seconds / len(reading.sequences)
            for sequence in [s for s in reading.sequences if not s.request.speculation.forced]:
                if sequence.finish_reason is None:
                    sequence.unpaid_s += one_s
                else:
                    self._left_s[sequence.line] = self._left_s.get(sequence.line, 0.0) + one_s

    def learn(self, share: Share, proposal: Proposal, answer: Answer) -> None:
        """Let a drafter learn from its scouts."""
        self._scouting.learn(share, proposal.bought, proposal.scouts, answer)

    def _merged(self, sequence: Sequence, drafts: Items[Draft], budget: Budget) -> tuple[Draft, int]:
        """All drafts in one tree, and the group that tells what its confidences are worth.

        Of too many nodes the likeliest are kept, whoever proposed them. Drafts of several are calibrated before they
        are merged: what each states means something else.
        """
        filled = [draft for draft in drafts if len(draft)]
        if len(filled) == 1 and len(filled[0]) <= budget.max_rows:
            request = sequence.request
            return filled[0], self.stats.group(request.workload_class, request.sampling.temperature)
        tree = merge([self._calibrated(sequence, draft) for draft in filled])
        if self._asking.is_concerned(sequence):
            tree = without_rivals(tree, self._asking.certain)
        if len(tree) > budget.max_rows:
            survival = survival_of(tree)  # never larger than the parent's, who stands before its children
            tree = tree.keep(sorted(range(len(tree)), key=lambda node: -survival[node])[: budget.max_rows])
        return tree, BELIEVED

    def _calibrated(self, sequence: Sequence, draft: Draft) -> Draft:
        request = sequence.request
        return self.stats.calibrated(request.workload_class, draft, temperature=request.sampling.temperature)


def _bought(draft: Draft, path: Items[int]) -> dict[str, Tally]:
    """Rows that were verified, and those of them that were said, by drafter."""
    tallies: dict[str, Tally] = {}
    for source in draft.sources:
        tallies.setdefault(source, Tally()).num_rows += 1
    for node in path:
        tallies[draft.sources[node]].num_saved += 1
    return tallies

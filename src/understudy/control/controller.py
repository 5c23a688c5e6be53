"""The control plane of one engine: who may draft in a step, what that came to, and why, in words.

Before a step   `begin` says whether everybody is plain in it, `asks` whether a drafter is asked for a line of texts (a
                class at a temperature), `depth` how far a draft may reach, `refused` whom the ledgers do not let buy
                what was chosen.
In a step       `count` takes what a drafter did for a line.
After it        `settle` writes everything down in measured time, and moves breakers.

Ledgers are kept by class, which is what is promised; breakers by line, since a draft that pays at temperature 0 may
lose at 1.5.

Nothing in here changes a word, and nothing knows of models: worlds with a known truth are run through it in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from understudy.control.breaker import Breaker, Tally
from understudy.control.classes import TEMPERATURES, ClassNames, Line
from understudy.control.cost import CostModel, Load
from understudy.control.health import Alarm, Health
from understudy.control.ledger import WindowLedger, WorstCases
from understudy.control.planning import AnswerLengths
from understudy.control.reference import Reference
from understudy.control.rules import KNOWN_PROPOSALS, start_depth
from understudy.control.sharing import Sharing
from understudy.control.stats import AcceptanceStats
from understudy.control.switchback import Switchback
from understudy.core.control import ClassView, ControlView, Learned, Policy
from understudy.core.events import Decided, EventSink

Name = TypeVar("Name", str, Line)
Number = TypeVar("Number", int, float)

_DEAR_ASKING = 0.01
"""Share of a plain step from which on asking counts for the breaker, even where nothing is proposed."""
ENGINE = "all"
"""What the engine's own ledger is called."""
READING = "reading"
"""Stands among drafters for what they read of texts once, and which serves many steps."""
PLANNING = "planning"
"""Likewise for finding out that a drafter need not be asked: it takes time, and says nothing of that drafter."""
_NOBODYS = frozenset({READING, PLANNING})


@dataclass(slots=True)
class _Class:
    """What is kept of one class."""

    name: str
    ledger: WindowLedger = field(default_factory=WindowLedger)
    breakers: dict[tuple[int, str], Breaker] = field(default_factory=dict)
    """By band of temperature and drafter."""
    health: dict[tuple[int, str], Health] = field(default_factory=dict)
    is_refused: bool = False
    """Whether the ledger stood in the way when it was last asked."""


class Controller:
    """Decides for an engine, and explains itself."""

    def __init__(
        self,
        cost: CostModel,
        stats: AcceptanceStats,
        lengths: AnswerLengths,
        *,
        policy: Policy | None,
        control_share: float,
        exempt: frozenset[str],
        emit: EventSink,
    ) -> None:
        self._cost = cost
        self._stats = stats
        self._lengths = lengths
        self._policy = policy or Policy()
        self._exempt = exempt  # drafters of which one text says nothing about the next: no breaker, no rule of depth
        self._emit = emit
        self._names = ClassNames()
        self._classes: dict[str, _Class] = {}
        self._engine = _Class(ENGINE)
        self._worst = WorstCases()
        self._tallies: dict[tuple[Line, str], Tally] = {}
        self._reference = Reference()
        self._num_steps = 0
        self.switchback = Switchback(control_share)
        self.sharing = Sharing(emit)
        """Whom to leave alone where texts share their steps, since drafts bring them too little."""

    # before a step

    def begin(self, texts: list[int]) -> str:
        """Why everybody is plain in this step; empty if nobody need be."""
        if self.switchback.is_plain(texts):
            return "a plain window of the control group"
        if self._engine.ledger.is_over:
            return "more is owed than the ledger allows"
        return "a plain step, to know what one takes" if self._reference.is_due else ""

    def asks(self, line: Line, drafter: str) -> bool:
        """Whether to ask a drafter for a line. No drafter is asked, whatever it is, while too much is owed."""
        is_over = self._engine.ledger.is_over or self._class(line.workload_class).ledger.is_over
        return (drafter in self._exempt or self._breaker(line, drafter).asks()) and not is_over

    def permits_asking(
        self, texts: Mapping[str, int], seconds: float, *, base: Load | None = None, load: Load | None = None
    ) -> bool:
        """Whether the ledgers have room for a drafter that takes so long to ask, for so many texts by class.

        `load` has the rows that it is asked for, `base` none: where there is no room for them, asking would be in vain.
        """
        total = sum(texts.values())
        if base is not None and load is not None:
            worst_s = self._worst.of(load.rows - base.rows, self._cost.step_s(load, base))
            seconds += max(0.0, worst_s - self._cost.step_s(base))
        parts = [(self._class(name), seconds * count / total) for name, count in texts.items()]
        return all(self._permits(known, share_s) for known, share_s in [(self._engine, seconds), *parts])

    def depth(self, workload_class: str, drafter: str, temperature: float) -> int:
        """How far a draft may reach: a rule of thumb until the drafter is known, then the depth rule alone decides."""
        allowed = self._policy.of(workload_class).max_depth
        most = 64 if allowed is None else allowed
        known = self._stats.num_seen(workload_class, drafter, temperature=temperature)
        if drafter in self._exempt or known >= KNOWN_PROPOSALS:
            return most
        return min(most, start_depth(temperature))

    def refused(self, rows: Mapping[str, int], base: Load, load: Load, drafting_s: Mapping[str, float]) -> set[str]:
        """The classes whose share of a cycle's worst case their ledgers, or the engine's, have no room for.

        `rows`: drafted rows by class. `load` has all of them, `base` none. `drafting_s`: what asking took, by class.
        """
        total = sum(rows.values())
        excess_s = self._worst.of(total, self._cost.step_s(load, base)) - self._cost.step_s(base)
        if not self._permits(self._engine, excess_s + sum(drafting_s.values())):
            return set(rows)
        asked_s = self._named(drafting_s)
        refused = {
            name
            for name, count in self._named(rows).items()
            if not self._permits(self._class(name), excess_s * count / total + asked_s.get(name, 0.0))
        }
        return {name for name in rows if self._names.known(name) in refused}

    def _permits(self, known: _Class, excess_s: float) -> bool:
        is_permitted = known.ledger.permits(excess_s)
        if not is_permitted and not known.is_refused:  # told once, not in every step
            self._note_refusal(known.name, known.ledger, excess_s)
        known.is_refused = not is_permitted
        return is_permitted

    # in a step

    def count(self, line: Line, drafter: str, tally: Tally) -> None:
        """Take what a drafter did for one text of a line."""
        key = self._names.known_line(line), drafter
        known = self._tallies.get(key)
        if known is None:
            self._tallies[key] = tally
        else:
            known.add(tally)

    def forget_step(self) -> None:
        """Drop what was counted in this step."""
        self._tallies = {}

    # after a step

    def settle(
        self,
        texts: Mapping[Line, int],
        *,
        base: Load,
        load: Load,
        forward_s: float,
        drafting_s: Mapping[str, Mapping[Line, float]],
    ) -> None:
        """Write a step down. `texts`: those that spoke, by line. `drafting_s`: seconds by drafter and line."""
        tallies, self._tallies = self._tallies, {}
        texts = {line: int(count) for line, count in self._by_known_line(texts).items()}
        drafting_s = {drafter: self._by_known_line(seconds) for drafter, seconds in drafting_s.items() if seconds}
        num_texts = sum(texts.values())
        if not num_texts:
            return
        self._num_steps += 1
        plain_s = self._cost.step_s(base)
        num_rows = load.rows - base.rows
        predicted_s = self._cost.drafted_s(load, plain_s) if num_rows else plain_s
        if base.rows == num_texts:  # a prompt's pass says nothing of a plain step
            self._reference.observe(forward_s / predicted_s, is_plain=not num_rows)
        excess_s = forward_s - plain_s if num_rows else 0.0  # of a plain step, by definition
        spent_s = sum(sum(by_class.values()) for by_class in drafting_s.values())
        if num_rows and self._worst.observe(num_rows, predicted_s=predicted_s, seconds=forward_s):
            self._note_overrun(num_rows, predicted_s, forward_s)
        debts, saved = dict.fromkeys(texts, 0.0), dict.fromkeys(texts, 0.0)
        drafted = {line.workload_class for (line, _), tally in tallies.items() if tally.num_rows + tally.num_scouts}
        for drafter, seconds in drafting_s.items():
            for line, asking_s in seconds.items():
                debts[line] = debts.get(line, 0.0) + asking_s
                is_dear = asking_s > _DEAR_ASKING * plain_s * texts.get(line, 0) / num_texts
                if line in texts and is_dear and drafter not in _NOBODYS:
                    tallies.setdefault((line, drafter), Tally())
        for (line, drafter), tally in tallies.items():
            rows_s = excess_s * (tally.num_rows + tally.num_scouts) / num_rows if num_rows else 0.0
            tally.cost_s = rows_s + drafting_s.get(drafter, {}).get(line, 0.0)
            tally.saved_s = plain_s * tally.num_saved / num_texts
            tally.shared_s = plain_s * tally.num_shared / num_texts
            tally.plain_s = plain_s * texts.get(line, 0) / num_texts
            debts[line] = debts.get(line, 0.0) + rows_s - tally.saved_s
            saved[line] = saved.get(line, 0.0) + tally.saved_s
            self._judge(line, drafter, tally)
        for line, count in texts.items():
            passed_s = plain_s * count / num_texts + saved[line]
            self.sharing.observe(line, num_texts, passed_s=passed_s, gained_s=-debts[line])
        debt_s, saved_s = by_class(debts), by_class(saved)
        for name, count in by_class(texts).items():
            share_s = plain_s * count / num_texts + saved_s[name]
            self._class(name).ledger.add(
                plain_s=share_s, debt_s=debt_s[name], step_s=plain_s, is_drafted=name in drafted
            )
        self._engine.ledger.add(
            plain_s=plain_s + sum(saved.values()), debt_s=sum(debts.values()), step_s=plain_s, is_drafted=num_rows > 0
        )
        self.switchback.observe(plain_s=plain_s + sum(saved.values()), spent_s=forward_s + spent_s)

    def _judge(self, line: Line, drafter: str, tally: Tally) -> None:
        if drafter in self._exempt:
            return
        breaker = self._breaker(line, drafter)
        health = self._class(line.workload_class).health.setdefault((line.band, drafter), Health())
        alarm = health.observe(drafted=tally.drafted, accepted=tally.accepted)
        if alarm is not None:
            self._act_on(alarm, breaker)
        # a look that came to nothing is no decision
        if breaker.observe(tally) and breaker.state not in ("probing", breaker.told):
            breaker.told = breaker.state
            self._decide("breaker", breaker, breaker.state, breaker.reason)

    def _act_on(self, alarm: Alarm, breaker: Breaker) -> None:
        """Something has changed: what was learned before it is forgotten, and the drafter has to show itself anew."""
        self._stats.forget(breaker.line, breaker.drafter)
        action = "what was learned is forgotten"
        reason = f"acceptance {'fell' if alarm.kind == 'fall' else 'rose'} from {alarm.before:.0%} to {alarm.after:.0%}"
        if breaker.probe(f"{reason} within a few cycles"):
            action += ", and it is probed"
        self._decide("health", breaker, f"sudden {alarm.kind}", f"{reason}: {action}")

    # what is shown and kept

    def explain(self) -> ControlView:
        """How things stand."""
        breakers = [breaker for known in self._classes.values() for breaker in known.breakers.values()]
        return ControlView(
            classes=tuple(
                self._view(name, ledger)
                for name, ledger in ((known.name, known.ledger) for known in (self._engine, *self._classes.values()))
            ),
            breakers=tuple(breaker.view() for breaker in breakers),
            speedup=self.switchback.speedup(),
            num_steps=self._num_steps,
            num_overruns=self._worst.num_overruns,
            learned=Learned(
                rates=tuple(self._stats.rates()),
                breakers=tuple(breaker.learned() for breaker in breakers),
                answer_lengths=self._lengths.means(),
            ),
        )

    def recall(self, learned: Learned) -> None:
        """Begin with what an earlier engine has learned."""
        self._stats.recall(learned.rates)
        self._lengths.recall(learned.answer_lengths)
        for one in learned.breakers:
            breaker = self._breaker(Line(one.workload_class, one.temperature_band), one.drafter)
            breaker.state, breaker.reason, breaker.rest_steps = one.state, one.reason, one.rest_steps
            breaker.told = "on" if one.state == "on" else "off"

    def _view(self, name: str, ledger: WindowLedger) -> ClassView:
        breakers = self._classes[name].breakers.values() if name in self._classes else ()
        depths = [self.depth(name, breaker.drafter, 0.0) for breaker in breakers]
        states = [
            f"{breaker.drafter} {TEMPERATURES[breaker.line.band]} {breaker.state}: {breaker.reason}"
            for breaker in breakers
        ]
        return ClassView(
            workload_class=name,
            plain_s=ledger.plain_s,
            debt_s=ledger.debt_s,
            allowance_s=ledger.allowance_s,
            num_refused=ledger.num_refused,
            max_depth=max(depths, default=0),
            reason="; ".join(states) or self._policy.of(name).reason,
        )

    def _named(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Numbers by class, those of classes without a place of their own added up."""
        named: dict[str, float] = {}
        for name, number in numbers.items():
            known = self._names.known(name)
            named[known] = named.get(known, 0.0) + number
        return named

    def _by_known_line(self, numbers: Mapping[Line, float]) -> dict[Line, float]:
        named: dict[Line, float] = {}
        for line, number in numbers.items():
            known = self._names.known_line(line)
            named[known] = named.get(known, 0.0) + number
        return named

    def _class(self, workload_class: str) -> _Class:
        name = self._names.known(workload_class)
        known = self._classes.get(name)
        if known is None:
            known = self._classes[name] = _Class(name)
        return known

    def _breaker(self, line: Line, drafter: str) -> Breaker:
        known = self._class(line.workload_class)
        breaker = known.breakers.get((line.band, drafter))
        if breaker is None:
            breaker = known.breakers[line.band, drafter] = Breaker(Line(known.name, line.band), drafter)
            policy = self._policy.of(known.name)
            if not policy.enabled:
                breaker.trip(f"the policy says so: {policy.reason or 'no reason is given'}")
            elif policy.drafters is not None and drafter not in policy.drafters:
                breaker.trip(f"the policy asks {' and '.join(policy.drafters) or 'nobody'}: {policy.reason}")
            breaker.told = breaker.state
        return breaker

    def _note_refusal(self, name: str, ledger: WindowLedger, excess_s: float) -> None:
        self._emit(
            Decided(
                "ledger",
                name,
                "refused",
                f"a debt of {1e3 * ledger.debt_s:.1f} ms and {1e3 * excess_s:.1f} ms that one more cycle may take "
                f"are over the allowance of {1e3 * ledger.allowance_s:.1f} ms",
            )
        )

    def _note_overrun(self, num_rows: int, predicted_s: float, seconds: float) -> None:
        self._emit(
            Decided(
                "ledger",
                ENGINE,
                "overrun",
                f"a cycle with {num_rows} drafted rows took {1e3 * seconds:.1f} ms where {1e3 * predicted_s:.1f} ms "
                "were expected, longer than the worst case reckoned with",
            )
        )

    def _decide(self, what: str, breaker: Breaker, outcome: str, reason: str) -> None:
        self._emit(Decided(what, f"{breaker.line}, {breaker.drafter}", outcome, reason))


def counted(names: Iterable[Name]) -> dict[Name, int]:
    """How many there are of each."""
    counts: dict[Name, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def by_class(numbers: Mapping[Line, Number]) -> dict[str, Number]:
    """Numbers of lines, those of one class added up."""
    added: dict[str, Number] = {}
    for line, number in numbers.items():
        name = line.workload_class
        added[name] = added[name] + number if name in added else number
    return added

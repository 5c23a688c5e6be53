"""Whether a drafter is on for texts of a class at about a temperature: ON, PROBING or OFF, by what was measured.

    ON       it is asked, and what pays is bought
    OFF      it is looked at now and then: what it proposes is compared with what is said. One that had lost time rests
             before the first look, and the longer asking takes, the rarer the looks
    PROBING  it is asked and bought again, for a few cycles that decide

ON -> OFF         it loses time over some cycles; or fewer than 40 % of its drafted words are right and it does not gain
                  time all the same (rules.py: what is measured overrules the rule)
OFF -> PROBING    a look shows a draft that is expected to pay
PROBING -> ON     the cycles gained time, or at least 45 % were right and none was lost
PROBING -> OFF    they did not; if they lost time, it rests twice as long as before

Acceptance is that of the first START_DEPTH words of every proposal, bought or not, as far as the words that were said
reach. Time is measured: what its rows and its asking took, against plain steps saved by its accepted words. A word
that another drafter had as well, and whose row was that one's, counts as if it had been its own: whether to ask
somebody for what others offer free is for a plan to say, step by step, and not for what switches off a class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from understudy.control.classes import TEMPERATURES, Line
from understudy.control.rules import LEAST_ACCEPTANCE, RETURN_ACCEPTANCE
from understudy.core.control import BreakerState, BreakerView, LearnedBreaker

_MEMORY = 1.0 - 1.0 / 32.0
"""The last thirty cycles or so count."""
_LEAST_CYCLES = 12.0
"""Of those, so many must be known before it is switched off."""
_PROBE_CYCLES = 8
_LEAST_LOSS = 0.02
"""Share of the plain time of those cycles that must be lost, or gained, to be believed."""
_REST_STEPS = 16
_MOST_REST_STEPS = 1024
_LOOK_EVERY = 8
"""Steps between two looks at a drafter that is off and has rested, at least."""
_LOOK_SHARE = 0.005
"""Share of the plain time that looks may take."""
_MOST_LOOK_STEPS = 1024


@dataclass(slots=True)
class Tally:
    """What a drafter did for a line of texts in one step."""

    drafted: int = 0
    """Of the first words of what it proposed, those that the text came to."""
    accepted: int = 0
    """Of those, the ones that were right, whether they were verified or not."""
    num_rows: int = 0
    """Rows of it that were verified."""
    num_saved: int = 0
    """Words of it that were verified and said."""
    num_shared: int = 0
    """Words that it had, too, and that were verified and said as another's: it is no worse for not being alone."""
    num_scouts: int = 0
    """Rows that it learned from."""
    cost_s: float = 0.0
    saved_s: float = 0.0
    shared_s: float = 0.0
    plain_s: float = 0.0
    """In measured time: what it took, what it saved, by itself or as others did, and the plain time that its texts
    stand for."""

    def add(self, other: Tally) -> None:
        """Count another text's."""
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.num_rows += other.num_rows
        self.num_saved += other.num_saved
        self.num_shared += other.num_shared
        self.num_scouts += other.num_scouts


@dataclass(slots=True)
class _Recent:
    """Decayed sums over cycles."""

    cycles: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    gained_s: float = 0.0
    squares: float = 0.0
    """Of what each cycle gained, in seconds."""
    plain_s: float = 0.0

    def count(self, tally: Tally) -> None:
        self.cycles = self.cycles * _MEMORY + 1.0
        self.drafted = self.drafted * _MEMORY + tally.drafted
        self.accepted = self.accepted * _MEMORY + tally.accepted
        gained_s = tally.saved_s + tally.shared_s - tally.cost_s
        self.gained_s = self.gained_s * _MEMORY + gained_s
        self.squares = self.squares * _MEMORY + gained_s**2
        self.plain_s = self.plain_s * _MEMORY + tally.plain_s

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted > 0.0 else None

    @property
    def gain(self) -> float:
        """Share of the plain time that was gained."""
        return self.gained_s / self.plain_s if self.plain_s > 0.0 else 0.0

    @property
    def likely_gain(self) -> float:
        """The same and one standard error more: whether a few cycles gained or lost is half chance."""
        if self.plain_s <= 0.0:
            return 0.0
        spread = max(0.0, self.squares - self.gained_s**2 / self.cycles)
        return self.gain + math.sqrt(spread) / self.plain_s


@dataclass(slots=True)
class Breaker:
    """One drafter for one line of texts."""

    line: Line
    drafter: str
    state: BreakerState = "on"
    reason: str = "nothing speaks against it"
    rest_steps: int = 0
    """Steps without a look while it is off."""
    told: BreakerState = "on"
    """Of on and off, the last one that everybody was told of."""
    _recent: _Recent = field(default_factory=_Recent)
    _probe: _Recent = field(default_factory=_Recent)
    _num_probed: int = 0
    _num_waited: int = 0
    _look_every: int = _LOOK_EVERY
    _is_looked_at: bool = False
    """Whether it was asked since it went off: what it drafted before that may come in later."""

    def asks(self) -> bool:
        """Whether to ask in this step. One that is off is only looked at."""
        if self.state != "off":
            return True
        self._num_waited += 1
        is_look = self._num_waited > self.rest_steps and self._num_waited % self._look_every == 0
        self._is_looked_at = self._is_looked_at or is_look
        return is_look

    def observe(self, tally: Tally) -> bool:
        """Count a step in which it was asked; True if its state has changed."""
        self._recent.count(tally)
        if self.state == "on":
            return self._judge()
        if self.state == "off":
            if not tally.num_rows or not self._is_looked_at:
                self._space_looks(tally)
                return False
            self._enter("probing", "a look at it showed a draft that is expected to pay")
            self._count_probe(tally)
            return True
        self._count_probe(tally)
        return self._judge_probe()

    def _space_looks(self, tally: Tally) -> None:
        """Look less often where a look takes long."""
        if tally.plain_s > 0.0:
            num_steps = min(_MOST_LOOK_STEPS, math.ceil(tally.cost_s / (_LOOK_SHARE * tally.plain_s)))
            self._look_every = max(_LOOK_EVERY, num_steps)

    def probe(self, reason: str) -> bool:
        """Try it anew, whatever was believed of it."""
        if self.state == "probing":
            return False
        self._enter("probing", reason)
        return True

    def trip(self, reason: str) -> bool:
        """Switch it off."""
        if self.state == "off":
            return False
        self._enter("off", reason)
        return True

    def _judge(self) -> bool:
        recent = self._recent
        if recent.cycles < _LEAST_CYCLES:
            return False
        acceptance = recent.acceptance
        if recent.likely_gain < -_LEAST_LOSS:
            self.rest_steps = _REST_STEPS
            return self.trip(f"it lost {-recent.gain:.1%} of the plain time over its last cycles")
        if acceptance is not None and acceptance < LEAST_ACCEPTANCE and recent.likely_gain < _LEAST_LOSS:
            return self.trip(
                f"{acceptance:.0%} of its words were right, under {LEAST_ACCEPTANCE:.0%}, and it gained no time"
            )
        return False

    def _count_probe(self, tally: Tally) -> None:
        self._probe.count(tally)
        self._num_probed += bool(tally.num_rows)

    def _judge_probe(self) -> bool:
        if self._num_probed < _PROBE_CYCLES and self._probe.cycles < _LEAST_CYCLES:
            return False
        gain, acceptance = self._probe.gain, self._probe.acceptance or 0.0
        is_right = acceptance >= RETURN_ACCEPTANCE and gain > -_LEAST_LOSS
        if self._num_probed >= _PROBE_CYCLES and (gain > _LEAST_LOSS or is_right):
            self.rest_steps = 0
            self._enter("on", f"a probe gained {gain:.1%} of the plain time, {acceptance:.0%} of its words were right")
            return True
        if gain < -_LEAST_LOSS:
            self.rest_steps = min(_MOST_REST_STEPS, max(_REST_STEPS, 2 * self.rest_steps))
        if self._num_probed < _PROBE_CYCLES:
            self._enter("off", "hardly any of its drafts was worth a row while it was probed")
        else:
            self._enter("off", f"a probe gained {gain:.1%} of the plain time, {acceptance:.0%} of its words were right")
        return True

    def _enter(self, state: BreakerState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._num_waited = self._num_probed = 0
        self._is_looked_at = False
        self._probe = _Recent()
        if state == "on":
            self._recent = _Recent()

    def view(self) -> BreakerView:
        """How it stands."""
        return BreakerView(
            workload_class=self.line.workload_class,
            temperature=TEMPERATURES[self.line.band],
            drafter=self.drafter,
            state=self.state,
            reason=self.reason,
            num_cycles=round(self._recent.cycles),
            acceptance=self._recent.acceptance,
        )

    def learned(self) -> LearnedBreaker:
        """What is worth keeping."""
        return LearnedBreaker(*self.line, self.drafter, self.state, self.reason, self.rest_steps)

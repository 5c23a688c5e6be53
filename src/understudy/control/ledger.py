"""What speculation has cost, beside what plain decoding would have taken: balances that say who may draft.

Two kinds of balance, for two promises.

`Ledger`, of one text: nobody pays for what others gain. A step that verifies drafts takes longer than one that does
not. Whoever says more words in it gains; whoever says one pays, also for what others drafted. Both are written down in
the predicted cost of such steps, so that a machine's noise does not count:

    plain_s     the words said so far, each at the time of a plain step of that batch
    spent_s     the steps that said them, with what was drafted in them

A text may be made to wait as long as its balance leaves room: ALLOWED of `plain_s`, and GRACE_STEPS of a plain step, so
that there is something to begin with. Beside n others it may come to be late by the nth part of that: whoever ends
sooner by drafts is followed by the next prompt, for which all who ride along wait again. What that usually comes to is
written down (following.py), what this prompt takes from this text is not.
What a text gained it may lose again, but no more of it in one step than its whole allowance. What it takes to ask
drafters in vain is written down here, too, and bounded elsewhere (planning.py).

`WindowLedger`, of a class and of the whole engine: speculation as a whole may never cost more than a small share, on
any path, whatever estimates said. Here measured time counts, all of it:

    plain_s     what the words of the window would have taken plainly
    debt_s      what drafting and verifying took beyond that, less what it saved; below zero where it paid

Drafts are verified only while the debt and the worst case of one more cycle stay within ALLOWED of `plain_s` and one
cycle. So, if no cycle is slower than its worst case, at every moment of every window

    time taken  <=  (1 + ALLOWED) * plain time + one cycle

A cycle that was slower (an overrun), or a drafter that took its time and had nothing worth buying, is written down in
full, and nobody is asked again until that is paid for: the largest such surplus of a window comes to the right side,
not their sum. What a draft model reads of a text before it can draft is written down in parts, while the text goes on:
the most that was under way at any moment of the window comes to the right side as well. All of it is as true as what
is believed of a plain step (reference.py).

Every WINDOW_S of plain time a debt is forgotten, and all but a little of the credit: what was gained an hour ago
must not pay for an hour of losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ALLOWED = 0.02
"""Share of the plain time by which a text, a class or the engine may come to be late."""
GRACE_STEPS = 0.5
"""Plain steps by which a text may be late from the start, for what others gain."""
WINDOW_S = 60.0
"""Plain time after which a window's credit and debt are forgotten."""
_WORST_FACTOR = 1.25
"""The worst case of a cycle is the slowest of its size so far, and this much more."""


@dataclass(slots=True)
class Ledger:
    """The balance of one text."""

    plain_s: float = 0.0
    spent_s: float = 0.0

    def add(self, *, plain_step_s: float, step_s: float, num_words: int) -> None:
        """Write down a step."""
        self.plain_s += num_words * plain_step_s
        self.spent_s += step_s

    def room_s(self, plain_step_s: float, num_texts: int) -> float:
        """How much longer it may be made to wait in a step of so many texts; never longer than anybody may be."""
        return self.patience_s(plain_step_s, 1.0, num_texts)

    def patience_s(self, plain_step_s: float, num_steps: float, num_texts: int) -> float:
        """By how much its words may be late in each of so many steps, before there is no room for one more."""
        allowed_s = ALLOWED * self.plain_s + GRACE_STEPS * plain_step_s
        left_s = allowed_s / max(1, num_texts - 1) + self.plain_s - self.spent_s
        return max(0.0, min(allowed_s, left_s / num_steps))


@dataclass(slots=True)
class WindowLedger:
    """The balance of a class, or of the engine, in the present window."""

    plain_s: float = 0.0
    debt_s: float = 0.0
    cycle_s: float = 0.0
    """The one cycle of this window that needs no allowance: a plain step, or the worst case of the first one tried."""
    is_tried: bool = False
    """Whether a cycle with drafts was written down: one that was only weighed, or is not counted, was not tried."""
    num_refused: int = 0

    @property
    def is_over(self) -> bool:
        """Whether more is owed than is allowed already."""
        return self.debt_s > self.allowance_s

    @property
    def allowance_s(self) -> float:
        """What the debt may come to."""
        return ALLOWED * self.plain_s + self.cycle_s

    def permits(self, excess_s: float) -> bool:
        """Whether a cycle that may take this much longer than a plain step is within the allowance."""
        if not self.is_tried:
            self.cycle_s = max(self.cycle_s, excess_s)
        if self.debt_s + excess_s <= self.allowance_s:
            return True
        self.num_refused += 1
        return False

    def add(self, *, plain_s: float, debt_s: float, step_s: float, is_drafted: bool) -> None:
        """Write down a step (`step_s`: what a plain one takes); a window that is over is followed by a new one."""
        self.is_tried = self.is_tried or is_drafted
        self.cycle_s = max(self.cycle_s, step_s) if not self.plain_s else self.cycle_s
        self.plain_s += plain_s
        self.debt_s += debt_s
        if self.plain_s >= WINDOW_S:
            self.plain_s, self.cycle_s, self.is_tried = 0.0, 0.0, False
            self.debt_s = min(0.0, max(self.debt_s, -ALLOWED * WINDOW_S))


@dataclass(slots=True)
class WorstCases:
    """The slowest cycles so far, by size: how many times the predicted time each took."""

    _slowest: dict[int, float] = field(default_factory=dict)
    _before: dict[int, float] = field(default_factory=dict)
    _plain_s: float = 0.0
    num_overruns: int = 0

    def of(self, num_rows: int, predicted_s: float) -> float:
        """The longest that a cycle with so many drafted rows is reckoned with."""
        size = num_rows.bit_length()
        return predicted_s * _WORST_FACTOR * max(1.0, self._slowest.get(size, 0.0), self._before.get(size, 0.0))

    def observe(self, num_rows: int, *, predicted_s: float, seconds: float) -> bool:
        """Note a cycle; True if it overran its worst case. What is older than two windows is forgotten."""
        overran = seconds > self.of(num_rows, predicted_s)
        size = num_rows.bit_length()
        self._slowest[size] = max(self._slowest.get(size, 0.0), seconds / predicted_s)
        self.num_overruns += overran
        self._plain_s += predicted_s
        if self._plain_s >= WINDOW_S:
            self._before, self._slowest, self._plain_s = self._slowest, {}, 0.0
        return overran

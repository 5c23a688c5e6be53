"""What speculation has cost a text so far, beside what plain decoding would have taken: a balance of who may wait.

A step that verifies drafts takes longer than one that does not. Whoever says more words in it gains; whoever says one
pays, also for what others drafted. Both are written down in the measured cost of such steps, so that a machine's noise
does not count:

    plain_s     the words said so far, each at the time of a plain step of that batch
    spent_s     the steps that said them, with what was drafted in them

A text may be made to wait as long as its balance leaves room: ALLOWED of `plain_s`, and GRACE_STEPS of a plain step, so
that there is something to begin with. One that only rides along therefore never comes to be later than that.
"""

from __future__ import annotations

from dataclasses import dataclass

ALLOWED = 0.02
"""Share of the plain time by which a text may come to be late for what others gain."""
GRACE_STEPS = 0.5
"""Plain steps by which it may be late from the start."""


@dataclass(slots=True)
class Ledger:
    """The balance of one text."""

    plain_s: float = 0.0
    spent_s: float = 0.0

    def add(self, *, plain_step_s: float, step_s: float, num_words: int) -> None:
        """Write down a step."""
        self.plain_s += num_words * plain_step_s
        self.spent_s += step_s

    def room_s(self, plain_step_s: float) -> float:
        """How much longer the text may be made to wait. What it gained earlier is its own, and not spent on others."""
        late_s = max(0.0, self.spent_s - self.plain_s)
        return max(0.0, ALLOWED * self.plain_s + GRACE_STEPS * plain_step_s - late_s)

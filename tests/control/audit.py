"""The ledger's promise, reckoned again from what happened in a world, by somebody who does not trust the ledger.

For the engine and for every class, at the end of every step of every window of WINDOW_S of plain time:

    spent - plain  <=  ALLOWED * plain + cycle + surplus + unpaid

    spent    all time that the words took: passes (of a pass with drafts, each class has its share of the plain pass by
             texts and of the rest by rows) and asking
    plain    what the same words take plainly: a plain step of that batch for each word per text
    cycle    the one cycle that a window is given: a plain step, or the worst case of the first cycle that was tried
    surplus  the most by which one cycle of the window took longer than what was reckoned with before it; where nothing
             was bought, what asking took
    unpaid   the most reading that was under way at any moment of the window

So over any number of windows the time taken is at most (1 + ALLOWED) times the plain time, and for each window one
cycle, one surplus and one reading. It is checked with the plain step as the controller believes it. With the true one
it holds as well, but for what the belief was wrong by: `dishonesty_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.control.worlds import Step
from understudy.control.controller import ENGINE
from understudy.control.ledger import ALLOWED, WINDOW_S


@dataclass
class Window:
    """One window of one ledger."""

    plain_s: float = 0.0
    debt_s: float = 0.0
    cycle_s: float = 0.0
    surplus_s: float = 0.0
    unpaid_s: float = 0.0

    @property
    def room_s(self) -> float:
        """What is left of the allowance; below zero the promise is broken."""
        return ALLOWED * self.plain_s + self.cycle_s + self.surplus_s + self.unpaid_s - self.debt_s


@dataclass
class Account:
    """A ledger's windows, and the truth over all of them."""

    name: str
    window: Window = field(default_factory=Window)
    least_room: float = 1.0
    """In plain steps."""
    allowed_s: float = 0.0
    """Cycles, surpluses and readings of all windows that are over."""
    plain_s: float = 0.0
    spent_s: float = 0.0
    """In truth."""
    dishonesty_s: float = 0.0
    """What the controller believed of plain steps beyond the truth."""

    def add(self, step: Step) -> None:
        """Write a step down."""
        name, window = self.name, self.window
        spoke = step.texts if name == ENGINE else step.spoke.get(name, 0)
        words = step.num_words if name == ENGINE else step.words.get(name, 0)
        rows = step.num_rows if name == ENGINE else step.rows.get(name, 0)
        asked_s = sum(step.asked_s.values()) if name == ENGINE else step.asked_s.get(name, 0.0)
        if step.is_asleep:  # windows are of the time that ledgers hold
            assert words == spoke, "a plain step"
            assert not rows
            assert not step.drafting_s
            self.plain_s += step.plain_s * words / step.texts
            self.spent_s += step.plain_s * words / step.texts
            return
        row_share = rows / step.num_rows if rows else 0.0
        excess_s = (step.forward_s - step.believed_s) * row_share
        worst_s = (step.worst_s - step.believed_s) * row_share
        saved_s = step.believed_s * (words - spoke) / step.texts
        if not window.plain_s:
            window.cycle_s = max(window.cycle_s, step.believed_s)
        window.cycle_s = max(window.cycle_s, step.cycles_s.get(name, 0.0))
        window.plain_s += step.believed_s * words / step.texts
        window.debt_s += excess_s + asked_s - saved_s
        surplus_s = max(0.0, excess_s - worst_s) if rows else asked_s
        window.surplus_s = max(window.surplus_s, surplus_s)
        window.unpaid_s = max(window.unpaid_s, step.unpaid_s)
        self.least_room = min(self.least_room, window.room_s / step.believed_s)
        self.plain_s += step.plain_s * words / step.texts
        drafted_s = (step.forward_s - step.plain_s) * row_share
        self.spent_s += step.plain_s * spoke / step.texts + drafted_s + asked_s
        if step.num_rows or words > spoke:
            wrong_s = (step.believed_s - step.plain_s) * (saved_s / step.believed_s + row_share)
            self.dishonesty_s += max(0.0, wrong_s)
        if window.plain_s >= WINDOW_S:
            self._roll()

    def _roll(self) -> None:
        window = self.window
        self.allowed_s += window.cycle_s + window.surplus_s + window.unpaid_s
        # credit is kept in part, as the ledger keeps it: it can only pay for what comes
        self.window = Window(debt_s=min(0.0, max(window.debt_s, -ALLOWED * WINDOW_S)))

    @property
    def late(self) -> float:
        """Share of the true plain time by which it came late, beyond what every window is given."""
        window = self.window
        given_s = self.allowed_s + window.cycle_s + window.surplus_s + window.unpaid_s
        return (self.spent_s - self.plain_s - given_s) / self.plain_s


class Audit:
    """An account of the engine, and of every class."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}

    def add(self, step: Step) -> None:
        """Write a step down in every account that it concerns."""
        for name in (ENGINE, *step.spoke):
            self.accounts.setdefault(name, Account(name)).add(step)

    @property
    def least_room(self) -> float:
        """The least that was left of any allowance, in plain steps."""
        return min(account.least_room for account in self.accounts.values())

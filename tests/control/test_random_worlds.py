"""In a thousand worlds drawn by lot, hostile ones among them, the ledger's promise holds (audit.py says it exactly).

Acceptance collapses, comes back or alternates; drafts become dearer, the machine slower, the drafter slow to ask; it
boasts, babbles or says the opposite of what it knows; passes hiccup; and the costs that the controller is given are
wrong by up to a factor of two.
"""

from __future__ import annotations

import pytest

from tests.control.audit import Audit
from tests.control.random_worlds import random_world
from tests.control.worlds import Run
from understudy.control.ledger import ALLOWED

ROUNDING = 1e-6
MOST_DISHONEST = 0.03
"""Share of the plain time by which believing wrongly in what a plain step takes may hide losses, on top."""


def check(seed: int, num_cycles: int) -> None:
    """Run one world, and reckon again after every step."""
    run, audit = Run(random_world(seed, num_cycles=num_cycles)), Audit()
    for step in run.steps():
        audit.add(step)
        assert audit.least_room > -ROUNDING, f"world {seed}, cycle {step.cycle}: more was spent than is allowed"
    for account in audit.accounts.values():
        # the same in truth, up to what was wrongly believed of a plain step
        dishonesty = account.dishonesty_s / account.plain_s
        assert account.late < ALLOWED + dishonesty + ROUNDING, f"world {seed}, {account.name}"
        assert account.late < ALLOWED + MOST_DISHONEST, f"world {seed}, {account.name}"


@pytest.mark.parametrize("seed", range(40))
def test_promise_holds(seed: int) -> None:
    check(seed, 700)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_promise_holds_in_a_thousand_worlds(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed, 1500)

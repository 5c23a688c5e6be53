from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.control.cost import CostModel, Load
from understudy.control.ledger import ALLOWED, GRACE_STEPS, Ledger
from understudy.control.policy import Offer, choose


def test_patience_lasts_for_its_steps() -> None:
    fresh, ahead, late = Ledger(), Ledger(), Ledger()
    assert fresh.patience_s(1.0, 16.0, 1) == GRACE_STEPS / 16.0
    assert fresh.patience_s(1.0, 1.0, 1) == fresh.room_s(1.0, 2)
    ahead.add(plain_step_s=1.0, step_s=92.0, num_words=100)
    assert ahead.patience_s(1.0, 16.0, 1) == (ALLOWED * 100.0 + GRACE_STEPS + 8.0) / 16.0
    assert ahead.patience_s(1.0, 2.0, 1) == ahead.room_s(1.0, 2), "in one step no more than there is room for"
    late.add(plain_step_s=1.0, step_s=103.0, num_words=100)
    assert late.patience_s(1.0, 16.0, 1) == 0.0
    for _ in range(16):  # what it promises is kept
        extra_s = ahead.patience_s(1.0, 16.0, 1)
        assert extra_s <= ahead.room_s(1.0, 2)
        ahead.add(plain_step_s=1.0, step_s=1.0 + extra_s, num_words=1)


def test_balance_by_hand() -> None:
    ledger = Ledger()
    assert ledger.room_s(1.0, 2) == GRACE_STEPS
    for _ in range(10):
        ledger.add(plain_step_s=1.0, step_s=1.0, num_words=1)
    assert abs(ledger.room_s(1.0, 2) - 10 * ALLOWED - GRACE_STEPS) < 1e-9
    ledger.add(plain_step_s=1.0, step_s=1.5, num_words=1)
    assert abs(ledger.room_s(1.0, 2) - (11 * ALLOWED + GRACE_STEPS - 0.5)) < 1e-9
    ledger.add(plain_step_s=1.0, step_s=1.2, num_words=4)
    assert abs(ledger.room_s(1.0, 2) - 15 * ALLOWED - GRACE_STEPS) < 1e-9, "in one step no more than anybody may"


def test_beside_many_there_is_less_room_for_each() -> None:
    fresh, late = Ledger(), Ledger()
    late.add(plain_step_s=1.0, step_s=1.2, num_words=1)
    assert fresh.room_s(1.0, 1) == fresh.room_s(1.0, 2) == GRACE_STEPS
    assert fresh.room_s(1.0, 8) == GRACE_STEPS / 7
    assert abs(late.room_s(1.0, 3) - (ALLOWED + GRACE_STEPS) / 2 + 0.2) < 1e-9
    assert late.room_s(1.0, 5) == 0.0, "for four others that is more than each may take"
    assert fresh.patience_s(1.0, 16.0, 8) == GRACE_STEPS / 7 / 16.0
    ahead = Ledger()
    ahead.add(plain_step_s=1.0, step_s=9.9, num_words=10)
    allowed_s = 10 * ALLOWED + GRACE_STEPS
    assert abs(ahead.room_s(1.0, 8) - allowed_s / 7 - 0.1) < 1e-9, "what it gained it may lose again"
    assert abs(ahead.patience_s(1.0, 16.0, 8) - ahead.room_s(1.0, 8) / 16) < 1e-9, "once, in all of its steps together"
    ahead.add(plain_step_s=1.0, step_s=1.0, num_words=4)
    assert ahead.room_s(1.0, 8) == 14 * ALLOWED + GRACE_STEPS, "but no more at once than anybody may"


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6))
def test_who_only_rides_along_is_late_by_no_more_than_the_share_and_the_grace(seed: int) -> None:
    """Whatever the others claim, and whatever becomes of it."""
    rng = random.Random(seed)
    cost = CostModel({1: 1.0, 8: 1.0 + rng.random(), 32: 2.0 + 8 * rng.random()})
    ledgers = [Ledger() for _ in range(rng.randint(1, 6))]
    num_bought = 0
    for _ in range(60):
        base = Load.of((1, 1) for _ in ledgers)
        plain_s = cost.step_s(base)
        claims: list[list[float]] = [[], *([rng.random()] * rng.randint(0, 4) for _ in ledgers[1:])]
        offers = [
            Offer(context=1, survival=claim, room_s=ledger.room_s(plain_s, len(ledgers)))
            for claim, ledger in zip(claims, ledgers, strict=True)
        ]
        nodes = choose(offers, base, cost, max_rows=26).nodes
        num_bought += sum(map(len, nodes))
        step_s = cost.step_s(Load(base.rows + sum(map(len, nodes)), base.keys, base.reads))
        for ledger, line in zip(ledgers, nodes, strict=True):
            ledger.add(plain_step_s=plain_s, step_s=step_s, num_words=1 + rng.randint(0, len(line)))
        rider = ledgers[0]
        allowed_s = (ALLOWED * rider.plain_s + GRACE_STEPS * plain_s) / max(1, len(ledgers) - 1)
        assert rider.spent_s <= rider.plain_s + allowed_s + 1e-9


def test_a_rider_that_was_made_to_wait_enough_is_made_to_wait_no_more() -> None:
    cost = CostModel({1: 1.0, 2: 1.0, 8: 1.6, 64: 10.0})
    base = Load.of((1, 1) for _ in range(2))
    fresh, tired = Ledger(), Ledger()
    tired.add(plain_step_s=1.0, step_s=1.6, num_words=1)
    gaining = Offer(context=1, survival=[0.9, 0.8, 0.7], room_s=fresh.room_s(1.0, 2))

    def bought_beside(rider: Ledger) -> list[int]:
        offers = [gaining, Offer(context=1, survival=[], room_s=rider.room_s(1.0, 2))]
        return choose(offers, base, cost, max_rows=9).nodes[0]

    assert bought_beside(fresh)
    assert not bought_beside(tired)

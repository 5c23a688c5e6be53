"""Who shares a step with those that a dear drafter is asked for: nobody waits for longer than his ledger has room."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from understudy.control.cost import CostModel, Load
from understudy.control.ledger import GRACE_STEPS, Ledger
from understudy.control.planning import Allowance, AnswerLengths
from understudy.control.stats import AcceptanceStats
from understudy.drafters.base import Budget
from understudy.engine.pricing import Pricing

COST = CostModel({1: 1.0, 2: 1.0, 32: 1.0})


def new_pricing() -> Pricing:
    return Pricing(COST, AcceptanceStats(frozenset()), Allowance(), AnswerLengths(), calibrated=lambda _, draft: draft)


def text(number: int, *, forced: bool = False, num_left: int = 100) -> Any:
    """As much of a sequence as is looked at."""
    request = SimpleNamespace(
        speculation=SimpleNamespace(forced=forced),
        workload_class="code",
        sampling=SimpleNamespace(temperature=0.0),
    )
    return SimpleNamespace(
        sequence_id=number,
        request=request,
        ledger=Ledger(),
        num_generated=1,
        num_left=num_left,
        tokens=[1] * 9,
        context=None,
    )


def asked(*sequences: Any, others: tuple[Any, ...] = ()) -> list[int]:
    drafter: Any = SimpleNamespace(name="model", cost=CostModel({1: 0.1, 32: 0.1}), num_unread=lambda context: 1)
    controller: Any = SimpleNamespace(permits_asking=lambda *args, **named: True)
    base = Load.of((1, 9) for _ in (*sequences, *others))
    budgets, before = [Budget(4, 8) for _ in sequences], [[] for _ in sequences]
    count = len(sequences) + len(others)
    return new_pricing().plan(drafter, sequences, budgets, before, base, count, controller, others).indexes


def test_patience_is_the_room_of_a_ledger_for_the_steps_to_come() -> None:
    def patience(sequence: Any, num_texts: int = 2) -> float:
        return new_pricing()._patience_s(sequence, plain_s=1.0, num_texts=num_texts)

    assert patience(text(0)) == GRACE_STEPS / 16.0
    assert patience(text(0), num_texts=9) == GRACE_STEPS / 8.0 / 16.0
    assert patience(text(0, num_left=4)) == GRACE_STEPS / 4.0
    assert patience(text(0, num_left=0)) == GRACE_STEPS
    assert patience(text(0, forced=True)) == math.inf


def test_who_could_not_be_asked_is_not_made_to_wait() -> None:
    late, ending, ahead = text(7), text(8, num_left=1), text(9)
    late.ledger.add(plain_step_s=1.0, step_s=9.0, num_words=1)
    ahead.ledger.add(plain_step_s=1.0, step_s=20.0, num_words=40)
    assert asked(text(0), text(1)) == [0, 1]
    assert asked(text(0), text(1), others=(late,)) == []
    assert asked(text(0), text(1), others=(ending, ahead)) == [0, 1], "one has words to spare, and one hardly any left"

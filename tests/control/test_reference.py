from __future__ import annotations

from understudy.control.reference import Reference


def drafted_until_due(reference: Reference, ratio: float, most: int = 100) -> int:
    for count in range(1, most + 1):
        reference.observe(ratio, is_plain=False)
        if reference.is_due:
            return count
    raise AssertionError("no plain step is due")


def test_every_so_often_one_step_is_plain() -> None:
    reference = Reference()
    assert drafted_until_due(reference, 1.0) == 64
    reference.observe(1.0, is_plain=True)
    assert not reference.is_due


def test_doubt_asks_soon_and_waits_longer_each_time_it_is_not_ended() -> None:
    reference = Reference()
    waits = []
    for _ in range(6):
        waits.append(drafted_until_due(reference, 1.8))
        reference.observe(1.0, is_plain=True)
    assert waits == [2, 4, 8, 16, 32, 64], "the rows are dearer, and plain steps are as they were"


def test_one_disturbance_is_no_doubt() -> None:
    reference = Reference()
    reference.observe(10.0, is_plain=False)
    reference.observe(1.0, is_plain=False)
    reference.observe(1.0, is_plain=False)
    assert not reference.is_due


def test_plain_step_that_surprises_is_taken_again_once() -> None:
    reference = Reference()
    drafted_until_due(reference, 1.0)
    reference.observe(3.0, is_plain=True)
    assert reference.is_due
    reference.observe(3.0, is_plain=True)
    assert not reference.is_due


def test_while_everything_is_plain_nothing_is_due() -> None:
    reference = Reference()
    for ratio in (1.0, 3.0, 0.2, 1.0, 0.0):
        reference.observe(ratio, is_plain=True)
        assert not reference.is_due

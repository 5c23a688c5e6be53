"""A draft model on a device where the first pass of each size is a slow one: that it was slow says nothing of the next.

Times are those of an 8B target on a GPU with eight texts at once: a plain step takes 4.2 ms, a row next to nothing, a
pass of the draft an eighth of a step, and capturing a pass of a new size seven steps.
"""

from __future__ import annotations

import pytest

from tests.control.worlds import MAX_ROWS, MOST_FIXED_DEPTH, Class, Run, World, always, fixed_s
from understudy.control.cost import Load

FIRST_CYCLES = 24


def device(acceptance: float, *, concurrency: int = 8, draft_cost: float = 0.13) -> World:
    return World(
        (Class("code", always(acceptance), num_words=192),),
        seed=3,
        num_texts=8 * concurrency,
        concurrency=concurrency,
        plain_s=4.2e-3,
        row_cost=0.005,
        draft_cost=draft_cost,
        reading_cost=0.0002,
        first_s=0.03,
    )


@pytest.mark.parametrize("concurrency", [1, 8])
def test_it_drafts_from_the_first_texts_on(concurrency: int) -> None:
    world = device(0.75, concurrency=concurrency)
    run = Run(world)
    spent_s, state = 0.0, None
    for step in run.steps():
        spent_s += 0.0 if state is None else step.forward_s + step.drafting_s
        if step.cycle == FIRST_CYCLES - 1:
            state = run.state()
    assert state is not None
    spent_s -= world.first_s * run.drafter.num_firsts  # whoever drafts to a fixed depth has captured his passes
    fixed = [sum(fixed_s(world, state, {"code": depth}, when=run.when).values()) for depth in range(MOST_FIXED_DEPTH)]
    assert min(fixed) < 0.7 * fixed[0], "it pays"
    assert spent_s < 1.03 * min(fixed)


def test_it_rests_where_it_does_not_pay() -> None:
    world = device(0.75, concurrency=8, draft_cost=1.5)
    run = Run(world)
    steps = list(run.steps())
    spent_s = sum(step.forward_s + step.drafting_s for step in steps) - world.first_s * run.drafter.num_firsts
    plain_s = sum(step.plain_s * step.num_words / step.texts for step in steps)
    assert spent_s < 1.02 * plain_s


def test_a_device_that_waits_until_words_were_looked_at_is_paid_for_by_who_is_asked() -> None:
    run = Run(device(0.75))
    steps = run.steps()
    for _ in range(FIRST_CYCLES):
        next(steps)
    base = Load.of((1, 0) for _ in run.running)
    run.clock.now += 0.5
    run.drafting.propose(
        run.running,
        base,
        max_rows=MAX_ROWS,
        num_emitting=len(run.running),
        has_to_ask=True,
        idle_since_s=run.clock() - 0.5,
    )
    time = run.drafting.take_time()
    (asked_s,) = (sum(seconds.values()) for seconds in time.asked_s.values())
    assert asked_s == pytest.approx(0.5 + time.passes_s["priced"], rel=0.01)
    assert time.spent_s == pytest.approx(asked_s)

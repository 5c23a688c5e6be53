"""Where nothing changes, or slowly, the controller is hardly slower than whoever knew the best depth beforehand.

After the first 500 cycles: the time that the rest of a world takes, against the same words with one depth from 0 to 16
for all steps of a class, the best of them chosen in hindsight. Alone, each class has its own; texts that share their
steps are compared with the best depth that all of them have in common.
"""

from __future__ import annotations

import itertools
import math

import pytest

from tests.control.random_worlds import boasts, honest
from tests.control.worlds import MOST_FIXED_DEPTH, Class, Factor, Run, World, always, fixed_s, slowly

FIRST_CYCLES = 500
MOST = 1.03


def regret(world: World) -> float:
    """The controller's time, as a multiple of the best fixed choice."""
    run = Run(world)
    spent_s, state = 0.0, None
    for step in run.steps():
        if step.cycle == FIRST_CYCLES:  # who stands where when the counting begins: before this step
            assert state is not None
        spent_s += step.forward_s + step.drafting_s if step.cycle >= FIRST_CYCLES else 0.0
        if step.cycle == FIRST_CYCLES - 1:
            state = run.state()
    assert state is not None, "too short a world"
    assert run.cycle > 3 * FIRST_CYCLES, "too short a world"
    names = [known.name for known in world.classes]
    by_depth = [
        fixed_s(world, state, dict.fromkeys(names, depth), when=run.when) for depth in range(MOST_FIXED_DEPTH + 1)
    ]
    if world.concurrency == 1:
        return spent_s / sum(min(seconds[name] for seconds in by_depth) for name in names)
    return spent_s / min(sum(seconds.values()) for seconds in by_depth)


def sized(acceptance: float, num_cycles: int = 2500) -> int:
    """About as many texts of 200 words as take so many cycles; many words are said per cycle where most are right."""
    words = min(10.0, 1.0 / (1.0 - acceptance)) if acceptance > 0.3 else 1.0
    return math.ceil(num_cycles * words / 200)


ACCEPTANCES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
ROW_COSTS = (0.002, 0.02, 0.1, 0.25, 0.5)
ASKING = (0.0, 0.02)
GRID = list(itertools.product(ACCEPTANCES, ROW_COSTS, ASKING))


def alone(acceptance: Factor, row_cost: float, asking: float, *, size: float, seed: int = 1) -> World:
    """One class, one text at a time."""
    known = Class("code", acceptance, states=(honest, boasts)[seed % 2])
    return World((known,), seed=seed, num_texts=sized(size), row_cost=row_cost, asking_s=always(asking * World.plain_s))


@pytest.mark.parametrize(("acceptance", "row_cost", "asking"), GRID[::7])
def test_alone(acceptance: float, row_cost: float, asking: float) -> None:
    assert regret(alone(always(acceptance), row_cost, asking, size=acceptance)) < MOST


@pytest.mark.full
@pytest.mark.parametrize(("acceptance", "row_cost", "asking"), GRID)
@pytest.mark.parametrize("seed", [2, 3])
def test_alone_in_every_world_of_the_grid(acceptance: float, row_cost: float, asking: float, seed: int) -> None:
    assert regret(alone(always(acceptance), row_cost, asking, size=acceptance, seed=seed)) < MOST


@pytest.mark.parametrize(("before", "after", "row_cost"), [(0.8, 0.4, 0.02), (0.3, 0.9, 0.1), (0.6, 0.5, 0.25)])
def test_acceptance_that_drifts(before: float, after: float, row_cost: float) -> None:
    world = alone(slowly(before, after, over=3000), row_cost, 0.002, size=0.65)
    assert regret(world) < MOST


@pytest.mark.parametrize(("acceptance", "row_cost"), [(0.8, 0.02), (0.6, 0.1), (0.4, 0.02)])
@pytest.mark.parametrize("drift", [slowly(1.0, 1.6, over=3000), lambda cycle: 1.2 + 0.2 * math.sin(cycle / 300)])
def test_machine_that_drifts(acceptance: float, row_cost: float, drift: Factor) -> None:
    known = Class("code", always(acceptance))
    world = World((known,), seed=4, num_texts=sized(acceptance), row_cost=row_cost, drift=drift)
    assert regret(world) < MOST


@pytest.mark.parametrize("row_cost", [0.02, 0.1])
def test_each_class_has_a_depth_of_its_own(row_cost: float) -> None:
    classes = tuple(Class(name, always(rate)) for name, rate in (("code", 0.9), ("chat", 0.5), ("math", 0.05)))
    assert regret(World(classes, seed=5, num_texts=45, row_cost=row_cost)) < MOST


@pytest.mark.parametrize(("concurrency", "row_cost"), [(2, 0.02), (4, 0.02), (8, 0.02), (16, 0.02), (8, 0.1)])
@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_texts_of_one_class_that_share_their_steps(concurrency: int, row_cost: float, acceptance: float) -> None:
    known = Class("code", always(acceptance))
    num_texts = max(concurrency, math.ceil(sized(acceptance, 1800) * concurrency))
    world = World((known,), seed=6, num_texts=num_texts, concurrency=concurrency, row_cost=row_cost)
    assert regret(world) < MOST


@pytest.mark.parametrize("padding", [4, 8])
def test_cost_that_has_steps(padding: int) -> None:
    world = World((Class("code", always(0.7)),), seed=7, num_texts=sized(0.7), row_cost=0.05, padding=padding)
    assert regret(world) < MOST

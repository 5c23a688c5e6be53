"""The first promise: whatever is drafted, whoever is served beside, however little room there is, the same words.

A round is 100 random cases about 60 questions. Every run draws a fresh seed; a failure names it, and
UNDERSTUDY_TEST_SEED repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.engine import checks
from tests.engine.cases import Tally
from tests.engine.checks import SEED, same_words
from tests.engine.engines import ARCHITECTURES, tiny_target
from tests.tiny_models import TinyArchitecture
from understudy.assembly import Target
from understudy.core.weights import WEIGHT_TYPES


def play_rounds(architecture: TinyArchitecture, numbers: Iterable[int]) -> None:
    """Play some rounds and make sure that they were not empty.

    Every other one has a context that ends early, and every other pair of them has weights of 8 bits.
    """
    total = Tally()
    for number in numbers:
        max_context = 96 if number % 2 else None
        target = tiny_target(architecture, WEIGHT_TYPES[number // 2 % 2])
        total.add(same_words(target, f"{SEED}-{architecture}-{number}", max_context=max_context))
    assert not total.empty(), f"UNDERSTUDY_TEST_SEED={SEED}: this never happened: {total.empty()}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_words_in_a_thousand_cases(architecture: TinyArchitecture) -> None:
    play_rounds(architecture, range(5))


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 150, 5))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_words_in_ten_thousand_cases(architecture: TinyArchitecture, first: int) -> None:
    play_rounds(architecture, range(first, first + 5))


def test_same_words_on_a_machine_that_fails_the_self_test(target: Target) -> None:
    """Rows computed one by one are what all rows are compared with: the same words again, slowly."""
    slow = replace(target, is_row_invariant=False)
    tally = same_words(slow, f"{SEED}-row-by-row", num_cases=8, num_questions=10)
    assert tally.accepted > 0


def test_tenants_never_share_a_prefix(target: Target) -> None:
    checks.tenants_apart(target)


def test_choices_are_draws_of_their_own(target: Target) -> None:
    checks.choices_apart(target)


def test_seeds_and_positions_are_draws_of_their_own(target: Target) -> None:
    checks.draws_apart(target)

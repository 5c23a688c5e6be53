"""State is lengths: after any step, accepted and rejected drafts included, what is committed is a fresh prefill.

Every running sequence and every cached prefix is read through its block table after every step, all layers, and
compared with a prefill of the same text, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.engine.cases import Tally
from tests.engine.checks import SEED, live_cache
from tests.engine.engines import ARCHITECTURES, tiny_target
from tests.tiny_models import TinyArchitecture

STEPS_PER_ROUND = 1_000
NEEDED = ("accepted", "rejected", "off_line", "preemptions", "prefix_hits", "aborted")
"""What moves rows about, and must have happened."""


def play_rounds(architecture: TinyArchitecture, numbers: Iterable[int]) -> None:
    """Play some rounds, each with questions of its own, and make sure that they were not empty."""
    total = Tally()
    for number in numbers:
        seed = f"{SEED}-{architecture}-{number}"
        total.add(live_cache(tiny_target(architecture), seed, num_steps=STEPS_PER_ROUND))
    missing = set(NEEDED) & set(total.empty())
    assert not missing, f"UNDERSTUDY_TEST_SEED={SEED}: this never happened: {missing}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_live_cache_is_a_fresh_prefill_for_ten_thousand_steps(architecture: TinyArchitecture) -> None:
    play_rounds(architecture, range(5))


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 150, 10))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_live_cache_is_a_fresh_prefill_for_a_hundred_thousand_steps(architecture: TinyArchitecture, first: int) -> None:
    play_rounds(architecture, range(first, first + 10))

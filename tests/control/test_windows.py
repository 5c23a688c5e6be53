"""Windows: random lengths, a beginning that is left out, and the time that a sequence waits for a token."""

from __future__ import annotations

import math

import pytest

from tests.control.test_experiment import experiment
from understudy.control.windows import Window
from understudy.core.events import Cycle


def cycle(*, num_sequences: int = 1, num_emitted: int = 1, total_s: float = 0.01, num_prompt_rows: int = 0) -> Cycle:
    return Cycle(num_sequences, num_prompt_rows, 0, 0, num_emitted, 0, 100, 0.0, total_s, 0.0, total_s, "", 1)


def test_lengths_are_spread_over_two_to_six_seconds() -> None:
    lengths = [Window.open(experiment(unit="window"), number, 0.0).length_s for number in range(2000)]
    assert 2.0 <= min(lengths) < 2.05
    assert 5.95 < max(lengths) < 6.0
    assert sum(lengths) / len(lengths) == pytest.approx(4.0, abs=0.1)
    window = Window.open(experiment(unit="window"), 3, 100.0)
    assert not window.is_over(100.0 + window.length_s - 0.01)
    assert window.is_over(100.0 + window.length_s)


def test_outcome_is_what_a_sequence_waits_for_a_token() -> None:
    """Four sequences at 20 ms a step and six tokens in it: each waits 13.3 ms for a token."""
    window = Window.open(experiment(unit="window"), 1, 10.0)
    window.add(cycle(total_s=9.0), 10.49)  # the beginning is left out
    window.add(cycle(total_s=9.0, num_prompt_rows=3), 11.0)
    assert window.log_time_per_token is None
    for _ in range(5):
        window.add(cycle(num_sequences=4, num_emitted=6, total_s=0.02), 11.0)
    assert window.log_time_per_token == pytest.approx(math.log(4 * 0.02 / 6))


def test_window_with_few_tokens_says_nothing() -> None:
    window = Window.open(experiment(unit="window"), 1, 0.0)
    window.add(cycle(num_emitted=15), 1.0)
    assert window.log_time_per_token is None
    window.add(cycle(num_emitted=1), 1.0)
    assert window.log_time_per_token is not None

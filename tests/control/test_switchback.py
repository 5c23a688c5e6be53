from __future__ import annotations

import random

import pytest

from understudy.control.switchback import WINDOW_STEPS, Switchback


def simulate(truth: float, *, seed: int, num_steps: int, share: float, num_texts: int) -> tuple[Switchback, bool]:
    """Steps that are `truth` times as fast with drafts, on a noisy machine that drifts; was the interval ever wrong?"""
    rng = random.Random(seed)
    group = Switchback(share, rng=random.Random(seed))
    was_wrong, machine = False, 1.0
    for step in range(num_steps):
        texts = list(range(num_texts)) if num_texts > 1 else [step // 40]
        is_plain = group.is_plain(texts)
        machine *= rng.uniform(0.99, 1.01)
        plain_s = rng.uniform(0.8, 1.2)
        spent_s = plain_s * machine**0.1 * rng.uniform(0.7, 1.3) / (1.0 if is_plain else truth)
        group.observe(plain_s=plain_s, spent_s=spent_s)
        speedup = group.speedup()
        if speedup is not None and not speedup.low <= truth <= speedup.high:
            was_wrong = True
    return group, was_wrong


@pytest.mark.parametrize(("truth", "num_texts"), [(1.0, 4), (1.5, 4), (1.0, 1), (0.8, 1)])
def test_interval_holds_the_truth_however_often_one_looks(truth: float, num_texts: int) -> None:
    num_wrong = sum(simulate(truth, seed=seed, num_steps=3000, share=0.2, num_texts=num_texts)[1] for seed in range(60))
    assert num_wrong <= 6, "five in a hundred may be wrong, at any time"


def test_gain_is_found() -> None:
    speedup = simulate(1.5, seed=1, num_steps=20_000, share=0.1, num_texts=4)[0].speedup()
    assert speedup is not None
    assert 1.2 < speedup.low < 1.5 < speedup.high < 1.8
    assert speedup.num_windows > 20


def test_share_of_windows_is_plain_and_each_as_a_whole() -> None:
    group = Switchback(0.25, rng=random.Random(2))
    plain = []
    for _ in range(400 * WINDOW_STEPS):
        plain.append(group.is_plain([1, 2]))
        group.observe(plain_s=1.0, spent_s=1.0)
    windows = [set(plain[start : start + WINDOW_STEPS]) for start in range(0, len(plain), WINDOW_STEPS)]
    assert all(len(window) == 1 for window in windows)
    assert 0.18 < sum(plain) / len(plain) < 0.32


def test_text_that_is_alone_is_plain_from_its_first_word_to_its_last() -> None:
    group = Switchback(0.5, rng=random.Random(3))
    chosen = []
    for text in range(200):
        answers = set()
        for _ in range(100):
            answers.add(group.is_plain([text]))
            group.observe(plain_s=1.0, spent_s=1.0)
        assert len(answers) == 1
        chosen.append(answers.pop())
    assert 60 < sum(chosen) < 140


def test_no_share_no_plain_window() -> None:
    group = Switchback(0.0)
    assert not any(group.is_plain([1, 2]) for _ in range(1000))
    assert group.speedup() is None

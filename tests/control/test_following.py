from __future__ import annotations

import pytest

from understudy.control.following import Following


def passes(following: Following, count: int, *, prompts_s: float = 0.0, has_ended: bool = False) -> None:
    for _ in range(count):
        following.observe(prompts_s=prompts_s, num_words=4, has_ended=has_ended)


def test_a_word_brings_forward_its_share_of_the_prompt_that_takes_a_place() -> None:
    following = Following()
    assert following.word_s == 0.0
    for _ in range(10):
        passes(following, 8)
        passes(following, 1, has_ended=True)
        passes(following, 1, prompts_s=0.2)
    assert following.word_s == pytest.approx(0.2 / 40)


def test_a_long_prompt_follows_with_all_of_its_pieces() -> None:
    following = Following()
    passes(following, 1, has_ended=True)
    passes(following, 2)
    passes(following, 7, prompts_s=0.1)
    assert following.word_s == pytest.approx(0.7 / 40)


def test_prompts_that_come_by_themselves_bring_nothing_forward() -> None:
    following = Following()
    for _ in range(10):
        passes(following, 1, prompts_s=0.2)
        passes(following, 9)
        passes(following, 1, has_ended=True)
        passes(following, 9)
    assert following.word_s == 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    following = Following()
    for _ in range(500):
        passes(following, 1, has_ended=True)
        passes(following, 1, prompts_s=1.0)
    before = following.word_s
    passes(following, 10_000)
    assert following.word_s < before / 50

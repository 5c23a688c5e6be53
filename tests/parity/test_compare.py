import math
from dataclasses import replace

import pytest

from understudy.core.request import TokenLogprob
from understudy.parity.cases import Case
from understudy.parity.compare import differences, first_difference
from understudy.parity.run import Answer

CASE = Case(3, "code", "def add", (1, 2, 3), {}, 8)
ANSWER = Answer(
    token_ids=(5, 6, 7),
    text="abc",
    finish_reason="stop",
    stop_reason=None,
    num_prompt_tokens=3,
    num_completion_tokens=3,
    logprobs=tuple(TokenLogprob(token, -0.5, ((token, -0.5), (9, -1.0))) for token in (5, 6, 7)),
    error=None,
)


def test_an_answer_is_like_itself() -> None:
    assert differences(ANSWER, replace(ANSWER), CASE, "any") == []


@pytest.mark.parametrize(
    ("changes", "position"),
    [
        ({"token_ids": (5, 8, 7)}, 1),
        ({"token_ids": (5, 6)}, 2),
        ({"text": "abd"}, None),
        ({"finish_reason": "length"}, None),
        ({"stop_reason": "c"}, None),
        ({"num_prompt_tokens": 4}, None),
        ({"num_completion_tokens": 2}, None),
        ({"error": "broken"}, None),
    ],
)
def test_every_field_counts(changes: dict[str, object], position: int | None) -> None:
    (found,) = differences(ANSWER, replace(ANSWER, **changes), CASE, "a setting")
    assert (found.setting, found.prompt, found.prompt_class) == ("a setting", 3, "code")
    assert [found.field] == list(changes)
    assert found.position == position
    assert found.expected != found.found


def test_the_last_bit_of_a_log_probability_counts() -> None:
    nearly = TokenLogprob(7, math.nextafter(-0.5, 0.0), ANSWER.logprobs[2].top)
    (found,) = differences(ANSWER, replace(ANSWER, logprobs=(*ANSWER.logprobs[:2], nearly)), CASE, "any")
    assert (found.field, found.position) == ("logprobs", 2)
    assert found.expected != found.found


def test_an_alternative_s_log_probability_counts() -> None:
    other = TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.0000001)))
    (found,) = differences(ANSWER, replace(ANSWER, logprobs=(other, *ANSWER.logprobs[1:])), CASE, "any")
    assert (found.field, found.position) == ("logprobs", 0)


def test_long_values_are_shown_around_the_place_where_they_part() -> None:
    left = replace(ANSWER, text="x" * 5000 + "left" + "y" * 5000, token_ids=tuple(range(5000)))
    right = replace(left, text="x" * 5000 + "right" + "y" * 5000, token_ids=(*range(4000), 7, *range(4001, 5000)))
    tokens, text = differences(left, right, CASE, "any")
    assert tokens.position == text.position == 4000
    assert "4000" in tokens.expected
    assert "left" in text.expected
    assert "right" in text.found
    assert max(len(value) for found in (tokens, text) for value in (found.expected, found.found)) <= 160


def test_the_first_difference() -> None:
    assert first_difference((), ()) is None
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1,)) == 1
    assert first_difference((1, 2), (3, 2)) == 0

"""Words on their short way into a stream: the same bytes as on the long one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from understudy.core.request import Output, Request, SamplingParams
from understudy.server.exchange import Caller
from understudy.server.openai.answers import PADDED_BYTES, Frame, Shape
from understudy.server.openai.chat_answer import ChatAnswer
from understudy.server.openai.completion_answer import CompletionAnswer
from understudy.server.openai.order import Order

ORDER = Order(
    answer_id="an-id",
    request_id="r",
    created=1,
    endpoint="chat",
    model="a model",
    fingerprint="fp_1",
    seed=7,
    caller=Caller(),
    requests=(Request(request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(n=2)),),
    is_stream=True,
)
SHAPES = (ChatAnswer, CompletionAnswer)
WORDS = ("word", ' "quoted"\n\\', "é\x00\x7f 語 🙂")


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("shape_of", SHAPES)
@pytest.mark.parametrize("place", [0, 1])
def test_words_are_the_same_bytes_either_way(
    place: int, shape_of: type[ChatAnswer | CompletionAnswer], has_usage: bool, text: str
) -> None:
    order = replace(ORDER, has_usage=has_usage)
    shape: Shape = shape_of(order, cast(Any, None))
    frame = Frame(order, shape)
    (chunk,) = shape.chunks(place, Output("r", place, (5,), text))
    assert shape.is_plain
    assert frame.words(place, text) == frame.event(chunk)


@pytest.mark.parametrize("shape_of", SHAPES)
def test_words_on_the_short_way_are_padded(shape_of: type[ChatAnswer | CompletionAnswer]) -> None:
    order = replace(ORDER, is_padded=True)
    frame = Frame(order, shape_of(order, cast(Any, None)))
    sizes = {len(frame.words(1, text)) for text in ("a", "ab", "a much longer piece of text")}
    assert sizes == {2 * PADDED_BYTES}


@pytest.mark.parametrize("shape_of", SHAPES)
@pytest.mark.parametrize("change", [{"num_logprobs": 1}, {"has_token_ids": True}])
def test_what_carries_more_than_text_has_no_short_way(
    shape_of: type[ChatAnswer | CompletionAnswer], change: dict[str, Any]
) -> None:
    assert not shape_of(replace(ORDER, **change), cast(Any, None)).is_plain

"""Usage in every event of a stream, as vLLM's benchmarks ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import SayingBackend, events_of, serve_fake
from understudy.server.openai.schemas import ChatCompletionChunk, TextCompletionChunk

RUNNING = {"include_usage": True, "continuous_usage_stats": True}
PIECES = ["One", " two", " three"]


def usages(events: list[dict[str, Any]]) -> list[int]:
    """Tokens said by the time of each event; the prompt's are the same in all."""
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    for usage in (event["usage"] for event in events):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return [event["usage"]["completion_tokens"] for event in events]


def test_every_event_tells_what_was_used_so_far(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, backend=SayingBackend, pieces=PIECES)
    chat = events_of(served.chat(stream=True, stream_options=RUNNING).text)
    assert usages(chat) == [0, 1, 2, 3, 3, 3], "the opening, three words, the reason for the end, the totals"
    assert chat[-1]["choices"] == []
    assert "prompt_tokens_details" in chat[-1]["usage"]
    assert all(ChatCompletionChunk.model_validate(event) for event in chat)
    completion = events_of(served.complete(stream=True, stream_options=RUNNING).text)
    assert usages(completion) == [1, 2, 3, 3]
    assert all(TextCompletionChunk.model_validate(event) for event in completion)


def test_several_choices_are_counted_together(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, backend=SayingBackend, pieces=PIECES)
    events = events_of(served.complete(stream=True, stream_options=RUNNING, n=2).text)
    assert usages(events) == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, RUNNING | {"include_usage": False}])
def test_without_usage_there_is_none_on_the_way(tmp_path: Path, options: dict[str, bool]) -> None:
    served = serve_fake(tmp_path, backend=SayingBackend, pieces=PIECES)
    assert all("usage" not in event for event in events_of(served.chat(stream=True, stream_options=options).text))

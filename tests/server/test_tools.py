"""Tools: shown to the template, bound by a grammar, read from the words in whatever pieces they come."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.server.serving import TOOLS_TEMPLATE, USER, SayingBackend, Served, events_of, serve_fake
from understudy.server.openai.schemas import ChatCompletion, ChatCompletionChunk
from understudy.server.openai.tools import ToolCall, ToolReader

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"number": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def saying(folder: Path, *pieces: str, finish_reason: str = "stop") -> Served:
    values = {"pieces": list(pieces), "finish_reason": finish_reason}
    return serve_fake(folder, template=TOOLS_TEMPLATE, backend=SayingBackend, **values)


def test_call_is_read_from_a_free_answer(tmp_path: Path) -> None:
    served = saying(tmp_path, "Let me see. <tool", CALL.removeprefix("<tool") + "\n" + OTHER)
    body = served.chat(tools=[ADD, NOW]).json()
    ChatCompletion.model_validate(body, strict=True)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["function"]["name"]) == ("function", "add")
    assert json.loads(first["function"]["arguments"]) == {"a": 1, "b": 2}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert "Adds <two> numbers." in served.service.tokenizer.decode(served.asked.prompt_ids)
    assert served.asked.sampling.grammar is None


def test_calls_in_a_stream(tmp_path: Path) -> None:
    served = saying(tmp_path, "So: <", "tool_call>\n", *CALL.removeprefix("<tool_call>\n"), "\n", OTHER)
    chunks = events_of(served.chat(tools=[ADD, NOW], stream=True).text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "So: "
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "add"), (1, "now")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_only_one_call_if_asked(tmp_path: Path) -> None:
    served = saying(tmp_path, CALL, "\n", OTHER, " and more")
    message = served.chat(tools=[ADD, NOW], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


def test_without_a_call_it_is_an_answer(tmp_path: Path) -> None:
    served = saying(tmp_path, "1 < 2 <tool_", "call> {broken")
    (choice,) = served.chat(tools=[ADD]).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "1 < 2 <tool_call> {broken")
    assert "tool_calls" not in choice["message"]
    deltas = [c["choices"][0]["delta"] for c in events_of(served.chat(tools=[ADD], stream=True).text)]
    assert "".join(delta.get("content", "") for delta in deltas) == "1 < 2 <tool_call> {broken"


def test_cut_off_calls_keep_their_reason(tmp_path: Path) -> None:
    served = saying(tmp_path, CALL, "\n<tool_call>\n{", finish_reason="length")
    assert served.chat(tools=[ADD]).json()["choices"][0]["finish_reason"] == "length"


def test_none_hides_the_tools(tmp_path: Path) -> None:
    served = saying(tmp_path, CALL)
    body = served.chat(tools=[ADD], tool_choice="none").json()
    assert body["choices"][0]["message"]["content"] == CALL
    assert "Adds" not in served.service.tokenizer.decode(served.asked.prompt_ids)


def accepts(lark: str, text: str) -> bool:
    """Whether a grammar lets a text be said, and end there."""
    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(lark))
    return bool(matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("extra", "allowed", "refused"),
    [
        (
            {"tool_choice": "required"},
            [CALL, OTHER, f"{CALL}\n{OTHER}"],
            ["Hello", CALL.replace("1", '"x"'), CALL + "x"],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL, OTHER], [f"{CALL}\n{OTHER}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, [CALL], [OTHER, f"{CALL}\n{CALL}"]),
    ],
)
def test_grammar_binds_to_calls(tmp_path: Path, extra: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    served = saying(tmp_path, CALL)
    assert served.chat(tools=[ADD, NOW], **extra).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = served.asked.sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert [accepts(grammar.text, text) for text in allowed] == [True] * len(allowed)
    assert [accepts(grammar.text, text) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "white space"}}]}, "tools"),
        (
            {"tools": [{**NOW, "function": {"name": "x", "parameters": {"type": "wish"}}}], "tool_choice": "required"},
            "tool_choice",
        ),
    ],
)
def test_refused(tmp_path: Path, extra: dict[str, Any], name: str) -> None:
    answer = saying(tmp_path, CALL).chat(**({"tools": [ADD]} | extra))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_results_go_back_to_the_model(tmp_path: Path) -> None:
    served = saying(tmp_path, "3")
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    talk = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call_1", "content": "3"})
    assert served.chat(messages=talk, tools=[ADD]).json()["choices"][0]["message"]["content"] == "3"
    prompt = served.service.tokenizer.decode(served.asked.prompt_ids, skip_special=False)
    assert '{"name": "add", "arguments": {"a": 1, "b": "é"}}' in prompt
    assert "<|im_start|>tool\n3" in prompt
    call["function"]["arguments"] = "[1"  # type: ignore[index]
    assert served.chat(messages=talk).json()["error"]["param"] == "messages"


@given(
    parts=st.lists(
        st.sampled_from([CALL, OTHER, "<tool_call>x</tool_call>", "text", " ", "\n", "<", "<tool_", "</tool_call>"])
    ),
    cuts=st.lists(st.integers(0, 400)),
)
def test_pieces_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert _read(pieces) == _read([text])


def _read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolReader()
    found = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    calls = [(part.name, part.arguments) for part in found if isinstance(part, ToolCall)]
    return "".join(part for part in found if isinstance(part, str)), calls

"""Tools: how a model is bound to call one, and how a call is read out of its words.

The syntax is that of Hermes and Qwen2.5, one JSON object between two marks:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.core.request import Grammar
from understudy.errors import InvalidRequest
from understudy.server.openai.fields import ChatBody
from understudy.server.openai.message_fields import ChosenTool, Tool
from understudy.text.chat import uses_tools
from understudy.text.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MOST_CALLS = 16
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools."""

    shown: tuple[dict[str, Any], ...]
    """As the template is given them."""
    grammar: Grammar | None
    """Binds the answer to be calls, if it must be."""
    only_one: bool
    """At most one call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, with its arguments as a text of JSON."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def fields(self) -> dict[str, object]:
        """As a message carries it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def tool_use(body: ChatBody, tokenizer: Tokenizer) -> ToolUse | None:
    """Read what a request says about tools; None where it wants none."""
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice not in ("auto", "none"):
            raise InvalidRequest("tool_choice asks for a tool, but there are none.", "Give tools.", parameter="tools")
        return None
    shown = shown_tools(tokenizer, body.tools)
    if choice == "none":
        return None
    only_one = body.parallel_tool_calls is False or isinstance(choice, ChosenTool)
    grammar = None if choice == "auto" else Grammar("lark", _lark(_bound(body.tools, choice), only_one=only_one))
    return ToolUse(shown, grammar, only_one)


def shown_tools(tokenizer: Tokenizer, tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools as a template is given them; refused where it has no use for them."""
    _check_support(tokenizer)
    return tuple(tool.model_dump(exclude_unset=True) for tool in tools)


def with_read_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give templates the arguments of earlier calls as objects, which is how they print them."""
    for place, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise InvalidRequest(
                    f"messages[{place}] has a tool call whose arguments are not a JSON object.", parameter="messages"
                )
            call["function"]["arguments"] = arguments
    return messages


class ToolReader:
    """Separates text and calls while the words come, in whatever pieces."""

    def __init__(self, *, only_one: bool = False) -> None:
        self.num_calls = 0
        self._only_one = only_one
        self._held = ""  # may still become a mark, or lies between two
        self._is_after_call = False  # nothing but space has followed the last call

    def add(self, text: str) -> list[str | ToolCall]:
        """Take more text; return what is certain."""
        self._held += text
        return list(self._read())

    def finish(self) -> list[str | ToolCall]:
        """Return what is left: a call that was never closed is only text."""
        rest, self._held = self._held, ""
        return list(self._text(rest))

    def _read(self) -> Iterator[str | ToolCall]:
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                yield from self._text(self._held[:start])
                self._held = self._held[start:]
                return
            end += len(CLOSE)
            before, whole, self._held = self._held[:start], self._held[start:end], self._held[end:]
            yield from self._text(before)
            call = read_call(whole[len(OPEN) : -len(CLOSE)])
            if call is None:
                yield from self._text(whole)
            elif not (self._only_one and self.num_calls):
                self.num_calls += 1
                self._is_after_call = True
                yield call
        cut = len(self._held) - _overlap(self._held)
        certain, self._held = self._held[:cut], self._held[cut:]
        yield from self._text(certain)

    def _text(self, text: str) -> Iterator[str]:
        """Pass text on. Right after a call space is layout; after the only call that is allowed, so is everything."""
        if self._is_after_call:
            text = text.lstrip()
        if text and not (self.num_calls and self._only_one):
            self._is_after_call = False
            yield text


def read_call(text: str) -> ToolCall | None:
    """Read what stands between the marks; None if it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(text), len(OPEN) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(OPEN[:length])), 0)


def _check_support(tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template is None or not uses_tools(tokenizer.chat_template):
        raise InvalidRequest(
            "tools are not supported: the model's chat template does not use them.",
            "Leave tools out.",
            parameter="tools",
        )
    if tokenizer.token_to_id(OPEN) in tokenizer.special_ids:
        raise InvalidRequest(f"tools are not supported: {OPEN} is no text in this model.", parameter="tools")


def _bound(tools: Sequence[Tool], choice: str | ChosenTool) -> list[Tool]:
    if not isinstance(choice, ChosenTool):
        return list(tools)
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r}, which is not among the tools.", parameter="tool_choice"
        )
    return named[:1]


def _lark(tools: Sequence[Tool], *, only_one: bool) -> str:
    """A grammar of calls. Each schema stands by itself, so that its references find what they refer to."""
    more = "" if only_one else f' ("\\n" call){{0,{_MOST_CALLS - 1}}}'
    lines = [f"start: call{more}", f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}"]
    for place, tool in enumerate(tools):
        begin = f'{OPEN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
        schema = {**_ANY_ARGUMENTS, **(tool.function.parameters or {})}
        lines.append(f"call_{place}: {json.dumps(begin)} arguments_{place} {json.dumps('}' + chr(10) + CLOSE)}")
        lines.append(f"arguments_{place}: %json {json.dumps(schema)}")
    return "\n".join(lines) + "\n"

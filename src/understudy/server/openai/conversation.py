"""From messages to token ids, by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import InvalidRequest
from understudy.server.openai.message_fields import ConversationFields
from understudy.server.openai.order import text_of
from understudy.server.openai.tools import with_read_arguments
from understudy.text.chat import render
from understudy.text.tokenizer import Tokenizer

_SAMPLE_CHARACTERS = 8192


def conversation_ids(
    tokenizer: Tokenizer, body: ConversationFields, *, tools: Sequence[dict[str, Any]] | None, add_special: bool = False
) -> tuple[int, ...]:
    """Render a conversation and turn it into token ids."""
    if tokenizer.chat_template is None:
        raise InvalidRequest("This model has no chat template.", "Use /v1/completions.", parameter="messages")
    text = render(
        tokenizer.chat_template,
        with_read_arguments([_plain(message.model_dump(exclude_none=True)) for message in body.messages]),
        add_generation_prompt=body.add_generation_prompt is not False,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tools=tools,
        settings=body.chat_template_kwargs,
    )
    return tuple(tokenizer.encode(text, add_special=add_special))


def last_question(body: ConversationFields) -> str:
    """The beginning of what was said last by somebody other than the assistant."""
    said = (text_of(message.content) for message in reversed(body.messages) if message.role != "assistant")
    return next(said, "")[:_SAMPLE_CHARACTERS]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates know them: a developer is a system, and who only called tools said nothing."""
    if message["role"] == "developer":
        message["role"] = "system"
    message.setdefault("content", "")
    return message

"""A request's body, from bytes to fields: whatever is sent, it is understood, or refused by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from understudy.errors import InvalidRequest
from understudy.server.errors import ModelNotFound, NotJson
from understudy.server.openai.fields import ChatBody, CompletionBody
from understudy.server.service import Service

LARGE_BYTES = 8 << 10
"""From here on a body's text is worked on in a thread, so that nobody else has to wait."""
MAX_DEPTH = 128
"""Objects and lists within each other; what reads them later calls itself for each."""

_MOST_NAMES = 16
_MOST_NAME_CHARACTERS = 64

REFUSED: Mapping[str, str] = {
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "audio": "Only text is spoken here.",
    "web_search_options": "Nothing is searched here.",
    "logits_processors": "Use logit_bias.",
    "chat_template": "The model's own template is used.",
    "suffix": "Text is only ever continued.",
    "prompt_embeds": "Send text or token ids.",
    "use_beam_search": "Words are drawn, not searched for.",
}
"""Fields that would change the answer and that cannot be honoured, with what to do instead."""

Body = TypeVar("Body")
Value = TypeVar("Value")


async def read(request: Request, validate: Callable[[object], Body]) -> Body:
    """Read the body of a request with a model's validator."""
    declared = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if declared != "application/json" and not (declared.startswith("application/") and declared.endswith("+json")):
        raise NotJson("The body must be JSON.", "Send it with Content-Type: application/json.")
    raw = await request.body()
    return await by_size(len(raw), lambda: _fields(raw, validate))


async def by_size(num_bytes: int, work: Callable[[], Value], *, is_slow: bool = False) -> Value:
    """Do some work on a text: at once if it is short and the work is not slow anyway, else in a thread."""
    return await asyncio.to_thread(work) if is_slow or num_bytes > LARGE_BYTES else work()


def check_model(service: Service, name: str | None) -> None:
    """Refuse a model that is not served. No name is the one model that is."""
    if name is not None and name != service.model_name:
        raise ModelNotFound(f"The model {name[:200]!r} does not exist here.", f"Ask for {service.model_name!r}.")


def check_fields(service: Service, body: ChatBody | CompletionBody) -> tuple[str, ...]:
    """Refuse what cannot be honoured; return the names of what has no effect."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, remedy in REFUSED.items():
        if extra.get(name):
            raise InvalidRequest(f"{name} is not supported.", remedy, parameter=name)
        extra.pop(name, None)
    unknown = sorted(extra) + _nested_extra(body)
    if unknown and service.config.strict:
        raise InvalidRequest(f"Nobody here knows the field {unknown[0][:64]!r}.", parameter=header_names(unknown[:1]))
    ignored = (*unknown, *(name for name in ("service_tier", "store") if getattr(body, name) is not None))
    if ignored:
        service.on_ignored_fields(ignored)
    return ignored


def header_names(names: tuple[str, ...] | list[str]) -> str:
    """Names from a request in a form that any header can hold."""
    shown = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MOST_NAME_CHARACTERS]) or "?" for name in names[:_MOST_NAMES]]
    return ",".join(shown) + (",..." if len(names) > _MOST_NAMES else "")


def _nested_extra(body: BaseModel) -> list[str]:
    nested = ((name, getattr(body, name)) for name in ("stream_options", "response_format", "prediction"))
    return sorted(f"{name}.{key}" for name, value in nested if value is not None for key in value.model_extra or ())


def _fields(raw: bytes, validate: Callable[[object], Body]) -> Body:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if _is_deeper(value, MAX_DEPTH):
        raise InvalidRequest(f"The body holds more than {MAX_DEPTH} objects and lists within each other.")
    try:
        return validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _is_deeper(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth == 0 or any(_is_deeper(entry, depth - 1) for entry in value.values())
    if isinstance(value, list):
        return depth == 0 or any(_is_deeper(entry, depth - 1) for entry in value if isinstance(entry, dict | list))
    return False


def _refusal(error: ValidationError) -> InvalidRequest:
    """Name the field at fault. What we say ourselves says more than what a union's other branches missed."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    found = [entry for entry in found if entry["type"] == "part"] or found[:3]
    told = "; ".join(f"{_place(entry['loc'])}: {entry['msg']}" for entry in found)
    name = next((part for part in found[0]["loc"] if isinstance(part, str)), None)
    return InvalidRequest(f"{told}.", parameter=name)


def _place(path: tuple[int | str, ...]) -> str:
    """Where a field is, without the branches of unions that were tried on the way."""
    names = [str(part) for part in path if isinstance(part, int) or re.fullmatch("[a-z_]+", part)]
    return ".".join(name for name in names if name not in ("str", "int", "float", "bool")) or "body"

"""What /openapi.json says beyond what FastAPI finds by itself: bodies that we read ourselves, and every error."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from understudy.server.openai.schemas import Error

_REFERENCE = "#/components/schemas/{model}"
_bodies: dict[str, type[BaseModel]] = {}
_chunks: dict[str, type[BaseModel]] = {}

_ERRORS = {
    400: "Something in the request cannot be honoured; `param` names it.",
    401: "No valid key.",
    403: "The key does not open this.",
    404: "There is no such model or path.",
    405: "Not with this method.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "This key has too many requests running or waiting; see Retry-After.",
    500: "The engine failed.",
    503: "Not now: too much is waiting, or the server is being stopped or started; see Retry-After.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": words} for status, words in _ERRORS.items()
}
"""What any route may answer with, in the form that FastAPI's `responses` takes."""


class Application(FastAPI):
    """An application whose routes read their bodies themselves."""

    def openapi(self) -> dict[str, Any]:
        """The whole description, made once."""
        if self.openapi_schema is None:
            schema = super().openapi()
            models: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
                *((body, "validation") for body in _bodies.values()),
                *((chunk, "serialization") for chunk in _chunks.values()),
            ]
            _, definitions = models_json_schema(models, ref_template=_REFERENCE)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions.get("$defs", {}))
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # what FastAPI would answer; here it is 400
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def request_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """What a route says of the body that it reads: one of these."""
    _bodies.update({kind.__name__: kind for kind in kinds})
    references = [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers_of(kind: type[BaseModel], *, chunk: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """What a route may answer: this, or a stream of chunks, or an error."""
    whole: dict[str, Any] = {"model": kind, "description": "The answer."}
    if chunk is not None:
        _chunks[chunk.__name__] = chunk
        whole["content"] = {"text/event-stream": {"itemSchema": _event(chunk)}}
    return {200: whole, **ERRORS}


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event: a chunk, an error after which nothing comes, or [DONE]."""
    names = (chunk.__name__, Error.__name__)
    references = [{"$ref": _REFERENCE.format(model=name)} for name in names]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": references}}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}

"""Every error as a client of OpenAI's interface expects it: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from understudy.errors import CapacityError, EngineLost, InvalidRequest, SlowReader, UnderstudyError
from understudy.server.admission import Overloaded
from understudy.server.identity import request_id_of

log = logging.getLogger("understudy.server")

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large", 415: "unsupported_media_type"}


class ContextExceeded(InvalidRequest):
    """A prompt, or a prompt with the answer that was asked for, that is longer than the model's context."""


class ModelNotFound(UnderstudyError):
    """A model that is not served here."""


class NotJson(UnderstudyError):
    """A body that says of itself that it is not JSON."""


_TOLD: tuple[tuple[type[UnderstudyError], int, str], ...] = (
    (ContextExceeded, 400, "context_length_exceeded"),
    (CapacityError, 400, "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_value"),
    (SlowReader, 400, "slow_reader"),
    (ModelNotFound, 404, "model_not_found"),
    (NotJson, 415, "unsupported_media_type"),
)
"""Errors of the caller: the first line that fits holds."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error on its way to a client."""

    status: int
    body: dict[str, object]
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """The whole answer."""
        return Response(msgspec.json.encode(self.body), self.status, self.headers, "application/json")


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error in OpenAI's shape, as a whole answer."""
    return Problem(status, error_body(message, kind=kind, param=param, code=code), headers or {}).response()


def problem_of(error: Exception, request_id: str) -> Problem:
    """What a client is told of an error. Of one that nobody foresaw it hears only the request's id."""
    if isinstance(error, Overloaded):
        return _overloaded(error)
    if isinstance(error, HTTPException):
        return _http_problem(error)
    for kind, status, code in _TOLD:
        if isinstance(error, kind):
            parameter = "model" if kind is ModelNotFound else getattr(error, "parameter", None)
            return Problem(status, error_body(str(error), param=parameter, code=code))
    if isinstance(error, EngineLost):
        return Problem(500, error_body(f"{error} ({request_id})", kind="server_error", code="engine_error"))
    log.error("request %s failed", request_id, exc_info=error)
    message = f"Something went wrong inside the server. The request's id is {request_id}."
    body = error_body(message, kind="server_error", code="engine_error")
    return Problem(500, body, {"x-should-retry": "false"})


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of an application be answered in OpenAI's shape."""
    for kind in (UnderstudyError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(RequestValidationError, _handle_validation)


async def _handle(request: Request, error: Exception) -> Response:
    problem = problem_of(error, request_id_of(request))
    if problem.status == 405:  # the router names the methods of the first route alone
        problem.headers["Allow"] = ", ".join(_allowed_methods(request))
    return problem.response()


def _allowed_methods(request: Request) -> list[str]:
    """The methods of all routes with the request's path. Routes may be nested, so each is asked."""

    def is_answered(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if is_answered(method)]


async def _handle_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    message = f"{'.'.join(place) or 'The body'}: {first['msg']}."
    return error_response(400, message, param=place[0] if place else None, code="invalid_value")


def _http_problem(error: HTTPException) -> Problem:
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = error_body(str(error.detail), kind=kind, code=_HTTP_CODES.get(error.status_code))
    return Problem(error.status_code, body, dict(error.headers or {}))


def _overloaded(error: Overloaded) -> Problem:
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if error.cause == "rate_limit":
        return Problem(429, error_body(str(error), kind="rate_limit_error", code=error.code), headers)
    return Problem(503, error_body(str(error), kind="server_error", code=error.code), headers)

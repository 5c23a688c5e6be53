"""Every error has its status, its code and its headers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException

from tests.server.serving import serve_fake
from understudy.errors import CapacityError, EngineLost, InvalidRequest, SlowReader
from understudy.server.admission import Cause, Overloaded
from understudy.server.config import ServerConfig
from understudy.server.errors import ContextExceeded, ModelNotFound, NotJson, error_response, problem_of


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (InvalidRequest("No.", parameter="seed"), 400, "seed", "invalid_value"),
        (ContextExceeded("Long.", parameter="prompt"), 400, "prompt", "context_length_exceeded"),
        (CapacityError("Large."), 400, None, "context_length_exceeded"),
        (SlowReader("Slow."), 400, None, "slow_reader"),
        (ModelNotFound("None."), 404, "model", "model_not_found"),
        (NotJson("Form."), 415, None, "unsupported_media_type"),
        (EngineLost("Dead."), 500, None, "engine_error"),
        (HTTPException(404), 404, None, "not_found"),
        (HTTPException(418, "Tea."), 418, None, None),
    ],
    ids=str,
)
def test_problems(error: Exception, status: int, param: str | None, code: str | None) -> None:
    problem = problem_of(error, "req-1")
    body = problem.body["error"]
    assert isinstance(body, dict)
    assert (problem.status, body["param"], body["code"]) == (status, param, code)
    assert body["type"] == ("server_error" if status >= 500 else "invalid_request_error")


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        ("rate_limit", 429, "rate_limit_exceeded"),
        ("queue_full", 503, "overloaded"),
        ("queue_timeout", 503, "queue_timeout"),
        ("draining", 503, "draining"),
        ("engine", 503, "engine_restarting"),
        ("deadline", 503, "deadline_exceeded"),
    ],
)
def test_overload_says_when_to_come_back(cause: Cause, status: int, code: str) -> None:
    response = problem_of(Overloaded("Full.", cause=cause, retry_after_s=2.3), "req-1").response()
    assert (response.status_code, response.headers["retry-after"]) == (status, "3")
    assert json.loads(bytes(response.body))["error"]["code"] == code


def test_error_response() -> None:
    response = error_response(413, "Large.", code="payload_too_large", headers={"connection": "close"})
    assert response.headers["connection"] == "close"
    expected = {"message": "Large.", "type": "invalid_request_error", "param": None, "code": "payload_too_large"}
    assert json.loads(bytes(response.body)) == {"error": expected}


def test_too_many_of_one_key(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, config=ServerConfig(max_per_key=1), step_s=0.02)

    async def ask_twice() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.post("/v1/completions", json={"prompt": "a"}) for _ in range(2)))

    taken, answer = sorted(asyncio.run(ask_twice()), key=lambda answer: answer.status_code)
    assert taken.status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert answer.headers["retry-after"]

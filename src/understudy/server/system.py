"""The routes for whoever runs a server: is it alive, can it answer, how full is it, and all that it counts."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from understudy import __version__
from understudy.core.request import Request as Asked
from understudy.core.request import SamplingParams, Speculation
from understudy.errors import UnderstudyError
from understudy.server.exchange import Caller, Exchange
from understudy.server.identity import caller_of
from understudy.server.meters.state import kv_usage
from understudy.server.metrics import Metrics
from understudy.server.service import Service

DEEP_LIMIT_S = 10.0
"""How long the one token of a deep check may take."""
_FIRST_IN_LINE = -(2**31)


class Status(BaseModel):
    """Whether something holds, and if not, why not."""

    status: str = Field(examples=["ok", "ready", "not ready", "failing"])
    reason: str = Field("", examples=["the engine died: its process ended with status -9"])


class Version(BaseModel):
    """Which server this is."""

    version: str = Field(examples=["0.1.0"])


class LoadNow(BaseModel):
    """How full a server is."""

    server_load: int = Field(description="Choices that hold a place and requests that wait for one.")
    running_choices: int
    waiting_requests: int
    engine_running_sequences: int
    engine_waiting_sequences: int
    kv_usage_ratio: float = Field(description="Share of the cache's blocks that are in use, from 0 to 1.")
    draining: bool


_NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"model": Status, "description": "Not now; the reason is told."}}
_NO_KEY: dict[int | str, dict[str, Any]] = {401: {"description": "A deep check computes, and needs a key."}}


def routes(service: Service, metrics: Metrics) -> APIRouter:
    """The routes of a service and of the numbers that it is counted by."""
    router = APIRouter(tags=["system"])

    @router.get("/health", response_model=Status, responses=_NOT_NOW | _NO_KEY, summary="Is it alive?")
    async def health(
        request: Request,
        deep: Annotated[bool, Query(description="Compute one token, within 10 s.")] = False,
    ) -> Response:
        if not deep:
            return _answer(200, "ok")
        if service.config.api_keys and not _is_known(caller_of(request)):
            raise HTTPException(401, "A deep check computes, and needs a key.")
        problem = await _deep_problem(service)
        return _answer(503, "failing", problem) if problem else _answer(200, "ok")

    @router.get("/ready", response_model=Status, responses=_NOT_NOW, summary="Can it answer now?")
    async def ready() -> Response:
        state = service.backend.state
        if service.admission.is_draining:
            return _answer(503, "not ready", "the server is being stopped")
        if state.phase != "ready":
            return _answer(503, "not ready", state.reason or f"the engine is {state.phase}")
        return _answer(200, "ready")

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "In the text format of Prometheus."}},
        summary="All that is counted",
    )
    def read_metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        # not async: writing thousands of lines is done in a thread, beside the streams
        content, content_type = metrics.text(accept)
        return Response(content, headers={"content-type": content_type})

    @router.get("/version", summary="Which server is this?")
    async def version() -> Version:
        return Version(version=__version__)

    @router.get("/load", summary="How full is it?")
    async def load() -> LoadNow:
        admission, engine = service.admission, service.backend.load
        return LoadNow(
            server_load=admission.num_running + admission.num_waiting,
            running_choices=admission.num_running,
            waiting_requests=admission.num_waiting,
            engine_running_sequences=engine.num_running,
            engine_waiting_sequences=engine.num_waiting,
            kv_usage_ratio=kv_usage(service),
            draining=admission.is_draining,
        )

    return router


def _answer(status: int, word: str, reason: str = "") -> Response:
    return JSONResponse(Status(status=word, reason=reason).model_dump(), status)


def _is_known(caller: Caller) -> bool:
    return bool(caller.tenant) or caller.is_admin


async def _deep_problem(service: Service) -> str:
    """Compute one token as any request would, and say what went wrong, if anything did."""
    asked = Asked(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_ids=(0,),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        speculation=Speculation(enabled=False),
        priority=_FIRST_IN_LINE,
    )
    exchange = Exchange(asked, Caller("health", is_admin=True), "health")
    try:
        async with asyncio.timeout(DEEP_LIMIT_S), contextlib.aclosing(service.answer(exchange)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    return output.error
    except TimeoutError:
        return f"no token came within {DEEP_LIMIT_S:g} s"
    except UnderstudyError as error:
        return error.message
    return "" if exchange.num_tokens else "the engine said nothing"

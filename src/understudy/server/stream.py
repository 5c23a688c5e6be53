"""Answers that somebody waits for: sent event by event, kept alive while nothing comes, given up when nobody listens.

A connection is watched by its own `receive`: whatever stands between server and route, the message that the client is
gone comes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from understudy.server.connection import WritePiece, piece_writer
from understudy.server.errors import problem_of

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work, and stop it as soon as its client is gone."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(task, gone)
    if task.cancelled():
        raise ClientGone
    return task.result()


class EventStream(Response):
    """Server-sent events. The status is sent with the first event, so that a refusal still has a status of its own.

    When nothing comes for `keep_alive_s`, the status and a comment are sent: from then on an error is an event.
    `events` is given a way to write some of them itself.
    """

    def __init__(
        self,
        events: Callable[[WritePiece], AsyncGenerator[bytes, None]],
        *,
        request_id: str,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": "text/event-stream", "cache-control": "no-cache", **(headers or {})})
        self._events = events(self._write_now)
        self._request_id = request_id
        self._keep_alive_s = keep_alive_s
        self._is_started = False
        self._last_s = 0.0
        self._starting = asyncio.Lock()  # events and comments come from two tasks, and one of them is first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything. The events' generator is closed when this returns, however it does."""
        self._loop = asyncio.get_running_loop()
        self._write_piece = piece_writer(scope)
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_until_gone(receive))
        alive = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(pump, gone, alive)
        if pump.cancelled():
            return
        error = pump.exception()
        if isinstance(error, Exception):
            problem = problem_of(error, self._request_id)
            if not self._is_started:
                await problem.response()(scope, receive, send)
                return
            await self._send(send, b"data: " + msgspec.json.encode(problem.body) + b"\n\n")
        await self._send(send, DONE, more=False)

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)

    def _write_now(self, data: bytes) -> bool:
        """Write events from outside of the pump, which must be waiting for them; False if that cannot be now."""
        if not self._is_started or not self._write_piece(data):
            return False
        self._last_s = self._loop.time()
        return True

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._is_started:
            async with self._starting:
                if not self._is_started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    self._is_started = True
        self._last_s = self._loop.time()
        if not (more and self._write_piece(data)):
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _keep_alive(self, send: Send) -> None:
        self._last_s = self._loop.time()
        while self._keep_alive_s:
            idle_s = self._loop.time() - self._last_s
            if idle_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
                idle_s = 0.0
            await asyncio.sleep(self._keep_alive_s - idle_s)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """End tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

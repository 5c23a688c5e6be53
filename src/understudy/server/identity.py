"""Who asks, and under which id: what the gate found out, for the routes. Where no gate ran, there are defaults."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.types import Scope, Send

from understudy.server.exchange import Caller


def caller_of(request: Request) -> Caller:
    """Whoever sent a request."""
    return request.scope.get("state", {}).get("caller") or Caller()


def request_id_of(request: Request) -> str:
    """The id that a request is known by in answers, logs and errors."""
    return request.scope.get("state", {}).get("request_id") or f"req-{uuid.uuid4().hex}"


def note_sender(scope: Scope, send: Send) -> None:
    """Remember how the connection itself is written to."""
    scope.setdefault("state", {})["send"] = send


def body_sender(scope: Scope, send: Send) -> Send:
    """The shortest way for the body of an answer that has begun: every layer between has seen its start already.

    A word takes it once for each step of the engine, which leaves nothing of ours in the processor's caches.
    """
    shortest: Send = scope.get("state", {}).get("send", send)
    return shortest

"""Who asks, and under which id: what the gate found out, for the routes. Where no gate ran, there are defaults."""

from __future__ import annotations

import uuid

from starlette.requests import Request

from understudy.server.exchange import Caller


def caller_of(request: Request) -> Caller:
    """Whoever sent a request."""
    return request.scope.get("state", {}).get("caller") or Caller()


def admin_name(request: Request) -> str:
    """What the audit log calls an admin: the key by a short digest, or the machine itself where there are no keys."""
    tenant = caller_of(request).tenant
    return f"admin key {tenant[:8]}" if tenant else "loopback"


def request_id_of(request: Request) -> str:
    """The id that a request is known by in answers, logs and errors."""
    return request.scope.get("state", {}).get("request_id") or f"req-{uuid.uuid4().hex}"

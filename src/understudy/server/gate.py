"""The gate that every request passes: it is given an id, its sender is found out, and its body is read within bounds.

What is not allowed by name is forbidden: every path needs a key once there are keys, but for those in `OPEN_PATHS`.
Decisions look at `scope["path"]`, the one text that routes are chosen by. The whole body is read here, after the key
was seen: no route ever waits for a slow sender, and none sees more bytes than are allowed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from understudy.core.backend import BackendState
from understudy.server.admission import Overloaded
from understudy.server.config import ServerConfig, is_loopback
from understudy.server.connection import refusal_writer
from understudy.server.errors import error_body, problem_of
from understudy.server.exchange import Caller
from understudy.server.keys import KeyRing

log = logging.getLogger("understudy.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key, and without looking at a body."""
_KNOWN_WHILE_LOADING = OPEN_PATHS | {"/metrics"}
_LOADING_RETRY_S = 5
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/=+@-]{1,64}")
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})
_LINGER_S = 1.0
_LINGER_BYTES = 1 << 20


@dataclass(eq=False)
class _Refusal(Exception):
    """An answer that is given here, at the gate."""

    status: int
    message: str
    code: str
    kind: str = "invalid_request_error"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class _Gone(Exception):
    """The client left before its request was whole."""


class Door(Protocol):
    """What the gate asks of whoever is behind it, and tells them."""

    @property
    def state(self) -> BackendState:
        """Whether there is an engine: before it was ever ready, the gate answers for it."""

    def check(self, path: str, caller: Caller, body: bytes | None) -> None:
        """Raise `Overloaded` if a request could not be taken on now. Asked before its body is read, and with it."""

    def refused(self, code: str) -> None:
        """Hear that the gate turned somebody away."""


class OpenDoor:
    """Nobody is behind it who could say no."""

    state = BackendState("ready")

    def check(self, path: str, caller: Caller, body: bytes | None) -> None:
        """Let everybody in."""

    def refused(self, code: str) -> None:
        """Tell nobody."""


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, config: ServerConfig, *, door: Door | None = None) -> None:
        self._app = app
        self._config = config
        self._door = door or OpenDoor()
        self._keys = KeyRing(config.api_keys, config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # nothing here speaks any other protocol

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        response = _Response(send, request_id, scope)
        unread = receive if _announces_body(scope) else None
        try:
            scope.setdefault("state", {})["request_id"] = request_id
            scope["state"]["caller"] = caller = self._caller(scope)
            self._check_ready(scope["path"])
            self._check_door(scope["path"], caller, None)
            body = await self._body(scope, receive)
            unread = None
            self._check_door(scope["path"], caller, body)
            await self._app(scope, _with_body(body, receive), response.send)
        except _Refusal as refusal:
            self._door.refused(refusal.code)
            await response.refuse(refusal, unread)
        except _Gone:
            pass
        except Exception:
            # routes answer for their own errors; what comes up to here is a bug, and is told once, with the id
            log.exception("request %s failed", request_id)
            if not response.has_started:
                await response.refuse(_Refusal(500, "The server failed.", "engine_error", kind="server_error"), None)

    # who asks

    def _caller(self, scope: Scope) -> Caller:
        """Find out who asks; refuse whoever may not."""
        config, path = self._config, scope["path"]
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > config.max_headers or num_bytes > config.max_header_bytes:
            message = f"Headers may be {config.max_headers}, and have {config.max_header_bytes} bytes in all."
            raise _Refusal(431, message, "headers_too_large")
        is_local = _is_local(scope)
        presented = _presented_key(scope)
        owner = self._keys.owner_of(presented) if presented is not None else None
        if owner is not None:
            caller = Caller(owner.tenant, is_admin=owner.is_admin, is_local=is_local)
        else:
            caller = Caller("", is_admin=not self._has_keys and is_local, is_local=is_local)
        if path in OPEN_PATHS:
            return caller
        if _is_admin_path(path):
            self._check_admin(scope, caller, is_known=owner is not None)
        elif config.api_keys and owner is None:
            raise _unauthorized(presented)
        return caller

    @property
    def _has_keys(self) -> bool:
        return bool(self._config.api_keys or self._config.admin_keys)

    def _check_admin(self, scope: Scope, caller: Caller, *, is_known: bool) -> None:
        if self._has_keys and not is_known:
            raise _unauthorized(_presented_key(scope))
        if not caller.is_admin:
            raise _Refusal(403, "This needs an admin key.", "admin_required", kind="permission_error")
        if not self._has_keys:
            _check_browser(scope)

    def _check_ready(self, path: str) -> None:
        if self._door.state.phase == "starting" and path not in _KNOWN_WHILE_LOADING and not _is_admin_path(path):
            headers = ((b"retry-after", b"%d" % _LOADING_RETRY_S),)
            message = "The model is being loaded. Try again in a few seconds."
            raise _Refusal(503, message, "engine_restarting", kind="server_error", headers=headers)

    def _check_door(self, path: str, caller: Caller, body: bytes | None) -> None:
        """Send away before anything is read, or at least parsed and tokenized, whoever could not be taken on anyway."""
        try:
            self._door.check(path, caller, body)
        except Overloaded as error:
            problem = problem_of(error, "")
            headers = tuple((name.encode(), value.encode()) for name, value in problem.headers.items())
            kind = "rate_limit_error" if problem.status == 429 else "server_error"
            raise _Refusal(problem.status, str(error), error.code, kind=kind, headers=headers) from None

    # what is sent

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = 0 if scope["path"] in OPEN_PATHS else self._config.max_body_bytes
        if _content_length(scope) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await _read(receive, limit)
        except TimeoutError:
            raise _Refusal(408, "The body of the request came too slowly.", "request_timeout") from None


class _Response:
    """What goes back, with the headers that every answer has."""

    def __init__(self, send: Send, request_id: str, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self._headers = {
            b"x-request-id": request_id.encode(),
            b"x-content-type-options": b"nosniff",
            b"x-frame-options": b"DENY",
            b"referrer-policy": b"no-referrer",
        }
        if scope["path"].startswith("/v1/") or _is_admin_path(scope["path"]):
            self._headers[b"cache-control"] = b"no-store"
        self.has_started = False

    async def send(self, message: Message) -> None:
        """Send a part of an answer."""
        if message["type"] == "http.response.start":
            self.has_started = True
            own = [(name, value) for name, value in message.get("headers", []) if name.lower() not in self._headers]
            message = {**message, "headers": [*own, *self._headers.items()]}
        await self._send(message)

    async def refuse(self, refusal: _Refusal, unread: Receive | None) -> None:
        """Answer with an error. A sender who is still talking is listened to for a moment, so that it hears this."""
        body = json.dumps(error_body(refusal.message, kind=refusal.kind, code=refusal.code)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *refusal.headers]
        if unread is not None:
            headers.append((b"connection", b"close"))
        if refusal_writer(self._scope)(refusal.status, [*headers, *self._headers.items()], body):
            self.has_started = True
        else:
            await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
        if unread is not None:
            await _listen_on(unread)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _request_id(scope: Scope) -> str:
    """The client's own id, if it is short and plain; else a new one."""
    theirs = _header(scope, b"x-request-id")
    if theirs is not None and _REQUEST_ID.fullmatch(theirs):
        return theirs.decode()
    return f"req-{uuid.uuid4().hex}"


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    """The first header of a name; ASGI gives names in lower case."""
    return next((value for name, value in scope["headers"] if name == wanted), None)


def _is_admin_path(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


def _is_local(scope: Scope) -> bool:
    """Whether the peer is this machine. A proxy on it speaks for somebody else."""
    client = scope.get("client")
    forwarded = any(name in _FORWARDED for name, _ in scope["headers"])
    return client is not None and is_loopback(client[0]) and not forwarded


def _presented_key(scope: Scope) -> bytes | None:
    authorization = _header(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return _header(scope, b"x-api-key")


def _unauthorized(presented: bytes | None) -> _Refusal:
    message = "A key is needed." if presented is None else "This key is not known."
    headers = ((b"www-authenticate", b"Bearer"),)
    remedy = "Send it as `Authorization: Bearer KEY`."
    return _Refusal(401, f"{message} {remedy}", "invalid_api_key", kind="authentication_error", headers=headers)


def _check_browser(scope: Scope) -> None:
    """Refuse what a web page of somebody else makes a browser on this machine send.

    Where no key is asked for, the address alone lets a request in, and a browser has that address. A page that points
    its own name at this machine is known by the Host, any other by the Origin.
    """
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
    origin = _header(scope, b"origin")
    site = _header(scope, b"sec-fetch-site")
    is_ours = origin is None or origin.decode("latin-1").lower() in (f"http://{host}", f"https://{host}")
    if not _is_loopback_authority(host) or not is_ours or site not in (None, b"same-origin", b"none"):
        message = "This is answered only to this machine, by its loopback name, and to no other site's page."
        raise _Refusal(403, message, "foreign_origin", kind="permission_error")


def _is_loopback_authority(authority: str) -> bool:
    """Whether a Host header names this machine, with or without a port."""
    try:
        parts = urlsplit(f"//{authority}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return False
    plain = authority != "" and not set(authority) & set("/\\?#@ \t")
    return plain and name is not None and is_loopback(name)


def _announces_body(scope: Scope) -> bool:
    return _content_length(scope) > 0 or _header(scope, b"transfer-encoding") is not None


def _content_length(scope: Scope) -> int:
    """How long a body says it is; one that says nothing sensible is too long."""
    length = _header(scope, b"content-length") or b"0"
    return int(length) if re.fullmatch(rb"[0-9]{1,18}", length) else 1 << 62


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def _listen_on(receive: Receive) -> None:
    """Read on for a moment and throw it away: a connection that is closed on unread bytes may lose the answer."""
    num_bytes = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while num_bytes < _LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        pass


def _too_large(limit: int) -> _Refusal:
    return _Refusal(413, f"The body has more than {limit} bytes.", "payload_too_large")


def _with_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body first, and then whatever comes: the client's leaving."""
    is_given = False

    async def first_body() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return first_body

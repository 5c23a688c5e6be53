"""How connections are held: uvicorn's, with errors as ours are, and with an end to waiting.

A head that never comes and an answer that is never read would each hold a connection for ever, and the answer its
place in the engine too.

The pieces of a stream have a way of their own. The engine leaves nothing of ours in the processor's caches between two
of them, so what a piece costs is the code that it passes: here a length and a write, not a protocol's state machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from email.utils import formatdate

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from understudy.server.errors import error_body

HEAD_TIMEOUT_S = 15.0
"""A connection that has not sent the whole head of a request for this long is closed."""
STALL_TIMEOUT_S = 30.0
LEAST_READ_BYTES = 16 << 10
"""A peer that takes less than this of what waits for it in that time is hung up on."""

WritePiece = Callable[[bytes], bool]
Headers = list[tuple[bytes, bytes]]
WriteRefusal = Callable[[int, Headers, bytes], bool]


def piece_writer(scope: Scope) -> WritePiece:
    """How a piece of an answer without length is written at once, once its head was sent.

    It says False, and has written nothing, where the piece must be sent as any other: there is no such connection, its
    peer is gone or slow, or pieces have no lengths (HTTP/1.0). An empty piece only asks.
    """
    write: WritePiece = scope.get("state", {}).get("write_piece", lambda piece: False)
    return write


def refusal_writer(scope: Scope) -> WriteRefusal:
    """How the head and the body of a refusal are written with one call; False, and nothing is written, if they cannot.

    Under a flood most of what a refusal costs is to wake its reader, once for each write.
    """
    write: WriteRefusal = scope.get("state", {}).get("write_refusal", lambda status, headers, body: False)
    return write


class Connection(H11Protocol):
    """One connection. uvicorn waits for ever for a head that never ends, and for a peer that never reads."""

    head_timer: asyncio.TimerHandle | None = None
    stall_timer: asyncio.TimerHandle | None = None

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request, and offer it the short way for pieces."""
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["state"]["write_piece"] = self._write_piece
            scope["state"]["write_refusal"] = self._write_refusal
        await self.config.loaded_app(scope, receive, send)

    def _write_piece(self, piece: bytes) -> bool:
        # h11 sends the head and the end of such an answer, and keeps no account of what lies between
        if self.flow.write_paused or self.cycle.disconnected:
            return False
        if piece:  # an empty one would be the end
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _write_refusal(self, status: int, headers: Headers, body: bytes) -> bool:
        cycle = self.cycle
        is_closed_after = (b"connection", b"close") in self.headers  # uvicorn answers that with a header of its own
        if self.flow.write_paused or cycle.disconnected or cycle.response_started or is_closed_after:
            return False
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        head = h11.Response(
            status_code=status, headers=[*cycle.default_headers, *headers], reason=STATUS_PHRASES[status]
        )
        self.transport.write((self.conn.send(head) or b"") + (self.conn.send(h11.Data(data=body)) or b""))
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.app = self.answer
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes. A head that has only begun is waited for, but not for ever."""
        date = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", date), *self.config.encoded_headers]
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self.head_timer is None:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watching()
        self._stop_watching_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for a peer that reads too slowly: the answer stands still meanwhile."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on: nearly everything was read."""
        super().resume_writing()
        self._stop_watching_reader()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too large a head; once an answer has begun, all that is left is to hang up."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        message = "This is no valid HTTP request, or its headers are too large."
        body = json.dumps(error_body(message, code="invalid_http")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-content-type-options", b"nosniff"),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_head(self) -> None:
        self.head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self.stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self._check_reader, unread)

    def _check_reader(self, unread_before: int) -> None:
        """Hang up, unless enough was read. What is unread is thrown away: to wait for it would be no end."""
        if unread_before - self.transport.get_write_buffer_size() < LEAST_READ_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None

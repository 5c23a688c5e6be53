"""Messages as frames on a socket: four bytes of length, then MessagePack. Whoever reads knows which types may come."""

from __future__ import annotations

import asyncio
import select
import socket

import msgspec

from understudy.wire.messages import Command, Report, Tally

MOST_BYTES = 256 << 20
"""No message is longer. A frame that claims to be is no frame of ours."""
_LENGTH_BYTES = 4
_STATUS_BYTES = 4

_encoder = msgspec.msgpack.Encoder()
commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_tallies: msgspec.msgpack.Decoder[Tally] = msgspec.msgpack.Decoder(Tally)


def frame(message: Command | Report) -> bytes:
    """Write a message."""
    body = _encoder.encode(message)
    assert len(body) <= MOST_BYTES
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def pack_tally(tally: Tally) -> msgspec.Raw:
    """Write what a step cost as a part of a message that is read by itself."""
    return msgspec.Raw(_encoder.encode(tally))


def unpack_tally(packed: msgspec.Raw) -> Tally:
    """Read it."""
    return _tallies.decode(packed)


class Frames:
    """Bytes that arrive in pieces, cut into whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> list[bytes]:
        """Take more bytes; return the body of every frame that is now whole."""
        if not self._bytes and int.from_bytes(piece[:_LENGTH_BYTES], "little") == len(piece) - _LENGTH_BYTES:
            return [piece[_LENGTH_BYTES:]]  # exactly one, as nearly always
        self._bytes += piece
        whole: list[bytes] = []
        start = 0
        while len(self._bytes) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[start : start + _LENGTH_BYTES], "little")
            if length > MOST_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + _LENGTH_BYTES + length
            if len(self._bytes) < end:
                break
            whole.append(bytes(self._bytes[start + _LENGTH_BYTES : end]))
            start = end
        del self._bytes[:start]
        return whole


def send_status(connection: socket.socket, status: int) -> None:
    """Tell how a process ended: its exit status, or below zero the signal that ended it."""
    connection.sendall(status.to_bytes(_STATUS_BYTES, "little", signed=True))


async def receive_status(connection: socket.socket) -> int | None:
    """Wait to be told; None when the other end is gone."""
    try:
        told = await asyncio.get_running_loop().sock_recv(connection, _STATUS_BYTES)
    except ConnectionError:  # it was killed before it had read what it was sent
        return None
    return int.from_bytes(told, "little", signed=True) if told else None


class Channel:
    """The engine process's end: it computes, and looks into its letter box between two steps."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._waiting: list[Command] = []
        # not select(), which knows no descriptor from 1024 on: a busy server hands down such a number
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def close(self) -> None:
        """Let this process's end go; another that shares it keeps it."""
        self._connection.close()

    def send(self, report: Report) -> None:
        """Send a report. Blocks while the other end does not read."""
        self._connection.sendall(frame(report))

    def receive(self, *, wait_s: float | None) -> list[Command]:
        """All commands that have come, or come first within some seconds, None: ever; EOFError if nobody is there."""
        timeout_ms = None if wait_s is None else 1e3 * wait_s
        while self._poll.poll(timeout_ms):
            piece = self._connection.recv(1 << 20)
            if not piece:
                raise EOFError
            self._waiting.extend(commands.decode(body) for body in self._frames.add(piece))
            if self._waiting:
                timeout_ms = 0
        received, self._waiting = self._waiting, []
        return received

"""A client of few lines on asyncio's streams: cheap enough for thousands, and it can leave at any byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

HEADERS_LIMIT = 1 << 16


@dataclass
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Connection:
    """One connection for one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def read_head(self) -> None:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readline(), 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        else:
            yield await self.reader.readexactly(int(self.headers.get("content-length", 0)))


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """Write a request."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", f"content-length: {len(data)}"]
    lines += ["content-type: application/json"] if data else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


@contextlib.asynccontextmanager
async def connect(port: int) -> AsyncGenerator[Connection, None]:
    """Open a connection, and close it without ceremony."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=HEADERS_LIMIT)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def call(port: int, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None) -> Reply:
    """Send a request, and read the whole response."""
    async with connect(port) as connection:
        connection.writer.write(request_bytes(method, path, body, headers))
        await connection.read_head()
        data = b"".join([piece async for piece in connection.pieces()])
        return Reply(connection.status, connection.headers, data)


async def events(
    port: int, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None
) -> AsyncGenerator[Any, None]:
    """Yield the events of a stream, but for the last; a response that is no stream is raised as an error."""
    async with connect(port) as connection:
        connection.writer.write(request_bytes("POST", path, {**body, "stream": True}, headers))
        await connection.read_head()
        if connection.status != 200:
            data = b"".join([piece async for piece in connection.pieces()])
            raise RefusedError(connection.status, connection.headers, data)
        waiting = b""
        async for piece in connection.pieces():
            waiting += piece
            *whole, waiting = waiting.split(b"\n\n")
            for event in whole:
                if event == b"data: [DONE]":
                    return
                if event.startswith(b"data: "):
                    yield json.loads(event[6:])
        raise ConnectionError("the stream ended without [DONE]")


class RefusedError(Exception):
    """A status other than 200."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(f"{status}: {body[:300]!r}")
        self.status, self.headers, self.body = status, headers, body

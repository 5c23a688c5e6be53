"""Servers for tests: a service around a fake backend, and a real socket in front of an application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from starlette.types import ASGIApp

from tests.server.fake_backend import FakeBackend
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from understudy.core.backend import ModelInfo
from understudy.server.config import ServerConfig
from understudy.server.run import _Web, _web_config, listen
from understudy.server.service import Service


def fake_service(folder: Path, config: ServerConfig | None = None, **backend: float) -> Service:
    """A service whose words are made up; its tokenizer is written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    info = ModelInfo(
        name="fake",
        system_fingerprint="fp_fake",
        max_context=512,
        vocab_size=304,
        eos_ids=(2,),
        tokenizer_folder=str(folder),
        drafters=("suffix",),
    )
    return Service(FakeBackend(info, **backend), config or ServerConfig(port=0))


@contextlib.contextmanager
def served(app: ASGIApp, config: ServerConfig) -> Iterator[tuple[str, int]]:
    """Serve an application on a real socket, in a thread; yield its address."""
    listener = listen(config)
    web = _Web(_web_config(app, config))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await web.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not web.started:
            time.sleep(0.005)
        yield listener.getsockname()[:2]
    finally:
        loops[0].call_soon_threadsafe(web.leave)
        thread.join()
        listener.close()


def talk(address: tuple[str, int], *pieces: bytes, timeout_s: float = 5.0) -> bytes:
    """Send bytes as they are, and read until the other end hangs up or falls silent."""
    received = b""
    with socket.create_connection(address, timeout=timeout_s) as connection:
        for piece in pieces:
            connection.sendall(piece)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := connection.recv(65536):
                received += part
                if is_whole(received):
                    break
    return received


def is_whole(answer: bytes) -> bool:
    """Whether an answer has all the bytes that its Content-Length announces."""
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(found and lengths) and len(body) >= int(lengths[0].split(b":")[1])


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])

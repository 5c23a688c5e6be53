"""Connections whose peer does not read."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from tests.server import served as serving
from tests.server.served import fake_service, served
from understudy.server import connection
from understudy.server.app import make_app
from understudy.server.config import ServerConfig
from understudy.server.run import listen

CONFIG = ServerConfig(port=0, max_running=4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience, and sockets that hold little."""

    def listener(config: ServerConfig) -> socket.socket:
        found = listen(config)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those that it accepts inherit it
        return found

    monkeypatch.setattr(serving, "listen", listener)
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.5)


def asks(service_address: tuple[str, int]) -> socket.socket:
    """Ask for far more than a socket can hold, and read nothing of it."""
    fields = {"prompt": "a", "max_tokens": 400, "stream": True, "logprobs": 20, "n": 4, "return_token_ids": True}
    padded = {**fields, "stream_options": {"include_obfuscation": True, "include_usage": True}}
    body = json.dumps(padded).encode()
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(service_address)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    peer.sendall(head.encode() + b"\r\n\r\n" + body)
    return peer


def test_who_never_reads_is_hung_up_on_and_gives_its_places_back(tmp_path: Path) -> None:
    service = fake_service(tmp_path, CONFIG)
    with served(make_app(service), CONFIG) as address, asks(address):
        deadline_s = time.monotonic() + 10.0
        while not service.admission.num_running and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert service.admission.num_running == 4
        time.sleep(0.2)
        assert service.admission.num_running == 4, "all of it went into the socket: ask for more"
        while service.admission.num_running and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert service.admission.num_running == 0


def test_who_reads_slowly_is_waited_for(tmp_path: Path) -> None:
    service = fake_service(tmp_path, CONFIG)
    with served(make_app(service), CONFIG) as address, asks(address) as peer:
        peer.settimeout(5.0)
        received = b""
        while not received.endswith(b"0\r\n\r\n") and (part := peer.recv(65536)):
            received += part
            time.sleep(0.01)
        assert b"data: [DONE]" in received

"""Connections whose peer does not read."""

from __future__ import annotations

import json
import socket
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.server import served as serving
from tests.server.fake_backend import FakeBackend
from tests.server.served import fake_service, served, talk
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


def test_the_pieces_of_a_stream_are_chunks_as_http_has_them(tmp_path: Path) -> None:
    """Byte by byte, over one connection: a stream, then an answer with a length, then a stream for HTTP/1.0."""
    service = fake_service(tmp_path, CONFIG)
    with served(make_app(service), CONFIG) as address, socket.create_connection(address, timeout=5.0) as peer:
        file = peer.makefile("rb")
        peer.sendall(_request({"prompt": "a", "max_tokens": 60, "stream": True, "seed": 1}))
        assert "transfer-encoding: chunked" in _head(file)
        pieces = []
        while size := int(file.readline().removesuffix(b"\r\n"), 16):
            pieces.append(file.read(size))
            assert file.read(2) == b"\r\n"
        assert file.readline() == b"\r\n", "nothing follows the last chunk"
        assert len(pieces) > 10
        # but for the first, the last and the end, words go straight to the connection
        assert isinstance(service.backend, FakeBackend)
        assert service.backend.num_taken >= len(pieces) - 3
        assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)
        peer.sendall(_request({"prompt": "a", "max_tokens": 60, "seed": 1}))
        length = next(line for line in _head(file) if line.startswith("content-length: "))
        whole = json.loads(file.read(int(length.partition(" ")[2])))
        assert _text_of(b"".join(pieces)) == whole["choices"][0]["text"]
        peer.sendall(_request({"prompt": "a", "max_tokens": 60, "stream": True, "seed": 1}, version="1.0"))
        assert not any(line.startswith("transfer-encoding") for line in _head(file))
        num_taken = service.backend.num_taken
        assert _text_of(file.read()) == whole["choices"][0]["text"]
        assert service.backend.num_taken == num_taken, "where pieces have no lengths there is no short way"


def _request(fields: dict[str, object], *, version: str = "1.1") -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _head(file: BinaryIO) -> list[str]:
    lines = []
    while line := file.readline().decode().strip():
        lines.append(line.lower())
    assert lines[0].endswith(" 200 ok")
    return lines


def _text_of(stream: bytes) -> str:
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events)


def test_every_answer_has_the_date_of_its_request(tmp_path: Path) -> None:
    service = fake_service(tmp_path, CONFIG)
    ask = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with served(make_app(service), CONFIG) as address:
        first = _date(talk(address, ask))
        time.sleep(1.1)
        assert first < _date(talk(address, ask))


def _date(answer: bytes) -> datetime:
    (line,) = [line for line in answer.split(b"\r\n") if line.lower().startswith(b"date: ")]
    return parsedate_to_datetime(line[6:].decode())


@pytest.mark.parametrize(
    ("version", "more", "is_short"), [("1.1", "", True), ("1.1", "connection: close\r\n", False), ("1.0", "", False)]
)
def test_a_refusal_is_one_write_where_it_can_be_and_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, more: str, is_short: bool
) -> None:
    written: list[bool] = []
    write = connection.Connection._write_refusal

    def noted(self: connection.Connection, status: int, headers: connection.Headers, body: bytes) -> bool:
        written.append(write(self, status, headers, body))
        return written[-1]

    monkeypatch.setattr(connection.Connection, "_write_refusal", noted)
    config = ServerConfig(port=0, api_keys=("secret",))
    with served(make_app(fake_service(tmp_path, config)), config) as address, socket.create_connection(address) as peer:
        peer.sendall(f"GET /v1/models HTTP/{version}\r\nhost: a\r\n{more}\r\n".encode())
        with peer.makefile("rb") as reader:
            head = b"".join(iter(reader.readline, b"\r\n")).lower()
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            body = json.loads(reader.read(length))
    assert head.startswith(b"http/1.1 401")
    assert all(name in head for name in (b"\r\ndate:", b"\r\nx-request-id:", b"\r\nx-content-type-options: nosniff"))
    assert body["error"]["code"] == "invalid_api_key"
    assert any(written) == is_short

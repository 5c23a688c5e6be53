"""A small server with OpenAI's chat completions, streaming, that misbehaves as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does, and what it was asked."""

    words: list[str] = field(default_factory=lambda: ["one ", "two ", "three"])
    seconds_per_word: float = 0.0
    models: tuple[str, ...] = ("fake",)
    usage: bool = True
    metrics: dict[str, Any] | None = None
    status: int = 200
    fail_from: int = 10**9
    """Requests from this number on are broken off in the middle."""
    raw: bytes | None = None
    """Sent instead of a stream."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    most_at_once: int = 0
    num_running: int = 0
    url: str = ""

    def chunks(self, number: int) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        for place, word in enumerate(self.words):
            time.sleep(self.seconds_per_word)
            yield {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            if number >= self.fail_from and place == 0:
                return
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        if self.usage:
            last = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2 * len(self.words)}}
            yield last | ({"metrics": self.metrics} if self.metrics else {})


@contextmanager
def fake_server(behaviour: Behaviour | None = None) -> Iterator[Behaviour]:
    """Serve on a free port for as long as the block runs."""
    told = behaviour or Behaviour()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": name} for name in told.models]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(told.bodies)
                told.bodies.append(body)
                told.keys.append(self.headers["Authorization"])
                told.times_s.append(time.perf_counter())
                self.running = True
                told.num_running += 1
                told.most_at_once = max(told.most_at_once, told.num_running)
            try:
                if told.status != 200 or told.raw is not None:
                    self._send(told.raw or b'{"error": {"message": "no such model"}}')
                else:
                    with suppress(ConnectionError):  # whoever asked may leave
                        self._stream(number)
            finally:
                self._end()

        def _end(self) -> None:
            """Count this answer as over: before its last bytes, since whoever reads them may ask again at once."""
            with lock:
                told.num_running -= self.running
                self.running = False

        def _stream(self, number: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b": a comment\r\n\r\n")
            whole = False
            for chunk in told.chunks(number):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.flush()
                whole = chunk["choices"] == [] or whole or not told.usage
            if whole and number < told.fail_from:
                self._end()
                self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, content: bytes) -> None:
            self.send_response(told.status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

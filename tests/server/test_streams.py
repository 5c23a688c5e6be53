"""Streams, byte by byte: order of chunks, usage, padding, comments while nothing comes, errors, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import USER, SayingBackend, Served, events_of, serve_fake
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller
from understudy.server.openai.schemas import ChatCompletionChunk, TextCompletionChunk


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_fake(tmp_path_factory.mktemp("model"))


class Connection:
    """One client of an application, who may leave at any time."""

    def __init__(self, body: dict[str, Any], path: str = "/v1/chat/completions", **state: Any) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.is_complete = False
        self.arrived = asyncio.Event()
        self._request = json.dumps(body).encode()
        self._left = asyncio.Event()
        self._is_read = False
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "state": state,
        }

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message["body"])
            self.is_complete = not message["more_body"] if "more_body" in message else True
            self.arrived.set()

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()


def run(served: Served, connection: Connection) -> Connection:
    asyncio.run(served.app(connection.scope, connection.receive, connection.send))
    return connection


@contextlib.asynccontextmanager
async def running(served: Served, connection: Connection) -> AsyncGenerator[None, None]:
    task = asyncio.create_task(served.app(connection.scope, connection.receive, connection.send))
    try:
        yield
        await asyncio.wait_for(task, timeout=5)
    finally:
        task.cancel()


def test_chat_stream(served: Served) -> None:
    whole = served.chat(seed=4, max_tokens=20, n=2).json()
    answer = served.chat(seed=4, max_tokens=20, n=2, stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-seed"] == "4"
    chunks = events_of(answer.text)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert "usage" not in chunk
        assert (chunk["seed"], chunk["system_fingerprint"], chunk["model"]) == (4, "fp-test", "tiny")
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["delta"].get("role") for choice in choices[:3]] == ["assistant", "assistant", None]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole["choices"][index]["message"]["content"]
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "length")
        assert all(choice["finish_reason"] is None for choice in own[:-1])


def test_usage_comes_last(served: Served) -> None:
    chunks = events_of(served.chat(stream=True, stream_options={"include_usage": True}, include_metrics=True).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 16
    without = events_of(served.chat(stream=True, include_metrics=True).text)
    assert ["metrics" in chunk for chunk in without] == [False] * (len(without) - 1) + [True]


@pytest.mark.parametrize("extra", [{"echo": True, "logprobs": 1}, {"n": 2}, {"echo": True, "max_tokens": 0}], ids=str)
def test_completions_stream(served: Served, extra: dict[str, Any]) -> None:
    body = {"prompt": ["the cat", "a dog"], "seed": 9, "return_token_ids": True, **extra}
    whole = served.complete(**body).json()
    chunks = events_of(served.complete(**body, stream=True).text)
    for chunk in chunks:
        TextCompletionChunk.model_validate(chunk, strict=True)
    for expected in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        assert [token for choice in own for token in choice["token_ids"]] == expected["token_ids"]
        assert own[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert own[-1]["finish_reason"] == expected["finish_reason"]
        if expected["logprobs"] is not None:
            for name, values in expected["logprobs"].items():
                assert [value for choice in own for value in choice["logprobs"][name]] == values


def test_chat_stream_with_logprobs_and_ids(served: Served) -> None:
    chunks = events_of(served.chat(stream=True, logprobs=True, return_token_ids=True, max_tokens=30, seed=2).text)
    whole = served.chat(logprobs=True, return_token_ids=True, max_tokens=30, seed=2).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [e for choice in choices for e in (choice["logprobs"] or {}).get("content", ())] == whole["logprobs"][
        "content"
    ]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == whole["token_ids"]
    assert "prompt_token_ids" in chunks[0]
    assert "prompt_token_ids" not in chunks[1]


def test_one_send_per_step(served: Served) -> None:
    connection = run(served, Connection({"messages": USER, "stream": True, "max_tokens": 30, "seed": 1}))
    assert len(connection.parts) <= 30 / 3 + 1
    assert connection.is_complete


@pytest.mark.parametrize(
    ("is_local", "wanted", "padded"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_padding_hides_sizes(served: Served, is_local: bool, wanted: bool | None, padded: bool) -> None:
    options = {"include_usage": True, "include_obfuscation": wanted}
    body = {"messages": USER, "stream": True, "max_tokens": 200, "seed": 1, "stream_options": options}
    connection = run(served, Connection(body, caller=Caller(is_local=is_local)))
    events = [event + "\n\n" for event in connection.text.split("\n\n") if event.startswith("data: {")]
    sizes = [len(event.encode()) for event in events]
    assert ("obfuscation" in events[3]) == padded
    if padded:
        assert set(sizes) <= {512, 768}
        assert sizes.count(512) >= len(sizes) - 1
        assert len({json.loads(event[6:])["obfuscation"][:8] for event in events}) == len(events)
    else:
        assert len(set(sizes)) > 4


def test_waiting_is_filled_with_comments(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, config=ServerConfig(keep_alive_s=0.05), first_s=0.18)
    connection = run(served, Connection({"messages": USER, "stream": True, "max_tokens": 6}))
    assert connection.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert len(events_of(connection.text)) == 4


def test_refusal_has_its_own_status(tmp_path: Path) -> None:
    """Whoever waits for a place and gets none is told so by a status, not by an event."""
    served = serve_fake(tmp_path, config=ServerConfig(max_running=1, queue_timeout_s=0.05), step_s=0.05)

    async def both() -> tuple[Connection, Connection]:
        body = {"messages": USER, "stream": True, "max_tokens": 60}
        first, second = Connection(body), Connection(body)
        async with running(served, first):
            await first.arrived.wait()
            await served.app(second.scope, second.receive, second.send)
            first.leave()
        return first, second

    first, second = asyncio.run(both())
    assert (first.status, second.status) == (200, 503)
    assert second.headers["retry-after"].isdigit()
    assert json.loads(second.text)["error"]["code"] == "queue_timeout"


def test_late_refusal_is_an_event(tmp_path: Path) -> None:
    config = ServerConfig(max_running=1, queue_timeout_s=0.1, keep_alive_s=0.02)
    served = serve_fake(tmp_path, config=config)
    served.backend.die()
    connection = run(served, Connection({"messages": USER, "stream": True}))
    assert (connection.status, connection.is_complete) == (200, True)
    (event,) = events_of(connection.text)
    assert event["error"]["code"] == "engine_restarting"


def test_engine_lost_in_mid_stream(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, step_s=0.01)

    async def go() -> Connection:
        connection = Connection({"messages": USER, "stream": True, "max_tokens": 400})
        async with running(served, connection):
            await connection.arrived.wait()
            served.backend.die()
        return connection

    connection = asyncio.run(go())
    *_, last = events_of(connection.text)
    assert (last["error"]["code"], last["error"]["type"]) == ("engine_error", "server_error")


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_engine_that_gives_up(tmp_path: Path, reason: str) -> None:
    served = serve_fake(tmp_path, backend=SayingBackend, pieces=["a", "b"], finish_reason=reason)
    answer = served.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    *_, last = events_of(served.chat(stream=True).text)
    assert last["error"]["code"] == "engine_error"


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_leaves_is_aborted(tmp_path: Path, is_stream: bool, prompts: int) -> None:
    served = serve_fake(tmp_path, step_s=0.01)

    async def go() -> None:
        body = {"prompt": ["a"] * prompts, "stream": is_stream, "max_tokens": 400}
        connection = Connection(body, "/v1/completions")
        async with running(served, connection):
            while len(served.backend.running) < prompts:
                await asyncio.sleep(0.001)
            connection.leave()
        assert not connection.is_complete or not is_stream

    asyncio.run(go())
    assert len(served.backend.aborted) == prompts
    assert not served.backend.running
    assert served.service.admission.num_running == 0


def test_client_that_leaves_the_queue(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, config=ServerConfig(max_running=1), step_s=0.01)

    async def go() -> None:
        body = {"messages": USER, "stream": True, "max_tokens": 400}
        first, second = Connection(body), Connection(body)
        async with running(served, first):
            await first.arrived.wait()
            async with running(served, second):
                while not served.service.admission.num_waiting:
                    await asyncio.sleep(0.001)
                second.leave()
            assert not served.service.admission.num_waiting
            assert not second.parts
            first.leave()

    asyncio.run(go())
    assert len(served.backend.aborted) == 1


def test_unforeseen_errors_show_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = serve_fake(tmp_path)

    def explode(request: Any) -> Any:
        raise RuntimeError("secret path /etc/passwd")

    served.backend.generate = explode
    connection = run(served, Connection({"messages": USER, "stream": True}, request_id="req-7"))
    error = json.loads(connection.text)["error"]
    assert connection.status == 500
    assert "secret" not in error["message"]
    assert "req-7" in error["message"]
    assert connection.headers["x-should-retry"] == "false"
    assert "secret" in caplog.text

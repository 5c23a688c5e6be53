"""A server's life and end, in this process: signals, draining, an engine that cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.server.fake_backend import FakeBackend
from tests.server.served import fake_service
from understudy.core.backend import BackendState
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import ALL_ON, OFF
from understudy.errors import ConfigError, EngineLost, ModelError
from understudy.server.admission import Overloaded
from understudy.server.app import ServiceDoor
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.gate import Gate
from understudy.server.metrics import Metrics
from understudy.server.run import address_of, listen, serve
from understudy.server.service import Service

Story = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


def streaming_app(service: Service) -> Gate:
    """/v1/stream says words one by one; an error is its last line."""
    numbers = iter(range(1000))

    async def stream(request: WebRequest) -> Response:
        num_tokens = int(request.query_params["tokens"])
        asked = Request(
            request_id=f"r{next(numbers)}",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=num_tokens),
            speculation=Speculation(enabled=False),
        )
        outputs = service.answer(Exchange(asked, Caller(), "chat"))
        try:
            await anext(outputs)
        except Overloaded as error:
            return JSONResponse({"code": error.code}, 503)

        async def lines() -> AsyncGenerator[str, None]:
            yield "word\n"
            try:
                async for _ in outputs:
                    yield "word\n"
                yield "done\n"
            except EngineLost as error:
                yield f"error: {error}\n"

        return StreamingResponse(lines())

    async def health(request: WebRequest) -> Response:
        return JSONResponse({})

    app = Starlette(routes=[Route("/v1/stream", stream, methods=["POST"]), Route("/health", health)])
    return Gate(app, service.config, door=ServiceDoor(service, Metrics()))


def live(service: Service, story: Story) -> float:
    """Serve while a story is told, and until the server has left; return how long that took after the story."""

    async def main() -> float:
        listener = listen(service.config)
        ready = asyncio.Event()
        serving = asyncio.create_task(serve(service, streaming_app(service), listener, on_ready=ready.set))
        async with httpx.AsyncClient(base_url=address_of(listener), timeout=10.0) as client, asyncio.timeout(20.0):
            if service.backend.state.phase == "ready":
                await ready.wait()
            await story(client, service)
            began_s = time.monotonic()
            await serving
        return time.monotonic() - began_s

    return asyncio.run(main())


async def started_stream(client: httpx.AsyncClient, num_tokens: int) -> asyncio.Task[list[str]]:
    begun = asyncio.Event()

    async def read() -> list[str]:
        lines = []
        async with client.stream("POST", f"/v1/stream?tokens={num_tokens}") as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                begun.set()
        return lines

    task = asyncio.create_task(read())
    await begun.wait()
    return task


def signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_what_runs_is_finished_and_nobody_else_is_taken(tmp_path: Path) -> None:
    async def story(client: httpx.AsyncClient, service: Service) -> None:
        reading = await started_stream(client, 30)
        signal_self(signal.SIGTERM)
        await asyncio.sleep(0.1)
        refused = await client.post("/v1/stream?tokens=1")
        assert (refused.status_code, refused.json()) == (503, {"code": "draining"})
        assert (await client.get("/health")).status_code == 200
        assert await reading == ["word"] * 30 + ["done"]

    assert live(fake_service(tmp_path, step_s=0.02), story) < 3.0


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0.2, 1), (60.0, 2)])
def test_what_does_not_end_is_told(tmp_path: Path, drain_s: float, num_signals: int) -> None:
    async def story(client: httpx.AsyncClient, service: Service) -> None:
        reading = await started_stream(client, 10_000)
        for _ in range(num_signals):
            signal_self(signal.SIGTERM)
            await asyncio.sleep(0.05)
        lines = await reading
        assert lines[-1].startswith("error: ")
        assert lines[0] == "word"

    service = fake_service(tmp_path, ServerConfig(port=0, drain_s=drain_s), step_s=0.02)
    assert live(service, story) < 3.0
    assert service.admission.num_running == 0


def test_who_waits_for_a_dead_engine_hears_of_the_end(tmp_path: Path) -> None:
    async def story(client: httpx.AsyncClient, service: Service) -> None:
        assert isinstance(service.backend, FakeBackend)
        service.backend.die()
        asked = Request(request_id="w", prompt_ids=(1,), sampling=SamplingParams(max_tokens=1))
        waiting = asyncio.create_task(anext(service.answer(Exchange(asked, Caller(), "chat"))))
        await asyncio.sleep(0.05)
        signal_self(signal.SIGTERM)
        signal_self(signal.SIGTERM)
        with pytest.raises(EngineLost):
            await waiting

    assert live(fake_service(tmp_path, ServerConfig(port=0, drain_s=0.1)), story) < 3.0


def test_signals_switch_speculation(tmp_path: Path) -> None:
    async def story(client: httpx.AsyncClient, service: Service) -> None:
        assert isinstance(service.backend, FakeBackend)
        signal_self(signal.SIGUSR1)
        await asyncio.sleep(0.05)
        assert service.backend.switches == OFF
        signal_self(signal.SIGUSR2)
        await asyncio.sleep(0.05)
        assert service.backend.switches == ALL_ON
        signal_self(signal.SIGINT)

    live(fake_service(tmp_path), story)


def test_told_to_leave_while_loading(tmp_path: Path) -> None:
    class Slow(FakeBackend):
        async def start(self) -> None:
            await asyncio.sleep(1000.0)

    async def story(client: httpx.AsyncClient, service: Service) -> None:
        for _ in range(100):
            try:
                answer = await client.get("/health")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.02)
        assert answer.status_code == 200
        loading = await client.post("/v1/stream?tokens=1")
        assert loading.status_code == 503
        assert loading.json()["error"]["code"] == "engine_restarting"
        signal_self(signal.SIGTERM)

    service = fake_service(tmp_path)
    service.backend = Slow(service.backend.info, state=BackendState("starting"))
    assert live(service, story) < 2.0


def test_engine_that_cannot_start_is_raised(tmp_path: Path) -> None:
    class Broken(FakeBackend):
        async def start(self) -> None:
            raise ModelError("There is no model.")

    service = fake_service(tmp_path)
    service.backend = Broken(service.backend.info)
    with pytest.raises(ModelError):
        asyncio.run(serve(service, streaming_app(service), listen(service.config)))
    assert service.backend.state.phase == "stopped"


def test_port_in_use_is_told() -> None:
    with listen(ServerConfig(port=0)) as first, pytest.raises(ConfigError, match="cannot be listened on"):
        listen(ServerConfig(port=first.getsockname()[1]))
    with pytest.raises(ConfigError, match="no address"):
        listen(ServerConfig(host="no.such.host.invalid", insecure=True))


def test_answer_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    service = fake_service(tmp_path, ServerConfig(port=0, request_timeout_s=0.2), step_s=0.02)
    asked = Request(
        request_id="w",
        prompt_ids=(1,),
        sampling=SamplingParams(max_tokens=10_000),
        speculation=Speculation(enabled=False),
    )
    exchange = Exchange(asked, Caller(), "chat")

    async def main() -> None:
        with pytest.raises(Overloaded) as caught:
            async for _ in service.answer(exchange):
                pass
        assert caught.value.code == "deadline_exceeded"

    asyncio.run(main())
    assert 0.15 < (exchange.ended_s or 0.0) - exchange.arrived_s < 2.0
    assert exchange.num_tokens > 1
    assert exchange.outcome == "overloaded"
    assert service.backend.aborted == ["w"]  # type: ignore[attr-defined]
    assert service.admission.num_running == 0


def test_only_an_admin_goes_before_others(tmp_path: Path) -> None:
    service = fake_service(tmp_path, ServerConfig(port=0, max_running=1), step_s=0.05)
    order: list[str] = []

    async def ask(name: str, priority: int, *, is_admin: bool) -> None:
        asked = Request(request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=5), priority=priority)
        async for _ in service.answer(Exchange(asked, Caller(is_admin=is_admin), "chat")):
            if name not in order:
                order.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, priority, is_admin in (("a", 0, False), ("b", 0, False), ("c", -9, False), ("d", -1, True)):
                tasks.create_task(ask(name, priority, is_admin=is_admin))
                await asyncio.sleep(0.001)

    asyncio.run(main())
    assert order == ["a", "d", "b", "c"]

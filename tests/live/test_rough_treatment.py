"""Clients that leave, switches that flip, engines that die: nobody else notices, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from typing import Any

import psutil
import pytest

from tests.live.client import RefusedError, call, connect, events, request_bytes
from tests.live.questions import questions
from tests.live.serving import Server

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"


async def read(port: int, body: dict[str, Any]) -> str:
    text = ""
    async with contextlib.aclosing(events(port, CHAT, body)) as stream:
        async for event in stream:
            if "error" in event:
                raise RuntimeError(event["error"]["code"])
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    return text


async def idle(server: Server, timeout_s: float = 20.0) -> dict[str, Any]:
    """Wait until nothing runs, and let the engine count its blocks."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = (await call(server.port, "POST", "/admin/v1/check", {})).json
        if not found["num_live_requests"] or time.monotonic() > deadline_s:
            return dict(found)
        await asyncio.sleep(0.05)


async def leave_somewhere(port: int, body: dict[str, Any], draw: random.Random) -> None:
    """Send part of a request or all of it, read for a while, and cut the connection."""
    data = request_bytes("POST", CHAT, {**body, "stream": draw.random() < 0.7})
    async with connect(port) as connection:
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))]
        connection.writer.write(data)
        with contextlib.suppress(asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(draw.choice([0.0, 0.01, 0.05, 0.2, 0.5])):
                await connection.reader.readexactly(draw.choice([1, 200, 1000, 4000]))


def test_a_thousand_clients_are_cut_off(server: Server) -> None:
    draw = random.Random(0)
    bodies = questions(100, max_tokens=200)

    async def run() -> None:
        await read(server.port, bodies[0])
        before = await idle(server)
        process = psutil.Process(server.process.pid)
        num_fds, num_tasks = process.num_fds(), server.get("/admin/v1/state")["num_tasks"]
        limit = asyncio.Semaphore(40)

        async def one(number: int) -> None:
            async with limit:
                await leave_somewhere(server.port, bodies[number % len(bodies)], draw)

        await asyncio.gather(*map(one, range(1000)))
        after = await idle(server)
        assert after["problem"] == ""
        assert after["num_live_requests"] == 0
        assert after["load"]["num_running"] == after["load"]["num_waiting"] == 0
        assert after["load"]["num_free_blocks"] == before["load"]["num_blocks"]
        await asyncio.sleep(1.0)
        assert process.num_fds() <= num_fds + 2, f"{num_fds} descriptors became {process.num_fds()}"
        state = server.get("/admin/v1/state")
        assert state["num_tasks"] <= num_tasks + 2
        assert (state["queue"]["num_running"], state["queue"]["num_waiting"]) == (0, 0)
        assert await read(server.port, bodies[0])

    asyncio.run(run())


def test_a_thousand_flips_under_load(server: Server) -> None:
    bodies = questions(24, max_tokens=64)
    draw = random.Random(2)

    async def run() -> None:
        expected = await asyncio.gather(*(read(server.port, body) for body in bodies))
        stop = asyncio.Event()

        async def load(number: int) -> int:
            num = 0
            while not stop.is_set():
                place = (number + num) % len(bodies)
                assert await read(server.port, bodies[place]) == expected[place]
                num += 1
            return num

        loads = [asyncio.create_task(load(number)) for number in range(8)]
        late_steps = 0
        for number in range(1000):
            body = {"enabled": bool(number % 2), "why": f"flip {number}"}
            reply = await call(server.port, "POST", "/admin/v1/speculation", body)
            assert reply.status == 200, reply.body
            assert reply.json["effective"]["enabled"] is bool(number % 2)
            await asyncio.sleep(draw.uniform(0.0, 0.06))
            if number % 100 == 98:  # switched off: at most the step that was under way may still have drafted
                late_steps = max(late_steps, await drafted_after_off(server))
        stop.set()
        assert sum(await asyncio.gather(*loads)) > 16
        assert late_steps <= 1, f"{late_steps} steps after a flip still drafted"
        history = server.get("/admin/v1/speculation")["history"]
        assert history[-1]["why"] == "flip 999"
        await call(server.port, "DELETE", "/admin/v1/speculation")

    asyncio.run(run())


async def drafted_after_off(server: Server) -> int:
    """Steps that drafted after the switch was off for everybody: seen in the engine's own count of drafting steps."""
    first = _drafting_steps(server.get("/metrics"))
    await asyncio.sleep(0.3)
    return _drafting_steps(server.get("/metrics")) - first


def _drafting_steps(metrics: str) -> int:
    """All steps, less those with no drafted row."""
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("understudy_step_draft_rows"))
    name = "understudy_step_draft_rows"
    return int(float(values[f"{name}_count"]) - float(values[f'{name}_bucket{{le="0.0"}}']))


def test_the_engine_is_killed_twenty_times_under_load(server: Server) -> None:
    bodies = questions(24, max_tokens=48)

    async def run() -> list[float]:
        expected = await asyncio.gather(*(read(server.port, body) for body in bodies))
        stop = asyncio.Event()
        outcomes = {"answered": 0, "lost": 0, "later": 0}

        async def load(number: int) -> None:
            while not stop.is_set():
                number += 1
                try:
                    async with asyncio.timeout(60):  # nobody hangs
                        text = await read(server.port, bodies[number % len(bodies)])
                    assert text == expected[number % len(bodies)]
                    outcomes["answered"] += 1
                except RuntimeError as error:
                    assert str(error) == "engine_error"
                    outcomes["lost"] += 1
                except RefusedError as error:
                    assert error.status in (500, 503), error
                    assert error.status == 500 or "retry-after" in error.headers
                    outcomes["lost" if error.status == 500 else "later"] += 1
                    await asyncio.sleep(0.05)

        loads = [asyncio.create_task(load(number)) for number in range(12)]
        took = []
        for _ in range(20):
            await asyncio.sleep(random.uniform(0.2, 1.0))
            os.kill(server.engine_pid, signal.SIGKILL)
            killed_s = time.monotonic()
            await asyncio.sleep(0.1)
            while (await call(server.port, "GET", "/ready")).status != 200:
                assert time.monotonic() - killed_s < 30, "it did not come back"
                await asyncio.sleep(0.05)
            assert await read(server.port, bodies[0]) == expected[0]
            took.append(time.monotonic() - killed_s)
        stop.set()
        await asyncio.gather(*loads)
        assert outcomes["answered"] > 20, outcomes
        assert outcomes["lost"] > 0, "no request was ever running when the engine died"
        print(f"back within {max(took):.1f} s, median {sorted(took)[10]:.1f} s; {outcomes}")
        return took

    took = asyncio.run(run())
    assert max(took) < 10, f"serving again took {max(took):.1f} s"

"""Ten times more than can be served: only 429 and 503, and what is taken on is served as well as at the peak."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest
import uvloop

from tests.live.client import RefusedError, call, events
from tests.live.questions import questions
from tests.live.serving import serve

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
DEADLINE_S = 12.0
PHASE_S = 30.0


async def read(port: int, body: dict[str, Any]) -> int:
    async with contextlib.aclosing(events(port, CHAT, body)) as stream:
        return sum([len(event["choices"]) async for event in stream])


async def peak(port: int, bodies: list[dict[str, Any]], concurrency: int) -> float:
    """Requests per second with as many at once as are computed together."""
    stop_s = time.monotonic() + PHASE_S
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        while time.monotonic() < stop_s:
            await read(port, bodies[number % len(bodies)])
            number += concurrency
            done += time.monotonic() < stop_s

    await asyncio.gather(*map(one, range(concurrency)))
    return done / PHASE_S


async def flood(port: int, bodies: list[dict[str, Any]], rate: float) -> tuple[list[float], dict[int, int]]:
    """Requests at random times; the times of those that were answered, and how many had which status."""
    draw = random.Random(3)
    times: list[float] = []
    statuses: dict[int, int] = {}

    async def one(number: int) -> None:
        started_s = time.monotonic()
        try:
            await read(port, bodies[number % len(bodies)])
            times.append(time.monotonic() - started_s)
            status = 200
        except RefusedError as error:
            status = error.status
            assert "retry-after" in error.headers, error
        statuses[status] = statuses.get(status, 0) + 1

    tasks = []
    stop_s = time.monotonic() + PHASE_S
    while time.monotonic() < stop_s:
        tasks.append(asyncio.create_task(one(len(tasks))))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)
    return times, statuses


def test_ten_times_too_much() -> None:
    bodies = questions(64, max_tokens=32)

    async def run(port: int) -> None:
        capacity = await peak(port, bodies, 8)
        times, statuses = await flood(port, bodies, 10 * capacity)
        assert set(statuses) <= {200, 429, 503}, statuses
        late = [seconds for seconds in times if seconds > DEADLINE_S]
        goodput = (len(times) - len(late)) / PHASE_S
        print(f"peak {capacity:.2f}/s, under ten times that {goodput:.2f}/s; {statuses}; slowest {max(times):.1f} s")
        assert not late, f"{len(late)} of {len(times)} took longer than {DEADLINE_S} s"
        assert goodput >= 0.9 * capacity
        started_s = time.monotonic()
        assert (await call(port, "POST", CHAT, bodies[0])).status == 200
        assert time.monotonic() - started_s < 5, "it did not recover"

    with serve("--max-running", "8", "--max-waiting", "16", "--queue-timeout", "6") as server:
        uvloop.run(run(server.port))  # a client that takes as little of the two cores as it can

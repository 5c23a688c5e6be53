"""200 prompts: whole and streamed, speculation on, off, and flipped in the middle of a stream. The words are equal."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from tests.live.client import call, events
from tests.live.questions import questions
from tests.live.serving import Server

pytestmark = pytest.mark.live

NUM_PROMPTS = 200
CONCURRENCY = 8
CHAT = "/v1/chat/completions"


async def whole(port: int, body: dict[str, Any]) -> tuple[str, str]:
    reply = await call(port, "POST", CHAT, body)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    assert reply.json["seed"] == body["seed"]
    return choice["message"]["content"], choice["finish_reason"]


async def streamed(port: int, body: dict[str, Any]) -> tuple[str, str]:
    text, reason = "", ""
    async with contextlib.aclosing(events(port, CHAT, body)) as stream:
        async for event in stream:
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


async def all_of(port: int, bodies: list[dict[str, Any]], ask: Any) -> list[tuple[str, str]]:
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(body: dict[str, Any]) -> tuple[str, str]:
        async with limit:
            return await ask(port, body)

    return await asyncio.gather(*map(one, bodies))


async def flip(port: int, until: asyncio.Event) -> int:
    draw, num = random.Random(1), 0
    while not until.is_set():
        body = {"enabled": bool(num % 2), "why": "a test flips it"}
        reply = await call(port, "POST", "/admin/v1/speculation", body)
        assert reply.status == 200, reply.body
        num += 1
        await asyncio.sleep(draw.uniform(0.01, 0.2))
    await call(port, "DELETE", "/admin/v1/speculation")
    return num


def test_the_same_words_whole_streamed_on_off_and_flipped(server: Server) -> None:
    bodies = questions(NUM_PROMPTS)
    off = [{**body, "speculation": {"enabled": False}} for body in bodies]

    async def run() -> None:
        expected = await all_of(server.port, off, whole)
        assert await all_of(server.port, bodies, whole) == expected
        assert await all_of(server.port, bodies, streamed) == expected
        assert await all_of(server.port, off, streamed) == expected
        done = asyncio.Event()
        flipping = asyncio.create_task(flip(server.port, done))
        flipped = await all_of(server.port, bodies, streamed)
        done.set()
        assert await flipping > 50, "hardly anything was flipped"
        assert flipped == expected
        assert len({text for text, _ in expected}) > NUM_PROMPTS / 2, "the answers do not differ from each other"

    asyncio.run(run())
    accepted = [line for line in server.get("/metrics").splitlines() if line.startswith("vllm:spec_decode_num_acc")]
    assert any(float(line.rsplit(" ", 1)[1]) > 100 for line in accepted), "nothing was ever drafted"

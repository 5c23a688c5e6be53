"""From the engine's outputs to an answer, whole or in pieces, whatever its shape.

A `Shape` knows how a choice looks; this file knows everything around it: who is asked, what it cost, what a chunk of a
stream is made of. Chunks are put together from bytes that were encoded once, because every word of everybody passes
through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from understudy.core.request import Output
from understudy.errors import EngineLost
from understudy.server.config import ServerConfig
from understudy.server.connection import WritePiece
from understudy.server.exchange import Exchange
from understudy.server.openai.order import Order
from understudy.server.openai.reading import by_size
from understudy.server.service import Service
from understudy.server.speculation_block import block
from understudy.server.stream import ClientGone, EventStream, while_connected

PADDED_BYTES = 256
"""Padded events are multiples of this, and at least twice as long: nearly all of one stream have one size."""
_PAD_FIELD = b',"obfuscation":""'
_END = b"}\n\n"
_TOKEN_BYTES, _LOGPROB_BYTES = 4, 64
"""Of a token's text, and of one log probability, as they are written."""

encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How the choices of an answer look. `place` counts them over all prompts."""

    object_name: str
    """What a whole answer calls itself."""
    chunk_name: str
    is_plain: bool
    """Whether an output adds its text and nothing else, but for the last of a choice."""

    def openings(self) -> list[bytes]:
        """Choices that a stream begins with, each in a chunk of its own."""

    def chunks(self, place: int, output: Output) -> list[bytes]:
        """What an output adds to a stream, each in a chunk of its own."""

    def around_words(self, place: int) -> tuple[bytes, bytes]:
        """What a chunk has before and after a text, where it `is_plain`: the same bytes as `chunks` gives."""

    def choice(self, place: int, outputs: Sequence[Output]) -> dict[str, object]:
        """A whole choice."""

    def extra(self) -> dict[str, object]:
        """Further fields of a whole answer and of the first chunk."""


async def respond(service: Service, order: Order, shape: Shape, http: HttpRequest) -> Response:
    """Answer a request."""
    if order.is_stream:
        keep_alive_s = service.config.keep_alive_s
        events = functools.partial(_events, service, order, shape)
        return EventStream(events, request_id=order.request_id, keep_alive_s=keep_alive_s, headers=order.headers)
    try:
        body = await while_connected(http.receive, _whole(service, order, shape))
    except ClientGone:
        return Response(status_code=499)
    return Response(body, 200, order.headers, "application/json")


async def _whole(service: Service, order: Order, shape: Shape) -> bytes:
    exchanges = _exchanges(order)
    said: dict[int, list[Output]] = {}
    async with contextlib.aclosing(_outputs(service, exchanges, order.num_choices)) as outputs:
        async for output in outputs:
            said.setdefault(output.choice, []).append(_sound(output))

    def written() -> bytes:
        body = {
            **_head(order, shape.object_name),
            "choices": [shape.choice(place, said[place]) for place in sorted(said)],
            "usage": _usage(order, exchanges),
            **shape.extra(),
            **_metrics(order, exchanges),
        }
        return encode(body)

    return await by_size(_expected_bytes(order, exchanges), written)


async def _events(service: Service, order: Order, shape: Shape, write_now: WritePiece) -> AsyncGenerator[bytes, None]:
    frame = Frame(order, shape)
    exchanges = _exchanges(order)
    num_running = len(exchanges) * order.num_choices
    so_far = _so_far(order, exchanges)
    openings = [
        frame.event(choice, more={**so_far, **(shape.extra() if not n else {})})
        for n, choice in enumerate(shape.openings())
    ]

    def take(output: Output) -> bool:
        """Write words where they arrive: waking the task that waits for them is a fifth of what an event costs."""
        if shape.is_plain:
            is_written = write_now(frame.words(output.choice, output.text) if output.text else b"")
        else:  # it remembers what it has told, so that must be sure to leave
            is_written = write_now(b"") and write_now(
                b"".join([frame.event(piece) for piece in shape.chunks(output.choice, output)])
            )
        if not is_written:
            return False
        exchanges[0].saw(output)  # as the service does with those that it yields
        return True

    async with contextlib.aclosing(_outputs(service, exchanges, order.num_choices)) as outputs:
        async for output in outputs:
            if len(exchanges) == 1 and not order.has_running_usage:
                service.backend.offer(exchanges[0].request.request_id, take)
            num_running -= output.finish_reason is not None
            pieces = shape.chunks(output.choice, _sound(output))
            if order.has_running_usage:
                so_far = _so_far(order, exchanges)
            events = openings + [frame.event(piece, more=so_far) for piece in pieces]
            openings = []
            if not num_running and not order.has_usage:
                events[-1] = frame.event(pieces[-1], more=_metrics(order, exchanges))
            if events:
                yield b"".join(events)
    if order.has_usage:
        yield frame.totals(_usage(order, exchanges), _metrics(order, exchanges))


class Frame:
    """What surrounds the choices in every chunk of a stream."""

    def __init__(self, order: Order, shape: Shape) -> None:
        self._begin = b"data: " + encode(_head(order, shape.chunk_name))[:-1] + b',"choices":['
        self._end = b'],"usage":null' if order.has_usage and not order.has_running_usage else b"]"
        self._is_padded = order.is_padded
        self._around = (
            [self._around_words(shape, place) for place in range(order.num_choices)] if shape.is_plain else []
        )

    def words(self, place: int, text: str) -> bytes:
        """A chunk with some text of a choice and nothing else: two pieces that are ready, and the text between."""
        before, after = self._around[place]
        body = before + encode(text) + after
        return self._padded(body) if self._is_padded else body

    def _around_words(self, shape: Shape, place: int) -> tuple[bytes, bytes]:
        before, after = shape.around_words(place)
        return self._begin + before, after + self._end + (b"" if self._is_padded else _END)

    def event(self, choice: bytes, *, more: dict[str, object] | None = None) -> bytes:
        """A chunk with one choice, and perhaps with further fields."""
        body = self._begin + choice + self._end
        if more:
            body += _members(more)
        return self._padded(body) if self._is_padded else body + _END

    def totals(self, usage: dict[str, object], more: dict[str, object]) -> bytes:
        """The chunk without choices that tells what the answer cost."""
        body = self._begin + b"]" + _members({"usage": usage, **more})
        return self._padded(body) if self._is_padded else body + _END

    @staticmethod
    def _padded(body: bytes) -> bytes:
        size = len(body) + len(_PAD_FIELD) + len(_END)
        num_characters = max(2 * PADDED_BYTES - size, -size % PADDED_BYTES)
        padding = secrets.token_urlsafe(num_characters)[:num_characters].encode()
        return body + _PAD_FIELD[:-1] + padding + b'"' + _END


def _exchanges(order: Order) -> list[Exchange]:
    return [Exchange(request, order.caller, order.endpoint) for request in order.requests]


def _outputs(service: Service, exchanges: Sequence[Exchange], num_choices: int) -> AsyncGenerator[Output, None]:
    """The outputs of all prompts as they come, their choices counted over all prompts; closing aborts all."""
    if len(exchanges) == 1:
        return service.answer(exchanges[0])  # no layer more than that: every word of nearly everybody passes here
    return _merged(service, exchanges, num_choices)


async def _merged(service: Service, exchanges: Sequence[Exchange], num_choices: int) -> AsyncGenerator[Output, None]:
    """The outputs of several prompts. One that fails fails all."""
    queue: asyncio.Queue[Output | None] = asyncio.Queue(maxsize=len(exchanges))
    turns = asyncio.Semaphore(_most_at_once(service.config, num_choices))

    async def ask(number: int, exchange: Exchange) -> None:
        try:
            async with turns, contextlib.aclosing(service.answer(exchange)) as outputs:
                async for output in outputs:
                    await queue.put(output._replace(choice=number * num_choices + output.choice))
        finally:
            # cancelled tasks must not wait for a reader that is gone
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    tasks = [asyncio.create_task(ask(*item)) for item in enumerate(exchanges)]
    try:
        while not (all(task.done() for task in tasks) and queue.empty()):
            output = await queue.get()
            if output is not None:
                yield output
            for task in tasks:
                if task.done():
                    task.result()  # raises what it failed with
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _most_at_once(config: ServerConfig, num_choices: int) -> int:
    """How many prompts of one request ask for a place together: they must not crowd each other out of the queue."""
    places = config.max_running // num_choices
    return max(1, places if config.max_per_key is None else min(places, config.max_per_key))


def _sound(output: Output) -> Output:
    if output.finish_reason in ("error", "abort"):
        raise EngineLost(output.error or "The engine could not finish this answer.", "Ask again.")
    return output


def _head(order: Order, name: str) -> dict[str, object]:
    return {
        "id": order.answer_id,
        "object": name,
        "created": order.created,
        "model": order.model,
        "system_fingerprint": order.fingerprint,
        "seed": order.seed,
    }


def _tokens(order: Order, exchanges: Sequence[Exchange]) -> dict[str, object]:
    """Tokens until now, of all choices of all prompts; each prompt is counted once."""
    num_prompt = sum(len(exchange.request.prompt_ids) for exchange in exchanges)
    num_said = 0 if order.is_echo_only else sum(exchange.num_tokens for exchange in exchanges)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_said, "total_tokens": num_prompt + num_said}


def _expected_bytes(order: Order, exchanges: Sequence[Exchange]) -> int:
    """About how long a whole answer is: log probabilities are most of it, and take seconds to write for long ones."""
    num_entries = 0 if order.num_logprobs is None else 1 + order.num_logprobs
    num_tokens = sum(exchange.num_tokens for exchange in exchanges)
    if order.texts:
        num_tokens += sum(len(request.prompt_ids) for request in order.requests)
    return num_tokens * (_TOKEN_BYTES + num_entries * _LOGPROB_BYTES)


def _so_far(order: Order, exchanges: Sequence[Exchange]) -> dict[str, object]:
    """What an event of a stream tells of usage: nothing, unless every event is to tell."""
    return {"usage": _tokens(order, exchanges)} if order.has_running_usage else {}


def _usage(order: Order, exchanges: Sequence[Exchange]) -> dict[str, object]:
    """What all choices of all prompts cost in the end, with what the first choice of each prompt found cached."""
    cached = sum(min((facts.cached_tokens for facts in exchange.facts), default=0) for exchange in exchanges)
    counts = [facts.counts for exchange in exchanges for facts in exchange.facts]
    accepted = sum(one.accepted_by_drafter.get("prediction", 0) for one in counts)
    rows = sum(one.rows_by_drafter.get("prediction", 0) for one in counts)
    return {
        **_tokens(order, exchanges),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rows - accepted,
            "reasoning_tokens": 0,
        },
    }


def _metrics(order: Order, exchanges: Sequence[Exchange]) -> dict[str, object]:
    """What speculation did, if it is wanted; null where several choices share the answer."""
    if not order.has_metrics:
        return {}
    if len(exchanges) > 1 or order.num_choices > 1:
        return {"metrics": None}
    max_depth = exchanges[0].request.speculation.max_depth
    return {"metrics": {"speculative_decoding": block(exchanges[0].facts, max_depth=max_depth)}}


def _members(fields: dict[str, object]) -> bytes:
    """Fields as they follow others in an object."""
    return b"," + encode(fields)[1:-1] if fields else b""

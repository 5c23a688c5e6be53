"""The real client: openai's package against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.server.serving import MODEL, TOOLS_TEMPLATE, USER, SayingBackend, Served, listening, serve_fake
from understudy.server.config import ServerConfig


class Point(BaseModel):
    x: int
    y: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_fake(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def address(served: Served) -> Iterator[str]:
    with listening(served.app) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=9, seed=3, logprobs=True)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint == "fp-test"
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == 9


def test_stream_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=30, seed=3)  # type: ignore[arg-type]
    with client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=30,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage


def test_stream_helper_with_tools(tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = ["Well. <tool_call>", '{"name": "point", "arguments": {"x": 1, "y": 2}}', "</tool_call>"]
    folder = tmp_path_factory.mktemp("tools")
    served = serve_fake(folder, template=TOOLS_TEMPLATE, backend=SayingBackend, pieces=pieces)
    tool = openai.pydantic_function_tool(Point, name="point")
    with (
        listening(served.app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
        client.chat.completions.stream(model=MODEL, messages=USER, tools=[tool]) as stream,  # type: ignore[arg-type]
    ):
        (choice,) = stream.get_final_completion().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well. ")
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == Point(x=1, y=2)


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, logprobs=1, echo=True, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens is not None
    assert len(answer.choices[0].logprobs.tokens) == 5
    pieces = client.completions.create(model=MODEL, prompt="a", max_tokens=4, seed=1, stream=True)
    assert "a" + "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "understudy"


def test_structured(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("saying")
    served = serve_fake(folder, backend=SayingBackend, pieces=['{"x": 1,', ' "y": 2}'])
    with listening(served.app) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Point)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == Point(x=1, y=2)
    assert served.asked.sampling.grammar is not None
    assert served.asked.sampling.grammar.kind == "json_schema"


def test_async_streams_at_once(address: str) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=USER,
            max_tokens=20,
            seed=seed,
            stream=True,  # type: ignore[arg-type]
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number % 4) for number in range(16)))

    texts = asyncio.run(go())
    assert texts[:4] * 4 == texts
    assert len(set(texts)) == 4


def test_errors(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=USER)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=9)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=10_000)  # type: ignore[arg-type]
    assert long.value.code == "context_length_exceeded"


def test_error_in_mid_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("failing")
    served = serve_fake(folder, backend=SayingBackend, pieces=["a", "b"], finish_reason="error")
    with listening(served.app) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIError, match="it broke"):
            list(stream)


def test_leaving_a_real_connection_aborts(tmp_path_factory: pytest.TempPathFactory) -> None:
    served = serve_fake(tmp_path_factory.mktemp("slow"), step_s=0.01, config=ServerConfig())
    with listening(served.app) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
            stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[arg-type]
            next(iter(stream))
            stream.close()
        for _ in range(100):
            if served.backend.aborted:
                break
            asyncio.run(asyncio.sleep(0.01))
    assert len(served.backend.aborted) == 1

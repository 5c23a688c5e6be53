"""Asks in every way that the openai SDK offers, and prints what came back as one JSON object.

python openai_sdk.py BASE_URL MODEL
"""

import asyncio
import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

base_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
question = [{"role": "user", "content": "Name the days of the week in order."}]
settings = {"model": model, "messages": question, "max_completion_tokens": 40, "temperature": 0.8, "seed": 7}


class Animal(BaseModel):
    name: Literal["cat", "dog", "horse"]
    num_legs: int
    tame: bool


class WeatherQuestion(BaseModel):
    """Ask for the weather in a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


def whole() -> dict[str, object]:
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    return {
        "text": choice.message.content,
        "finish_reason": choice.finish_reason,
        "usage": answer.usage.model_dump(),
        "fingerprint": answer.system_fingerprint,
        "logprob_text": b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode(),
        "num_alternatives": [len(token.top_logprobs) for token in choice.logprobs.content],
        "request_id": answer._request_id,
    }


def streamed() -> dict[str, object]:
    text, reasons, usage = "", [], None
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    return {"text": text, "reasons": reasons, "usage": usage.model_dump()}


def events() -> dict[str, object]:
    """The SDK's own reading of a stream."""
    with client.chat.completions.stream(**settings) as stream:
        found = list(stream)
    (done,) = [event for event in found if event.type == "content.done"]
    return {"deltas": "".join(event.delta for event in found if event.type == "content.delta"), "text": done.content}


async def concurrent() -> dict[str, object]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as asynchronous:

        async def read() -> str:
            stream = await asynchronous.chat.completions.create(**settings, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        answers = await asyncio.gather(asynchronous.chat.completions.create(**settings), read(), read())
    return {"texts": [answers[0].choices[0].message.content, *answers[1:]]}


def parsed() -> dict[str, object]:
    asked = [{"role": "user", "content": "Describe a dog as JSON with name, num_legs and tame."}]
    answer = client.chat.completions.parse(
        model=model, messages=asked, response_format=Animal, max_completion_tokens=60, temperature=0
    )
    return {"finish_reason": answer.choices[0].finish_reason, "animal": answer.choices[0].message.parsed.model_dump()}


def completion() -> dict[str, object]:
    answer = client.completions.create(model=model, prompt=["One, two,", "Red,"], max_tokens=8, temperature=0, n=2)
    return {"indices": [choice.index for choice in answer.choices], "texts": [choice.text for choice in answer.choices]}


def refused() -> dict[str, object]:
    found = {}
    for name, change in {
        "unknown_model": {"model": "no-such-model"},
        "too_long": {"messages": [{"role": "user", "content": "word " * 20000}]},
        "out_of_range": {"temperature": -1},
        "tools": {"tools": [openai.pydantic_function_tool(WeatherQuestion)]},
    }.items():
        try:
            client.chat.completions.create(**{**settings, **change})
        except openai.APIStatusError as error:
            found[name] = {"kind": type(error).__name__, "code": error.code, "param": error.param}
    return found


def main() -> None:
    names = [listed.id for listed in client.models.list()]
    found = {
        "version": openai.__version__,
        "models": names,
        "retrieved": client.models.retrieve(names[0]).id,
        "whole": whole(),
        "streamed": streamed(),
        "events": events(),
        "concurrent": asyncio.run(concurrent()),
        "parsed": parsed(),
        "completion": completion(),
        "refused": refused(),
    }
    print(json.dumps(found))


main()

"""Whatever bytes are sent, the answer is one of ours: never a 5xx, always in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.serving import TOOLS_TEMPLATE, USER, Served, serve_fake
from understudy.core.request import Output
from understudy.server.openai.completion_answer import CompletionAnswer
from understudy.server.openai.fields import ChatBody, CompletionBody

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
NUMBERS = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1e999", str(2**63), "9" * 400, "-0.0", "-1"]
)
TEXTS = st.sampled_from(
    ['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"' + "x" * 3000 + '"', '"\u202e"', '""', '"<|im_end|>"']
)
DEEP = st.sampled_from(["[" * 100_000, '{"a":' * 5000, "[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200])
ODD = st.sampled_from(["null", "true", "{}", "[]", "[null]", "[[]]", '{"type":"text"}', '{"a":1,"a":2}', '{"":0}'])
VALUES = st.one_of(NUMBERS, TEXTS, DEEP, ODD)
NAMES = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tokens", "functions", "zebra"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = serve_fake(tmp_path_factory.mktemp("model"), template=TOOLS_TEMPLATE, info={"max_context": 64})
    with served.client:
        yield served


def check(answer: Any) -> None:
    assert answer.status_code in (200, 400, 404, 415), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(answer.text) < 5000


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(PATHS), fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), valid=st.booleans()
)
def test_odd_values(served: Served, path: str, fields: dict[str, str], valid: bool) -> None:
    base = {"messages": json.dumps(USER), "prompt": '"a"', "tokens": "[5]"} if valid else {}
    members = [f"{json.dumps(name)}:{value}" for name, value in (base | fields).items()]
    raw = "{" + ",".join(members) + "}"
    check(served.client.post(path, content=raw.encode(), headers={"content-type": "application/json"}))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), raw=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_any_bytes(served: Served, path: str, raw: bytes) -> None:
    answer = served.client.post(path, content=raw, headers={"content-type": "application/json"})
    check(answer)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_content_types(served: Served, kind: str, status: int) -> None:
    answer = served.client.post("/tokenize", content=b'{"prompt":"a"}', headers={"content-type": kind})
    assert answer.status_code == status


def test_no_content_type_is_taken_for_json(served: Served) -> None:
    assert served.client.post("/tokenize", content=b'{"prompt":"a"}').status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/tokenize", 405),
    ],
)
def test_wrong_paths_and_methods(served: Served, method: str, path: str, status: int) -> None:
    answer = served.client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    if status == 405:
        assert answer.headers["allow"] in ("GET", "POST")


def test_large_prompts_do_not_stop_the_loop(tmp_path: Path) -> None:
    """While a megabyte is turned into tokens, the event loop goes on."""
    served = serve_fake(tmp_path)
    raw = json.dumps({"prompt": "the cat and the dog " * 50_000}).encode()

    async def go() -> tuple[float, float, Any]:
        transport = httpx.ASGITransport(served.app)
        worst_s = 0.0
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post("/tokenize", content=b'{"prompt":"a"}')
            started_s = before_s = time.perf_counter()
            task = asyncio.create_task(client.post("/tokenize", content=raw))
            while not task.done():
                await asyncio.sleep(0.001)
                worst_s, before_s = max(worst_s, time.perf_counter() - before_s), time.perf_counter()
            return worst_s, time.perf_counter() - started_s, await task

    worst_s, total_s, answer = asyncio.run(go())
    assert answer.json()["count"] > 100_000
    assert worst_s < 0.3 * total_s


def test_large_answers_do_not_stop_the_loop(tmp_path: Path) -> None:
    """While the log probabilities of thousands of tokens are written, the event loop goes on."""
    served = serve_fake(tmp_path, info={"max_context": 100_000})
    body = {"prompt": [5] * 20_000, "echo": True, "logprobs": 1, "max_tokens": 1}
    threads: list[int] = []
    write, loop_thread = CompletionAnswer.choice, threading.get_ident()

    def choice(self: CompletionAnswer, place: int, outputs: Sequence[Output]) -> dict[str, object]:
        threads.append(threading.get_ident())
        return write(self, place, outputs)

    async def go() -> Any:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json=body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompletionAnswer, "choice", choice)
        answer = asyncio.run(go())
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 20_001
    assert len(threads) == 1
    assert threads != [loop_thread]

"""Completions: several prompts, echo and log probabilities as evaluation tools read them; and the small routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.server.fake_backend import FakeBackend
from tests.server.serving import MODEL, USER, SayingBackend, Served, serve_fake
from understudy.core.request import Output, Request, SpeculationCounts
from understudy.errors import CapacityError
from understudy.server.config import ServerConfig
from understudy.server.openai.schemas import ChatCompletion, TextCompletion


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_fake(tmp_path_factory.mktemp("model"))


def test_several_prompts(served: Served) -> None:
    together = served.complete(prompt=["one", "two", "three"], n=2, seed=5).json()
    assert [choice["index"] for choice in together["choices"]] == [*range(6)]
    for number, prompt in enumerate(["one", "two", "three"]):
        alone = served.complete(prompt=prompt, n=2, seed=5).json()
        expected = [choice["text"] for choice in alone["choices"]]
        assert [choice["text"] for choice in together["choices"][2 * number : 2 * number + 2]] == expected
    assert together["usage"]["completion_tokens"] == 6 * 16
    TextCompletion.model_validate(together, strict=True)


@pytest.mark.parametrize("prompt", ["the cat", ["the cat"], "ids", "list of ids"])
def test_ways_to_write_a_prompt(served: Served, prompt: str | list[str]) -> None:
    token_ids = served.service.tokenizer.encode("the cat")
    written = {"ids": token_ids, "list of ids": [token_ids]}.get(str(prompt), prompt)
    assert served.complete(prompt=written).status_code == 200
    assert served.asked.prompt_ids == tuple(token_ids)


@pytest.mark.parametrize("config", [ServerConfig(max_running=4, max_waiting=2), ServerConfig(max_per_key=3)])
def test_prompts_of_one_request_do_not_crowd_each_other_out(tmp_path: Path, config: ServerConfig) -> None:
    served = serve_fake(tmp_path, config=config, step_s=0.001)
    answer = served.complete(prompt=[f"prompt {number}" for number in range(12)], n=2, seed=1, max_tokens=3)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == [*range(24)]
    assert served.service.admission.num_running == 0


class Fastidious(FakeBackend):
    """Refuses token 7, after a while."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        if request.prompt_ids == (7,):
            await asyncio.sleep(0.01)
            raise CapacityError("There is no room.")
        async with contextlib.aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                yield output


@pytest.mark.parametrize("max_running", [1, 3])
def test_one_failing_prompt_fails_all(tmp_path: Path, max_running: int) -> None:
    served = serve_fake(tmp_path, backend=Fastidious, config=ServerConfig(max_running=max_running), step_s=0.005)
    answer = served.complete(prompt=[[5], [7], [6]])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not served.backend.running
    assert served.service.admission.num_running == served.service.admission.num_waiting == 0


def test_echo_as_lm_eval_reads_it(served: Served) -> None:
    """Its request for a log likelihood: the sum over the continuation's tokens, and whether each was the best."""
    context, continuation = [5, 6, 7], [8, 9]
    whole = context + continuation
    body = served.complete(prompt=[whole, whole], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1).json()
    for choice in body["choices"]:
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        said = logprobs["token_logprobs"][len(context) : -1]
        best = logprobs["top_logprobs"][len(context) : -1]
        assert sum(said) == -2.0
        assert all(value == max(top.values()) for value, top in zip(said, best, strict=True))
        assert logprobs["text_offset"] == [*range(6)]
        assert choice["text"].startswith(served.service.tokenizer.decode(whole))


def test_echo_alone_says_nothing(served: Served) -> None:
    body = served.complete(prompt="the cat", echo=True, max_tokens=0, logprobs=0, return_token_ids=True).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("the cat", "length", [])
    assert "".join(choice["logprobs"]["tokens"]) == "the cat"
    assert body["usage"]["completion_tokens"] == 0


def test_offsets_find_each_token_in_the_text(served: Served) -> None:
    choice = served.complete(prompt="déjà vu 😀", echo=True, logprobs=2, max_tokens=1, seed=3).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)


def test_chat_logprobs(served: Served) -> None:
    body = served.chat(logprobs=True, top_logprobs=1, max_tokens=40, seed=2, return_token_ids=True).json()
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 40
    assert all(len(entry["top_logprobs"]) == 1 and entry["logprob"] == -1.0 for entry in content)
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    assert any(entry["token"] == "\ufffd" and entry["bytes"][0] > 127 for entry in content)
    assert len(choice["token_ids"]) == 40
    assert tuple(body["prompt_token_ids"]) == served.asked.prompt_ids
    ChatCompletion.model_validate(body, strict=True)


def test_usage_counts_predictions(tmp_path: Path) -> None:
    counts = SpeculationCounts(rows_by_drafter={"prediction": 9, "ngram": 4}, accepted_by_drafter={"prediction": 6})
    served = serve_fake(tmp_path, backend=SayingBackend, pieces=["a", "b"], counts=counts)
    usage = served.chat(prediction={"type": "content", "content": "ab"}).json()["usage"]
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 3)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


def test_models(served: Served) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == (MODEL, 512, "understudy")
    assert served.client.get(f"/v1/models/{MODEL}").json() == model
    missing = served.client.get("/v1/models/a/b")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_served_name(tmp_path: Path) -> None:
    served = serve_fake(tmp_path, config=ServerConfig(served_name="org/better"))
    assert served.client.get("/v1/models/org/better").json()["root"] == MODEL
    assert served.chat(model="org/better").json()["model"] == "org/better"
    for path, body in (
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ):
        answer = served.post(path, model=MODEL, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_tokens(served: Served) -> None:
    tokenizer = served.service.tokenizer
    body = served.post("/tokenize", prompt="the cat 😀", return_token_strs=True).json()
    assert body["tokens"] == tokenizer.encode("the cat 😀")
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (len(body["tokens"]), 512, body["count"])
    assert served.post("/detokenize", tokens=body["tokens"]).json() == {"prompt": "the cat 😀"}
    chat = served.post("/tokenize", messages=USER).json()
    served.chat()
    assert tuple(chat["tokens"]) == served.asked.prompt_ids
    assert chat["token_strs"] is None
    assert served.post("/detokenize", tokens=[304]).json()["error"]["param"] == "tokens"

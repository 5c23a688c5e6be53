"""The openai SDK, of two major versions: whole, streamed, asynchronous, parsed, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.clients.environments import Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(("environment", "major"), [("llm", "3"), ("litellm", "2")])
def test_every_way_to_ask(
    server: Server, model: str, client: Callable[[str], Client], environment: str, major: str
) -> None:
    printed = client(environment).run_script("openai_sdk.py", f"http://127.0.0.1:{server.port}/v1", model)
    found = json.loads(printed)
    assert found["version"].split(".")[0] == major
    assert found["models"] == [model]
    assert found["retrieved"] == model

    whole = found["whole"]
    assert whole["text"].strip()
    assert whole["logprob_text"] == whole["text"]
    assert set(whole["num_alternatives"]) == {2}
    assert whole["finish_reason"] in ("stop", "length")
    assert 0 < whole["usage"]["completion_tokens"] <= 40
    assert whole["fingerprint"]
    assert whole["request_id"]

    streamed = found["streamed"]
    assert streamed["text"] == whole["text"], "the same seed gives the same words"
    assert streamed["reasons"] == [whole["finish_reason"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed["usage"][name] == whole["usage"][name]
    assert found["events"] == {"deltas": whole["text"], "text": whole["text"]}
    assert found["concurrent"]["texts"] == [whole["text"]] * 3

    assert found["parsed"]["finish_reason"] == "stop"
    assert found["parsed"]["animal"]["name"] in ("cat", "dog", "horse")

    texts = found["completion"]["texts"]
    assert found["completion"]["indices"] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3], "two prompts, two choices each, at temperature 0"

    assert found["refused"]["unknown_model"] == {"kind": "NotFoundError", "code": "model_not_found", "param": "model"}
    assert found["refused"]["too_long"]["kind"] == "BadRequestError"
    assert found["refused"]["too_long"]["code"] == "context_length_exceeded"
    invalid = {"kind": "BadRequestError", "code": "invalid_value"}
    assert found["refused"]["out_of_range"] == {**invalid, "param": "temperature"}
    assert found["refused"]["tools"] == {**invalid, "param": "tools"}, "the embedded model's template knows no tools"

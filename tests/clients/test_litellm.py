"""LiteLLM, by both providers under which people put a server of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.clients.environments import Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients


def test_both_providers(server: Server, model: str, client: Callable[[str], Client]) -> None:
    printed = client("litellm").run_script("litellm_sdk.py", f"http://127.0.0.1:{server.port}/v1", model)
    found = json.loads(printed.splitlines()[-1])
    assert set(found) == {"hosted_vllm", "openai"}
    assert found["hosted_vllm"]["text"] == found["openai"]["text"]
    for answer in found.values():
        assert answer["text"].strip()
        assert answer["streamed"] == answer["asynchronous"] == answer["text"]
        for name in ("prompt_tokens", "completion_tokens"):
            assert answer["streamed_usage"][name] == answer["usage"][name] > 0
        assert answer["shaped"]["colour"] in ("red", "green", "blue")
        assert isinstance(answer["shaped"]["warm"], bool)
        assert answer["refused"] == "NotFoundError"

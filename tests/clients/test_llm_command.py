"""The `llm` command, told of the server by a few lines of YAML as its manual says."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.clients.environments import Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients

ASKED = ("-m", "understudy", "-o", "temperature", "0.7", "-o", "seed", "5")
SHORT = ("-o", "max_tokens", "32")
DOG = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "friendly": {"type": "boolean"},
    },
    "required": ["name", "age", "friendly"],
    "additionalProperties": False,
}
"""Closed: a small model that may add properties goes on adding them."""
MODELS = """
- model_id: understudy
  model_name: {model}
  api_base: "http://127.0.0.1:{port}/v1"
  supports_schema: true
"""


@pytest.fixture
def llm(server: Server, model: str, client: Callable[[str], Client]) -> Callable[..., str]:
    command = client("llm")
    (command.home / "extra-openai-models.yaml").write_text(MODELS.format(model=model, port=server.port))

    def run(*arguments: str) -> str:
        return command.run("llm", *arguments, variables={"LLM_USER_PATH": str(command.home)})

    return run


def test_the_same_words_whole_and_streamed(llm: Callable[..., str]) -> None:
    whole = llm("Name two fruits.", *ASKED, *SHORT, "--no-stream")
    assert whole.strip()
    assert llm("Name two fruits.", *ASKED, *SHORT) == whole
    (first, second) = json.loads(llm("logs", "--json"))
    assert first["model"] == second["model"] == "understudy"
    for logged in (first, second):
        assert logged["input_tokens"] == first["input_tokens"] > 0
        assert logged["output_tokens"] == first["output_tokens"] > 0


def test_a_schema(llm: Callable[..., str]) -> None:
    for stream in ((), ("--no-stream",)):
        dog = json.loads(llm("Invent a small dog.", "--schema", json.dumps(DOG), *ASKED, *stream))
        assert set(dog) == set(DOG["required"])
        assert 0 < len(dog["name"]) <= 20
        assert 0 <= dog["age"] <= 20
        assert dog["friendly"] in (True, False)

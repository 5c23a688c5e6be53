"""A draft model from the command line, in every command: what it is refused for, what it costs, and the same words."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.parity.conftest import TEXTS
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_model
from understudy import assembly
from understudy.cli import main
from understudy.commands.verify import own_layers
from understudy.control.cost import CostModel
from understudy.runtime.runner import Runner

Run = Callable[..., tuple[int, str, str]]
COMMANDS = ("generate", "verify", "race", "bench")
NUM_LAYERS = 4
PROMPT = "the cat and the dog and the other one went there then, the cat"
OTHER_TEXT = ["wind und wellen und das weite meer, und der wind und die wellen und das meer am abend"]
CROSS = "note: the draft model: The draft has another vocabulary: it can propose"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts for it, good and bad."""
    folder = tmp_path_factory.mktemp("drafts")
    write_tiny_model(folder / "target", num_hidden_layers=NUM_LAYERS)
    write_tiny_model(folder / "draft", num_hidden_layers=1)
    write_tiny_model(folder / "larger", num_hidden_layers=5)
    write_tiny_model(folder / "truncated", num_hidden_layers=1)
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shutil.copytree(folder / "draft", folder / "foreign")
    other_tokenizer().save(str(folder / "foreign" / "tokenizer.json"))
    lines = [{"prompt": text, "class": "code" if "print" in text else "chat"} for text in TEXTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def other_tokenizer() -> Tokenizer:
    """The special tokens and the bytes of the tiny vocabulary, and merges of another language."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 4,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(OTHER_TEXT, trainer)
    return backend


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Run:
    """Run a command on the target, where more rows cost nothing and drafting little; `--json -` is JSON in each."""

    def cost(runner: Runner) -> CostModel:
        pass_s = 1.0 if runner.decoder.config.num_layers == NUM_LAYERS else 1e-4
        return CostModel({1: pass_s, 256: pass_s})

    monkeypatch.setattr("understudy.assembly.measure_cost", cost)
    work = ("--prompts", folder / "prompts.jsonl")
    start = {
        "generate": ("generate", PROMPT, "--model", folder / "target", "--max-tokens", 24),
        "verify": ("verify", folder / "target", "--budget", "0.001", *work),
        "race": ("race", folder / "target", "--max-tokens", 24, *work),
        "bench": ("bench", folder / "target", "--max-tokens", 16, "--budget", "0.001", *work),
    }

    def run(command: str, *argv: object) -> tuple[int, str, str]:
        if command == "generate":
            argv = tuple(argument for argument in argv if argument != "-")
        code = main([str(argument) for argument in (*start[command], "--threads", 1, *argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("draft", "what"),
    [
        ("foreign", "The draft's tokenizer is not the target's: id 259 is "),
        ("truncated", "model.safetensors is damaged or truncated"),
        ("larger", "The draft larger (0.2 million parameters) is larger than its target target"),
        ("nowhere", "There is no model at"),
    ],
)
def test_a_wrong_draft_is_refused(run: Run, folder: Path, command: str, draft: str, what: str) -> None:
    code, out, err = run(command, "--draft", folder / draft)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert what in err
    assert len(err.splitlines()) == 1


def test_the_first_difference_is_named_on_both_sides(run: Run, folder: Path) -> None:
    _, _, err = run("generate", "--draft", folder / "foreign")
    first = 259  # after three special tokens and 256 bytes the merges begin
    theirs, ours = (
        Tokenizer.from_file(str(folder / name / "tokenizer.json")).id_to_token(first).replace("Ġ", " ")
        for name in ("foreign", "target")
    )
    assert theirs != ours
    assert f"{theirs!r} in the draft and {ours!r} in the target" in err
    assert "--cross-tokenizer" in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("draft", ["layers:0", "layers:4", "layers:99", "layers:", "layers:two", "layers:-1"])
def test_layers_that_are_not_there_are_refused(run: Run, command: str, draft: str) -> None:
    code, out, err = run(command, "--draft", draft)
    assert (code, out) == (2, "")
    assert f"The draft {draft!r} names no layers of its target. Give layers:1 to 3." in err


@pytest.mark.parametrize(
    ("command", "argv", "what"),
    [
        ("generate", ["--drafters", "model"], "--drafters names 'model', but there is no draft model"),
        ("generate", ["--drafters", "suffix,model"], "Name one with --draft"),
        (
            "generate",
            ["--drafters", "suffix", "--draft", "x"],
            "--drafters leaves 'model', or the draft's kind, out",
        ),
        ("generate", ["--cross-tokenizer"], "--cross-tokenizer has a meaning only with --draft"),
        ("verify", ["--cross-tokenizer"], "--cross-tokenizer has a meaning only with --draft"),
        ("race", ["--drafters", "model"], "--drafters names 'model', but there is no draft model"),
        ("race", ["--cross-tokenizer"], "--cross-tokenizer has a meaning only with --draft"),
        ("bench", ["--drafter", "model"], "--drafter model names 'model', but there is no draft model"),
        ("bench", ["--drafter", "suffix+model"], "Name one with --draft"),
        ("bench", ["--drafter", "suffix", "--draft", "x"], "no --drafter uses it"),
        ("bench", ["--cross-tokenizer"], "--cross-tokenizer has a meaning only with --draft"),
    ],
)
def test_what_contradicts_itself_is_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = run(command, *argv)
    assert (code, out) == (2, "")
    assert what in err


@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_do_not_exist_are_refused(run: Run, command: str) -> None:
    code, out, err = run(command, "--weights", "int4")
    assert (code, out) == (2, "")
    assert "invalid choice: 'int4'" in err


# ------------------------------------------------------------------------------------------------ what works


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_draft_changes_a_word(run: Run, folder: Path, weights: str, temperature: int) -> None:
    same = ("--json", "--weights", weights, "--temperature", temperature, "--seed", 5)
    plain = json.loads(run("generate", *same, "--no-speculation")[1])
    for draft in (folder / "draft", "layers:1", "layers:3"):
        for drafters in ((), ("--drafters", "model"), ("--drafters", "suffix,ngram,lookahead,model")):
            value = json.loads(run("generate", *same, "--draft", draft, *drafters)[1])
            assert value["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
            assert value["system_fingerprint"] == plain["system_fingerprint"]


def test_a_fingerprint_knows_the_weights(run: Run) -> None:
    named = {weights: run("generate", "--json", "--weights", weights)[1] for weights in ("fp32", "int8")}
    found = {weights: json.loads(out)["system_fingerprint"] for weights, out in named.items()}
    assert all(name.startswith("fp_") for name in found.values())
    assert found["fp32"] != found["int8"]


def test_speculation_that_is_off_loads_no_draft(run: Run, folder: Path) -> None:
    for off in (("--no-speculation",), ("--drafters", "none")):
        code, _, err = run("generate", "--draft", folder / "truncated", *off)
        assert code == 0
        assert "note:" not in err


def test_compare_with_a_draft(run: Run, folder: Path) -> None:
    code, out, err = run("generate", "--compare", "--draft", folder / "draft", "--drafters", "model")
    assert code == 0
    assert out.rstrip().splitlines()[-2].endswith("yes")
    assert err.count("note: the draft model: ") == 1  # that it is large for its target


def notes_in(command: str, value: dict[str, Any]) -> list[str]:
    """What the JSON of a command tells of its models."""
    notes: list[str] = value["manifest"]["notes"] if command == "bench" else value["notices"]
    return notes


@pytest.mark.parametrize("command", COMMANDS)
def test_a_draft_with_another_vocabulary_works_and_says_what_it_costs(run: Run, folder: Path, command: str) -> None:
    options = ("--draft", folder / "foreign", "--cross-tokenizer", "--json", "-")
    code, out, err = run(command, *options)
    assert code == 0
    assert err.count(CROSS) == 1
    assert "tokens of the target take several draft tokens each" in err
    if command != "generate":
        told = CROSS.removeprefix("note: ")
        assert sum(note.startswith(told) for note in notes_in(command, json.loads(out))) == 1


def test_a_race_names_its_draft(run: Run, folder: Path) -> None:
    code, out, _ = run("race", "--draft", folder / "draft", "--weights", "int8", "--json", "-")
    value = json.loads(out)
    assert code == 0
    assert (value["draft"], value["weights"], value["drafters"]) == ("draft", "int8", ["suffix", "model"])
    assert value["overall"]["accepted_by_drafter"]["model"] > 0
    assert value["system_fingerprint"].startswith("fp_")


def test_a_bench_has_arms_with_and_without_the_draft(run: Run, folder: Path) -> None:
    arms = ("--drafter", "default", "--drafter", "model", "--drafter", "suffix")
    code, out, _ = run("bench", "--draft", folder / "draft", "--weights", "int8", *arms, "--json", "-")
    record = json.loads(out)
    assert code == 0
    manifest = record["manifest"]
    assert manifest["drafters"] == {"default": ["suffix", "model"], "model": ["model"], "suffix": ["suffix"]}
    assert manifest["draft"] == {"name": "draft", "place": str(folder / "draft")}
    assert manifest["system_fingerprint"].startswith("fp_")
    assert manifest["weights"] == "int8"
    memory = {row["drafter"]: row["memory_bytes"] for row in record["rows"]}
    assert memory["default"] == memory["model"]
    assert memory["plain"] == memory["suffix"]
    assert memory["plain"]["draft"] == 0 < memory["model"]["draft"]
    assert memory["plain"]["kv"] * 5 == memory["model"]["kv"] * 4  # four layers, and one more
    assert all(row["identical"] for row in record["rows"])
    accepted = {row["drafter"]: row["acceptance_rate"] for row in record["rows"] if row["class"] == "all"}
    assert accepted["model"] > 0


# ------------------------------------------------------------------------------------------------ verify


def test_verify_drafts_with_its_own_layers_where_no_draft_is_named(run: Run, folder: Path) -> None:
    code, out, _ = run("verify", "--json", "-")
    value = json.loads(out)
    (line,) = value["settings"].values()
    assert code == 0
    assert value["draft"] == "target, its first 3 layers"
    assert line["accepted_by_drafter"]["model"] > 0
    assert line["scout_rows"] > 0
    code, out, _ = run("verify", "--json", "-", "--draft", folder / "draft")
    assert code == 0
    assert json.loads(out)["draft"] == "draft"


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 1), (3, 2), (4, 3), (12, 11), (30, 27)])
def test_how_many_layers_draft_for_a_model(num_layers: int, expected: int) -> None:
    assert own_layers(num_layers) == expected


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_verify_can_be_restricted_to_one_kind_of_weights(run: Run, weights: str) -> None:
    code, out, _ = run("verify", "--json", "-", "--weights", weights, "--budget", 100, "--max-tokens", 48)
    value = json.loads(out)
    assert code == 0
    assert value["weights"] == list(value["system_fingerprints"]) == [weights]
    assert {line["weights"] for line in value["settings"].values()} == {weights}
    assert value["cut"] == []
    assert len(value["settings"]) >= 15


def test_only_one_target_is_in_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind of weights is loaded when its turn comes, and the first is gone by then."""
    load_target = assembly.load_target
    decoders_of: dict[str, weakref.ref[Any]] = {}

    def watched(*args: Any, **options: Any) -> assembly.Target:
        gc.collect()
        assert not [name for name, decoder in decoders_of.items() if decoder() is not None]
        target = load_target(*args, **options)
        decoders_of[target.weights] = weakref.ref(target.decoder)
        return target

    monkeypatch.setattr("understudy.assembly.load_target", watched)
    code, out, _ = run("verify", "--json", "-", "--budget", 100, "--max-tokens", 48)
    value = json.loads(out)
    assert code == 0
    assert list(decoders_of) == value["weights"] == ["int8", "fp32"]
    assert value["cut"] == value["vacuous"] == []
    names = [line["weights"] for line in value["settings"].values()]
    assert names == sorted(names, reverse=True)


def test_a_model_of_one_layer_needs_a_draft_that_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    single = write_tiny_model(tmp_path / "single", num_hidden_layers=1)
    argv = ["verify", str(single), "--threads", "1", "--prompts", str(folder / "prompts.jsonl"), "--budget", "0.001"]
    assert main(argv) == 2
    assert "The drafter 'model' has no model. Name one with --draft" in capsys.readouterr().err

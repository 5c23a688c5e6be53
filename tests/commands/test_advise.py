"""`understudy advise`, from the command line to the policy that `serve` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny_model
from understudy.advise.study import AT_ONCE
from understudy.cli import main
from understudy.commands.result import FAILED, INTERRUPTED
from understudy.control.policy_file import read_policy

Run = Callable[..., tuple[int, str, str]]
TEXTS = {
    "chat": "the cat and the dog and the other one went there then, the cat and the dog",
    "code": "for index in range(10):\n    print(index)\nfor other in range(10):\n    print(other)\n",
}
SMALL = ("--threads", 1, "--max-tokens", 16, "--budget", 2, "--concurrency", "1,2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"class": name, "prompt": text + " " * i} for name, text in TEXTS.items() for i in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["advise", *(str(argument) for argument in argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def test_numbers_alone(run: Run) -> None:
    code, out, _ = run("--acceptance", 0.6, "--cost-ratio", 0.1)
    assert code == 0
    assert "Draft 3 words ahead: 1.67 times the speed" in out
    assert "It pays from an acceptance of 0.10 on" in out
    assert "(-0.1)" in out


def test_numbers_that_do_not_pay(run: Run) -> None:
    code, out, _ = run("--acceptance", 0.3, "--cost-ratio", 0.4)
    assert code == 0
    assert "Do not speculate" in out
    assert "It pays" not in out
    code, out, _ = run("--acceptance", 0.9, "--cost-ratio", 0.1, "--row-cost", 1.5)
    assert "at no acceptance" in out


def test_numbers_of_memory_and_batch(run: Run) -> None:
    code, out, _ = run(
        *("--acceptance", "0.8,0.7,0.6", "--draft-bytes", "4e9", "--target-bytes", "14e9", "--depth", 6),
        *("--kv-bytes-per-token", 131072, "--context", 4096, "--row-cost", 0.1, "--batch", "1,8,64", "--json", "-"),
    )
    assert code == 0
    record = json.loads(out)
    assert record["question"]["cost"]["cost_ratio"] == pytest.approx(4 / 14)
    assert [at["batch"] for at in record["batches"]] == [1, 8, 64]
    advice = " ".join(record["advice"])
    assert "29% of its target's size" in advice
    assert "7.5 sequences of 4,096 tokens" in advice
    assert "From a batch of 64 on, do not speculate" in advice
    assert "At a depth of 6" in advice
    _, out, _ = run("--acceptance", 0.8, "--cost-ratio", 0.1, "--batch", "1,8")
    assert "give --row-cost" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--acceptance", "1.2"), "--acceptance"),
        (("--acceptance", "nan"), "--acceptance"),
        (("--acceptance", ""), "--acceptance"),
        (("--acceptance", "much"), "--acceptance"),
        (("--acceptance", "0.5", "--cost-ratio", "-1"), "--cost-ratio"),
        (("--acceptance", "0.5", "--cost-ratio", "nan"), "--cost-ratio"),
        (("--acceptance", "0.5", "--depth", "65"), "--depth"),
        (("--acceptance", "0.5", "--batch", "0"), "--batch"),
        (("--acceptance", "0.5", "--context", "9"), "--draft-bytes"),
        (("--acceptance", "0.5", "--draft-bytes", "0"), "--draft-bytes"),
        (("--acceptance", "0.5", "--prompts", "x"), "--prompts"),
        (("model", "--acceptance", "0.5"), "MODEL"),
        (("--cost-ratio", "0.5"), "--cost-ratio"),
        (("--concurrency", "0"), "--concurrency"),
        (("--temperature", "-1"), "temperature"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--budget", "0"), "--budget"),
        (("--policy", "-"), "--policy"),
        (("--policy", "/nowhere/x"), "/nowhere/x"),
        (("--policy", "same", "--json", "same"), "same file"),
        (("--classes", "poetry"), "poetry"),
        (("--prompts", "/nowhere/x"), "/nowhere/x"),
        (("--cross-tokenizer",), "--cross-tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(
    run: Run, argv: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.commands.advise.load", lambda *_, **__: pytest.fail("a model was loaded"))
    code, _, err = run(*argv)
    assert code == FAILED
    assert said in err


def test_a_model_with_a_draft(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    policy, record_file = tmp_path / "policy.json", tmp_path / "advice.json"
    code, out, err = run(
        *(model, "--draft", "layers:1", "--prompts", prompts, *SMALL, "--temperature", "0,1"),
        *("--policy", policy, "--json", record_file),
    )
    assert code == 0
    assert "asking the target" in err
    for line in ("temperature 0, 1 at once", "temperature 1, 2 at once"):
        assert line in out
    assert "more memory for the draft's cache" in out
    record: dict[str, Any] = json.loads(record_file.read_text())
    cases = [(case["class"], case["temperature"], case["concurrency"]) for case in record["advice"]]
    assert len(cases) == len(set(cases)) == 8
    for case in record["advice"]:
        names = {candidate["drafter"] for candidate in case["candidates"]}
        assert names == {"suffix", "ngram", "model", "suffix+model"}
        assert {c["depth"] for c in case["candidates"] if c["drafter"] == "ngram"} == {1, 2, 3, 4, 6, 8, 12, 16}
        assert case["candidates"][0]["speedup"] == max(c["speedup"] for c in case["candidates"])
        assert case["answers"] == 2
    assert record["answers"] == 8
    assert record["draft_cost"]["rows_s"]
    read = read_policy(policy)
    assert set(read.classes) == {"chat", "code"}
    assert read.system_fingerprint == record["system_fingerprint"]
    for name, of_class in read.classes.items():
        assert of_class.enabled == any(case["speculate"] for case in record["advice"] if case["class"] == name)
        assert of_class.reason


def test_memory_of_a_draft_with_weights_of_its_own(run: Run, model: Path, prompts: Path) -> None:
    """The target as its own draft: as large as it may be, and always right where words are not drawn."""
    code, out, err = run(model, "--draft", model, "--prompts", prompts, *SMALL, "--concurrency", 1, "--json", "-")
    assert code == 0
    record = json.loads(out)
    assert record["memory"]["sequences_displaced"] > 0
    assert "100% of its target's size" in err
    assert "sequences of" in err, "what the draft's memory would have held"
    of_model = [c for case in record["advice"] for c in case["candidates"] if c["drafter"] == "model"]
    assert max(candidate["acceptance"] for candidate in of_model) > 0.5


def test_time_that_is_up(run: Run, model: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    lines = [{"class": name, "prompt": TEXTS["chat"] + name} for name in ("a", "b", "c", "d", "e") for _ in range(4)]
    many.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = run(model, "--prompts", many, *SMALL, "--budget", 0.001, "--json", "-")
    assert code == 0
    record = json.loads(out)
    # a thousandth of a second may be up while the first are still being asked, after one of each class at the earliest
    assert 5 <= record["answers"] <= AT_ONCE, "those that were being answered when the time was up"
    assert {case["class"] for case in record["advice"]} == {"a", "b", "c", "d", "e"}, "one of each class at least"
    assert any(f"{record['answers']} of 20 prompts were answered" in note for note in record["notes"])


def test_interruption_leaves_what_there_is(
    run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from understudy.advise import collect

    kept = collect._keep

    def keep_one(collected: collect.Collected, *details: Any) -> None:
        kept(collected, *details)
        raise KeyboardInterrupt

    monkeypatch.setattr(collect, "_keep", keep_one)
    code, out, _ = run(model, "--prompts", prompts, *SMALL, "--json", tmp_path / "a.json")
    assert code == INTERRUPTED
    assert "interrupted" in out
    assert json.loads((tmp_path / "a.json").read_text())["answers"] == 1


def test_interruption_before_anything_was_said(
    run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("understudy.advise.collect._serve", interrupted)
    code, out, _ = run(model, "--prompts", prompts, *SMALL, "--policy", tmp_path / "p.json")
    assert code == INTERRUPTED
    assert not out
    assert not (tmp_path / "p.json").exists()

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.parity.broken import FailingDrafter, believing_walk
from tests.parity.conftest import TEXTS
from tests.tiny_models import write_tiny_model
from understudy.bench.prompts import Prompt
from understudy.cli import main
from understudy.commands.race import choose_prompts
from understudy.control.cost import CostModel
from understudy.errors import ConfigError
from understudy.race.lanes import Heat, Lane, run_heat

Run = Callable[..., tuple[int, str, str]]
TALLY_KEYS = {
    "prompts",
    "tokens",
    "plain_s",
    "speculative_s",
    "plain_tokens_per_s",
    "speculative_tokens_per_s",
    "speed_up",
    "drafted",
    "accepted",
    "accepted_by_drafter",
    "cycles",
    "tokens_per_cycle",
    "same_text",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("race") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": text, "class": "code" if "print" in text else "chat"} for text in TEXTS]
    lines.append({"prompt": "the cat and the dog " * 400, "class": "long"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def race(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, prompts: Path) -> Run:
    """Run a race on the tiny model, where every draft is bought; return the exit code, the output and the errors."""
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: CostModel({1: 1.0, 256: 1.0}))

    def run(*argv: object) -> tuple[int, str, str]:
        options = ("--prompts", prompts, "--threads", 1, "--max-tokens", 24)
        code = main([str(argument) for argument in ("race", model, *options, *argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def test_where_there_is_no_terminal_lines_and_a_table(race: Run) -> None:
    code, out, err = race("--num-prompts", 2)
    lines = out.splitlines()
    assert code == 0
    assert [line.split(":")[0] for line in lines[:4]] == ["chat", "code", "chat", "code"]
    assert all(line.endswith("same text") for line in lines[:4])
    assert "1 prompts are longer" in lines[4]
    assert [line.split()[-1] for line in lines if line.startswith(("chat ", "code "))] == ["yes", "yes"]
    assert lines[-1].startswith("Same text, ")
    assert "over 4 prompts" in lines[-1]
    assert "\x1b" not in out
    assert err == ""


def test_json_is_the_table(race: Run, tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    code, _, _ = race("--json", file, "--drafters", "suffix,ngram", "--temperature", 0.5, "--seed", 9)
    value = json.loads(file.read_text())
    assert code == 0
    assert set(value) == {
        "classes",
        "overall",
        "model",
        "draft",
        "weights",
        "system_fingerprint",
        "drafters",
        "temperature",
        "seed",
        "max_tokens",
        "prompts_left_out",
        "fallbacks",
        "notices",
        "errors",
        "interrupted",
        "version",
    }
    assert list(value["classes"]) == ["chat", "code"]
    assert all(set(tally) == TALLY_KEYS for tally in (*value["classes"].values(), value["overall"]))
    assert value["overall"]["tokens"] == sum(tally["tokens"] for tally in value["classes"].values()) > 0
    assert value["overall"]["accepted"] == sum(value["overall"]["accepted_by_drafter"].values()) > 0
    assert (value["seed"], value["temperature"], value["drafters"]) == (9, 0.5, ["suffix", "ngram"])
    assert value["prompts_left_out"] == 1


def test_json_can_go_to_the_output(race: Run) -> None:
    code, out, err = race("--json", "-", "--classes", "code")
    assert code == 0
    assert list(json.loads(out)["classes"]) == ["code"]
    assert "Same text" in err


def test_different_words_are_told(race: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.sampling.verify.walk", believing_walk)
    code, out, _ = race("--classes", "code", "--temperature", 2, "--max-tokens", 64, "--num-prompts", 2)
    assert code == 1
    assert "NOT the same text" in out.splitlines()[-1]


@pytest.mark.parametrize("as_terminal", [False, True])
def test_an_interrupted_race_shows_what_was_finished(
    race: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_terminal: bool
) -> None:
    file = tmp_path / "race.json"
    written = io.StringIO()

    def interrupted(heat: Heat, on_frame: Callable[[Heat], None]) -> None:
        if heat.number == 2:
            raise KeyboardInterrupt
        run_heat(heat, on_frame)

    monkeypatch.setattr("understudy.race.lanes.run_heat", interrupted)
    monkeypatch.setattr(
        "understudy.commands.race.make_console",
        lambda stderr: Console(file=written, width=80, height=24, force_terminal=as_terminal, highlight=False),
    )
    code, _, _ = race("--json", file)
    shown = written.getvalue()
    assert code == 130
    assert "Interrupted: 1 of 2 prompts were finished." in shown
    assert ("\x1b[?1049l" in shown) == as_terminal
    assert shown.rindex("Interrupted") > shown.rfind("\x1b[?1049l"), "said after the screen is given back"
    assert list(json.loads(file.read_text())["classes"]) == ["chat"]


def test_a_race_that_ends_before_the_first_prompt_has_no_table(race: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Lane, limit_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("understudy.race.lanes.Lane.run_until", interrupted)
    code, out, _ = race()
    assert (code, out.splitlines()[-1]) == (130, "Interrupted: 0 of 2 prompts were finished.")
    assert "speculative" not in out


def test_a_model_that_computes_nonsense_is_an_error(race: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_finite(self: object, logits: object, **how: object) -> int:
        raise FloatingPointError("the model's logits are not finite")

    monkeypatch.setattr("understudy.sampling.processors.Sampler.sample", not_finite)
    code, out, _ = race()
    assert code == 2
    assert "not finite" in out


def test_a_drafter_that_fails_is_told(race: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.assembly.make_drafter", lambda *name, **room: FailingDrafter())
    code, out, _ = race("--num-prompts", 4)
    assert code == 0
    assert "fallback  drafter ngram: left out of this step: RuntimeError: no more" in out


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--seed", "-1"], "seed is -1"),
        (["--drafters", "none"], "needs somebody who drafts"),
        (["--drafters", "oracle"], "no drafter named 'oracle'"),
        (["--classes", "poetry"], "No prompt is of the class 'poetry'"),
        (["--classes", ""], "No prompt is of the class ''"),
        (["--threads", "0"], "num_threads is 0"),
        (["--json", "/no/such/folder/out.json"], "cannot be written"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(
    race: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = race(*argv)
    assert (code, out) == (2, "")
    assert what in err


def test_nothing_that_fits_is_refused(race: Run) -> None:
    code, _, err = race("--classes", "long")
    assert code == 2
    assert "None of the 1 prompts fits" in err


def test_prompts_are_chosen_by_class_in_turn() -> None:
    prompts = [Prompt(name, text=f"{name}{number}") for name in ("a", "b", "c") for number in range(3)]
    chosen = choose_prompts(prompts, classes=["c", "a"], per_class=2)
    assert [prompt.text for prompt in chosen] == ["c0", "a0", "c1", "a1"]
    assert len(choose_prompts(prompts, classes=None, per_class=9)) == 9
    with pytest.raises(ConfigError, match="Choose from a, b, c"):
        choose_prompts(prompts, classes=["d"], per_class=1)

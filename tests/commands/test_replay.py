"""`understudy replay`, from requests that an engine served, through records, to the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import new_engine, steps
from tests.tiny_models import write_tiny_model
from tests.trained_drafts import write_draft
from understudy.assembly import Target, load_target
from understudy.cli import main
from understudy.core.request import Grammar, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.drafters.suffix import SuffixDrafter
from understudy.engine.engine import Engine
from understudy.server.exchange import Caller, Exchange
from understudy.server.record import Recorder, record_files

Run = Callable[..., tuple[int, str, str]]
STEPS = ("--steps-ms", "1=10,4=11,8=13,32=30")
DEPTH = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=5, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return load_target(model, num_threads=1)


def requests() -> list[Request]:
    """Two classes: one says the same again and again, one is all noise."""
    found = []
    for number in range(6):
        say_again = SamplingParams(temperature=0.0, max_tokens=40, seed=1, logit_bias={7: 30.0}, ignore_eos=True)
        noise = SamplingParams(temperature=5.0, max_tokens=30, seed=number, ignore_eos=True, n=2)
        for name, sampling in (("again", say_again), ("noise", noise)):
            found.append(
                Request(
                    request_id=f"{name}{number}",
                    prompt_ids=tuple(range(5 + number, 15 + number)),
                    sampling=sampling,
                    speculation=Speculation(forced=True, max_depth=DEPTH, drafter="suffix"),
                    workload_class=name,
                )
            )
    return found


def record(engine: Engine, requests: Sequence[Request], directory: Path) -> dict[str, SpeculationCounts]:
    """Serve one after the other, as a server would write it down; return what was counted, by class."""
    counted: dict[str, SpeculationCounts] = {}
    recorder = Recorder(directory, max_bytes=1 << 24, max_age_s=1000.0)
    for request in requests:
        exchange = Exchange(request, Caller(), "chat")
        exchange.answers = {}
        exchange.admitted_s = exchange.arrived_s
        engine.submit(request)
        for outputs in steps(engine):
            for output in outputs:
                exchange.saw(output)
        exchange.outcome, exchange.ended_s = "finished", exchange.last_s
        for facts in exchange.facts:
            counted.setdefault(request.workload_class, SpeculationCounts()).add(facts.counts)
        recorder.ended(exchange)
    recorder.close()
    return counted


@pytest.fixture(scope="module")
def recorded(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, SpeculationCounts]]:
    directory = tmp_path_factory.mktemp("records")
    return directory, record(new_engine(target, drafters=[SuffixDrafter()]), requests(), directory)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["replay", *(str(argument) for argument in argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def found(run: Run, *argv: object) -> dict[str, Any]:
    code, out, _ = run(*argv, "--json", "-")
    assert code == 0
    value: dict[str, Any] = json.loads(out)
    return value


def rows(value: dict[str, Any], name: str, drafter: str) -> dict[int | None, dict[str, Any]]:
    chosen = [row for row in value["rows"] if (row["workload_class"], row["drafter"]) == (name, drafter)]
    return {row["depth"]: row for row in chosen}


def test_replay_finds_what_the_engine_counted(run: Run, recorded: tuple[Path, dict[str, SpeculationCounts]]) -> None:
    directory, counted = recorded
    value = found(run, directory, *STEPS, "--drafter", "suffix", "--depth", f"0,{DEPTH}")
    for name, counts in counted.items():
        row = rows(value, name, "suffix")[DEPTH]
        for key in ("cycles", "drafted", "accepted"):
            assert row[key] == getattr(counts, key)
        assert counts.drafted > 0
    assert counted["again"].accepted > 100
    told = {entry["class"]: entry for entry in value["classes"]}
    assert told["again"]["recorded"]["accepted"] == counted["again"].accepted
    assert told["noise"]["num_requests"] == 6
    assert told["noise"]["num_tokens"] == 6 * 2 * 30, "every choice counts"
    assert rows(value, "all", "suffix")[0]["tokens_per_cycle"] == 1.0
    assert rows(value, "again", "suffix")[0]["speedup"]["value"] == pytest.approx(1.0, abs=0.02)


def test_tables_say_what_pays_and_what_does_not(run: Run, recorded: tuple[Path, object]) -> None:
    code, out, err = run(recorded[0], *STEPS, "--depth", "2,8", "--drafter", "default", "--drafter", "ngram")
    assert (code, err) == (0, "")
    again, noise = out.index("again: 6 requests, 240 tokens; at the time"), out.index("noise: 6 requests")
    assert "best" in out[again:noise]
    assert re.search(r"^ngram at depth 8$", out[again:noise], re.MULTILINE) or "left to the engine" in out[again:noise]
    assert "do not speculate" in out[noise : out.index("all: 12 requests")]
    assert "acceptance and tokens per cycle are exact" in out
    assert "Time is modelled" in out


def test_a_trained_draft_is_left_out_and_that_is_told(
    run: Run, target: Target, model: Path, recorded: tuple[Path, object], tmp_path: Path
) -> None:
    draft = write_draft(tmp_path / "mine", "medusa", target)
    value = found(run, recorded[0], model, "--threads", 1, "--draft", draft, "--depth", "2", "--classes", "again")
    (note,) = [note for note in value["notes"] if "trained draft" in note]
    assert note.startswith("The trained draft mine is left out of the table: it guesses from hidden states")
    assert {row["drafter"] for row in value["rows"]} == {"suffix", "ngram"}
    assert rows(value, "again", "suffix")[2]["drafted"] > 0


def test_model_is_measured_and_its_draft_is_scored(run: Run, model: Path, recorded: tuple[Path, object]) -> None:
    value = found(run, recorded[0], model, "--threads", 1, "--draft", "layers:1", "--depth", "2", "--classes", "again")
    assert {row["workload_class"] for row in value["rows"]} == {"again"}
    assert {row["drafter"] for row in value["rows"]} == {"suffix+model", "suffix", "ngram", "model"}
    assert rows(value, "again", "model")[2]["drafted"] > 0
    assert rows(value, "again", "model")[2]["speedup"]["value"] > 0
    assert "1" in value["pass_ms"]


def test_history_is_shared_by_classes_that_are_not_shown(run: Run, target: Target, tmp_path: Path) -> None:
    """The second request says what the first one said, under another name: all but its beginning is foreseen."""
    sampling = SamplingParams(temperature=1.0, max_tokens=30, seed=4, ignore_eos=True)
    first = Request(request_id="1", prompt_ids=(5, 6, 7), sampling=sampling, workload_class="first")
    record(new_engine(target), [first, replace(first, request_id="2", workload_class="second")], tmp_path)
    value = found(run, tmp_path, *STEPS, "--drafter", "suffix", "--depth", "8", "--classes", "second")
    assert {row["workload_class"] for row in value["rows"]} == {"second"}
    assert rows(value, "second", "suffix")[8]["accepted"] > 20


def test_what_cannot_be_replayed_is_told(run: Run, target: Target, tmp_path: Path) -> None:
    first, second = requests()[:2]
    bound = replace(first, request_id="b", sampling=replace(first.sampling, grammar=Grammar("regex", "[a-z ]{1,20}")))
    record(new_engine(target, drafters=[SuffixDrafter()]), [first, second, bound], tmp_path)
    (path,) = record_files(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"run": "torn')
    value = found(run, tmp_path, *STEPS, "--depth", "2")
    notes = "\n".join(value["notes"])
    assert "1 lines are no records" in notes
    assert "1 answers were left out where the engine decides: bound by a grammar" in notes
    assert "too few texts" in run(tmp_path, *STEPS, "--depth", "2")[1]


def test_records_without_counts_say_so(run: Run, recorded: tuple[Path, object], tmp_path: Path) -> None:
    (path,) = record_files(recorded[0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["speculation"]
    (tmp_path / path.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "is not in all of the records" in run(tmp_path, *STEPS, "--depth", "2", "--drafter", "ngram")[1]


def test_spent_budget_is_told(run: Run, recorded: tuple[Path, object]) -> None:
    value = found(run, recorded[0], *STEPS, "--budget", "0.000001")
    assert value["rows"] == []
    assert "The budget left no time for ngram, depth 8." in value["notes"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--depth", "x"), "--depth is 'x'"),
        (("--depth", "65"), "from 0 to 64"),
        (("--concurrency", "0"), "--concurrency is '0'"),
        (("--drafter", "lookahead"), "lookahead cannot be replayed: it learns from rows"),
        (("--drafter", "eagle"), "eagle cannot be replayed: it guesses from hidden states of the target"),
        (("--drafter", "nobody"), "There is no drafter named 'nobody'"),
        (("--drafter", "model"), "there is no draft model"),
        (("--classes", "poems"), "No record is of class 'poems'"),
        (("--steps-ms", "1=2"), "lacks the time"),
        (("--steps-ms", "1=2,4=fast"), "'4=fast' is no number of rows"),
        (("--budget", "nan"), "--budget is nan"),
    ],
)
def test_bad_options_are_refused(
    run: Run, recorded: tuple[Path, object], options: tuple[str, ...], expected: str
) -> None:
    code, _, err = run(recorded[0], *STEPS, *options)
    assert code == 2
    assert expected in err


def test_bad_folders_and_models_are_refused(
    run: Run, recorded: tuple[Path, object], model: Path, tmp_path: Path
) -> None:
    code, _, err = run(tmp_path / "nowhere", *STEPS)
    assert (code, "There is no folder" in err) == (2, True)
    code, _, err = run(tmp_path, *STEPS)
    assert (code, "There are no records in" in err) == (2, True)
    (path,) = record_files(recorded[0])
    text = path.read_text().replace('"prompt_ids":[5,', '"prompt_ids":[5000,')
    (tmp_path / path.name).write_text(text)
    code, _, err = run(tmp_path, model, "--threads", 1)
    assert (code, "The records hold token 5000" in err) == (2, True)

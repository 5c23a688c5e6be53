"""`understudy bench`, from the command line to the record."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_server import Behaviour, fake_server
from tests.parity.broken import believing_walk
from tests.tiny_models import write_tiny_model
from understudy.cli import main
from understudy.control.cost import CostModel
from understudy.control.policy import Decision, StatedOffers

Run = Callable[..., tuple[int, str, str]]
ONE_ROUND = ("--budget", "0.001", "--max-tokens", "16")
TEXTS = {
    "chat": "the cat and the dog and the other one went there then, the cat and the dog",
    "code": "for index in range(10):\n    print(index)\nfor other in range(10):\n    print(other)\n",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"class": name, "prompt": text + " " * i} for name, text in TEXTS.items() for i in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["bench", *(str(argument) for argument in argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def measure(run: Run, model: Path, prompts: Path) -> Callable[..., dict[str, Any]]:
    """Run one round on the tiny model and return the record."""

    def measure(*argv: object, expected: int = 0) -> dict[str, Any]:
        code, out, _ = run(model, "--threads", 1, "--prompts", prompts, "--json", "-", *ONE_ROUND, *argv)
        assert code == expected
        record: dict[str, Any] = json.loads(out)
        return record

    return measure


def rows(record: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in record["rows"]]


def test_a_run_on_our_engine(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "bench.json"
    code, out, err = run(model, "--threads", 1, "--prompts", prompts, "--json", out_file, *ONE_ROUND)
    assert code == 0
    assert err == ""
    assert "default against plain, temperature 0, 1 at once" in out
    assert "single round" in out
    assert "GB/s" in out
    for drafter in ("plain", "default"):
        assert re.search(rf"a cycle of {drafter}: [\d.]+ ms \(draft [\d.]+, verify [\d.]+, .*\), [\d.]+ GB/s", out)
    record = json.loads(out_file.read_text())
    assert list(record) == ["manifest", "rows"]
    assert rows(record, "class", "drafter") == [
        (name, drafter) for name in ("chat", "code", "all") for drafter in ("plain", "default")
    ]
    for row in record["rows"]:
        assert row["identical"] is True
        assert row["tokens_per_s"] > 0
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["weights"], row["numerics"]) == ("int8", "exact")
        assert 0 < row["ttft_ms"]["p50"] <= row["request_ms"]["p50"]
        assert row["bandwidth_gb_s"] > 0
    assert record["rows"][-2]["acceptance_rate"] is None
    manifest = record["manifest"]
    assert manifest["model"]["name"] == "tiny"
    assert manifest["rounds"] == 1
    assert manifest["requests"] == 4
    assert manifest["drafters"] == {"default": ["suffix"]}
    assert len(manifest["prompts"]["sha256"]) == 64
    assert manifest["prompts"]["by_class"] == {"chat": 3, "code": 3}
    assert manifest["errors"] == {"count": 0, "messages": []}
    assert len(manifest["samples"]) == len(manifest["cycle_time"]) == len(record["rows"])
    assert {"hardware", "versions", "commit", "seeds", "settings", "definitions", "started"} < set(manifest)


def test_a_gpu_is_part_of_the_hardware(measure: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpu" not in measure()["manifest"]["hardware"]
    monkeypatch.setattr("understudy.target.device_facts", lambda device: {"gpu": f"of {device}"})
    hardware = measure()["manifest"]["hardware"]
    assert hardware["gpu"] == "of cpu"
    assert hardware["cpu"]


def test_drafters_temperatures_and_concurrencies_make_rows(measure: Callable[..., dict[str, Any]]) -> None:
    record = measure(
        *("--drafter", "suffix", "--drafter", "suffix+ngram"),
        *("--temperature", "0,1", "--concurrency", "1,3", "--classes", "chat"),
    )
    assert rows(record, "class", "temperature", "concurrency", "drafter") == [
        (name, temperature, concurrency, drafter)
        for temperature in (0.0, 1.0)
        for concurrency in (1, 3)
        for name in ("chat", "all")
        for drafter in ("plain", "suffix", "suffix+ngram")
    ]
    assert all(identical for (identical,) in rows(record, "identical"))
    assert record["manifest"]["requests"] == 2 * (1 + 3 * 3) * 3


def test_more_time_makes_more_rounds_and_an_interval(measure: Callable[..., dict[str, Any]]) -> None:
    record = measure("--budget", 1.5, "--num-prompts", 2)
    assert record["manifest"]["rounds"] > 2
    last = record["rows"][-1]
    assert last["speedup_low"] < last["speedup"] < last["speedup_high"]
    assert record["manifest"]["notes"] == []


def test_an_open_loop(measure: Callable[..., dict[str, Any]]) -> None:
    record = measure("--arrivals", "poisson", "--rate", 200, "--num-requests", 5)
    assert rows(record, "concurrency") == [(None,)] * 6
    assert record["manifest"]["requests"] == 2 * 2 * 5
    assert [len(sample["ttft_ms"]) for sample in record["manifest"]["samples"]] == [5, 5, 5, 5, 10, 10]


def test_an_open_loop_makes_a_page(measure: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    measure("--arrivals", "poisson", "--rate", 200, "--num-requests", 2, "--html", tmp_path / "page.html")
    assert "in an open loop" in (tmp_path / "page.html").read_text()


def test_a_round_beyond_the_budget_is_told(measure: Callable[..., dict[str, Any]]) -> None:
    assert any("more than the budget of 0.001 s" in note for note in measure()["manifest"]["notes"])


def test_a_reader_who_leaves_does_not_cost_the_record(
    run: Run, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(*args: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("understudy.bench.report.show", left)
    file = tmp_path / "bench.json"
    code, _, _ = run(model, "--threads", 1, "--prompts", prompts, "--json", file, *ONE_ROUND)
    assert code == 141
    assert len(json.loads(file.read_text())["rows"]) == 6


def test_a_class_may_not_be_called_like_the_sum(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"class": "all", "prompt": "cat"}))
    code, _, err = run("--prompts", file, *ONE_ROUND)
    assert code == 2
    assert "A class of prompts is called 'all'" in err


def test_a_trace(measure: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "class": "chat"}, {"timestamp": 60_000, "class": "code", "output_length": 4}]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = measure("--arrivals", "trace", "--trace", trace)
    assert rows(record, "class", "drafter") == [
        (name, drafter) for name in ("mixed", "all") for drafter in ("plain", "default")
    ]
    assert record["manifest"]["duration_s"] < 30, "nobody sleeps until a request is due"


def buying_all(offers: StatedOffers, *_: object, **__: object) -> Decision:
    return Decision([list(range(len(draft))) for draft in offers.drafts], "all of them")


def test_a_broken_engine_is_found(
    measure: Callable[..., dict[str, Any]], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.sampling.verify.walk", believing_walk)
    free = CostModel({1: 1.0, 256: 1.0})  # rows cost nothing and promise much, so every draft is bought
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: free)
    monkeypatch.setattr("understudy.engine.buying.decide", buying_all)
    record = measure("--temperature", 2, "--seed", 1, "--max-tokens", 64, expected=1)
    assert rows(record, "drafter", "identical")[-2:] == [("plain", True), ("default", False)]


def test_an_interruption_keeps_what_was_measured(
    run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from understudy.bench import run as bench_run

    serve, served = bench_run.serve_in_step, []

    def interrupted(*args: Any) -> None:
        served.append(args)
        if len(served) == 2:
            raise KeyboardInterrupt
        serve(*args)

    monkeypatch.setattr(bench_run, "serve_in_step", interrupted)
    argv = (model, "--threads", 1, "--prompts", prompts, "--json", "-", *ONE_ROUND)
    code, out, err = run(*argv)
    record = json.loads(out)
    assert code == 130
    assert rows(record, "class", "drafter")[0] == ("chat", "plain")
    assert len(record["rows"]) == 4
    assert record["manifest"]["interrupted"] is True
    assert "interrupted" in err
    served[:] = [None]
    assert run(*argv)[:2] == (130, ""), "nothing was measured, so nothing is written"


def test_a_page_is_written_from_the_record(
    run: Run, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = types.ModuleType("understudy.bench.page")
    page.write_page = lambda record, path: path.write_text(f"{len(record['rows'])} rows")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "understudy.bench.page", page)
    file = tmp_path / "page.html"
    code, _, _ = run(model, "--threads", 1, "--prompts", prompts, "--html", file, *ONE_ROUND)
    assert code == 0
    assert file.read_text() == "6 rows"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--budget", "nan"], "--budget is nan"),
        (["--budget", "0"], "--budget is 0"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--threads", "-1"], "--threads is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--temperature", "warm"], "--temperature is 'warm'"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--temperature", ","], "--temperature is ','"),
        (["--concurrency", "1,0"], "--concurrency is 0"),
        (["--concurrency", "1.5"], "--concurrency is '1.5'"),
        (["--concurrency", "100000"], "--concurrency is 100000"),
        (["--drafter", "oracle"], "no drafter named 'oracle'"),
        (["--drafter", "plain"], "no drafter named 'plain'"),
        (["--drafter", "suffix+suffix"], "named twice"),
        (["--rate", "2"], "--rate and --arrivals poisson belong together"),
        (["--arrivals", "poisson"], "--rate and --arrivals poisson belong together"),
        (["--arrivals", "poisson", "--rate", "0"], "--rate is 0"),
        (["--arrivals", "poisson", "--rate", "1", "--concurrency", "2"], "--concurrency has a meaning only"),
        (["--arrivals", "trace"], "--trace and --arrivals trace belong together"),
        (["--num-requests", "3"], "--num-requests has a meaning only"),
        (["--json", "/no/such/folder/out.json"], "cannot be written"),
        (["--html", "/"], "cannot be written"),
        (["--html", "-"], "--html needs the name of a file"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
        (["x", "--model", "y"], "MODEL and --model contradict"),
        (["x", "--url", "http://host"], "MODEL and --url contradict"),
        (["--baseline-url", "http://host"], "--baseline-url has a meaning only with --url"),
        (["--plain-by-field"], "--plain-by-field has a meaning only with --url"),
        (["--url", "http://host", "--drafter", "suffix"], "--drafter has a meaning only on our own engine"),
        (["--url", "http://host", "--threads", "2"], "--threads has a meaning only on our own engine"),
        (["--url", "http://host", "--baseline-url", "http://b", "--plain-by-field"], "contradict"),
        (["--url", "http://host", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["--url", "http://host", "--api-key-env", "BAD_KEY"], "BAD_KEY holds a character"),
        (["--trace-unit", "s"], "--trace-unit has a meaning only"),
        (["--arrivals", "trace", "--trace", "/no/such/trace"], "/no/such/trace cannot be read"),
        (["--classes", "law"], "no prompts of class 'law'"),
        (["--json", "same", "--html", "./same"], "name the same file"),
        (["--url", "host"], "'host' is no URL of a server"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "cannot be reached"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    monkeypatch.setenv("BAD_KEY", "hidden\r")
    code, out, err = run(*argv)
    assert "hidden" not in err
    assert (code, out) == (2, "")
    assert what in err


def test_unknown_classes_and_long_prompts(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    code, _, err = run(model, "--threads", 1, "--prompts", prompts, "--classes", "law")
    assert code == 2
    assert "no prompts of class 'law'" in err
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "cat " * 2000}) + "\n" + json.dumps({"prompt": "cat"}))
    code, out, _ = run(model, "--threads", 1, "--prompts", file, *ONE_ROUND)
    assert code == 0
    assert "1 prompts do not fit" in out


# ------------------------------------------------------------------------------------------------ a server


@pytest.fixture
def ask(run: Run, prompts: Path) -> Run:
    return lambda *argv: run("--prompts", prompts, "--json", "-", *ONE_ROUND, *argv)


def test_a_server_against_its_baseline(ask: Run) -> None:
    with fake_server(Behaviour(seconds_per_word=0.1)) as plain, fake_server() as server:
        code, out, _ = ask("--url", server.url, "--baseline-url", plain.url)
    record = json.loads(out)
    assert code == 0
    last = record["rows"][-1]
    assert (last["class"], last["drafter"], last["identical"]) == ("all", "default", True)
    assert last["speedup"] > 1.5
    assert last["acceptance_rate"] is None
    assert last["memory_bytes"] == {"target": None, "draft": None, "kv": None}
    assert last["bandwidth_gb_s"] is None
    assert record["manifest"]["urls"] == {"plain": plain.url, "default": server.url}
    assert record["manifest"]["model"] == {"name": "fake", "hash": None}


def test_a_server_switched_by_a_field(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    with fake_server() as server:
        code, out, _ = ask("--url", server.url, "--plain-by-field", "--api-key-env", "KEY")
    assert code == 0
    switched_off = [body for body in server.bodies if body.get("speculation") == {"enabled": False}]
    assert len(switched_off) == len(server.bodies) / 2 == 3, "two classes and the warm-up"
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in out


def test_a_server_alone_has_no_speedup(ask: Run) -> None:
    with fake_server() as server:
        code, out, err = ask("--url", server.url, "--model", "mine", "--concurrency", 2)
    record = json.loads(out)
    assert code == 0
    assert rows(record, "drafter", "speedup") == [("default", None)] * 3
    assert "There is no baseline" in err
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_without_usage_the_same_answers_are_the_same_tokens(ask: Run) -> None:
    """A server that speculates sends fewer chunks: counted as tokens they would make it slower than it is."""
    whole = Behaviour(words=["one two three"], usage=False)
    with fake_server(Behaviour(seconds_per_word=0.05, usage=False)) as plain, fake_server(whole) as server:
        code, out, _ = ask("--url", server.url, "--baseline-url", plain.url)
    record = json.loads(out)
    assert code == 0
    base, last = record["rows"][-2:]
    times = [sum(sample["request_ms"]) for sample in record["manifest"]["samples"][-2:]]
    assert (base["drafter"], last["drafter"]) == ("plain", "default")
    assert last["speedup"] == pytest.approx(times[0] / times[1], rel=0.02)
    assert any("sends no usage" in note for note in record["manifest"]["notes"])


def test_a_server_that_says_something_else(ask: Run) -> None:
    with fake_server() as plain, fake_server(Behaviour(words=["one ", "more"])) as server:
        code, out, err = ask("--url", server.url, "--baseline-url", plain.url)
    assert code == 1
    assert rows(json.loads(out), "drafter", "identical")[-1] == ("default", False)
    assert "NOT the same words" in err


def test_requests_that_fail_are_counted(ask: Run) -> None:
    with fake_server(Behaviour(fail_from=2)) as server:  # after the warm-up and the first class
        code, out, err = ask("--url", server.url)
    record = json.loads(out)
    assert code == 1
    assert rows(record, "class") == [("chat",), ("all",)]
    assert record["manifest"]["errors"]["count"] == 1
    assert "1 of 2 requests failed" in err


def test_a_server_where_nothing_works(ask: Run) -> None:
    with fake_server(Behaviour(status=500)) as server:
        code, out, err = ask("--url", server.url, "--model", "m")
    assert (code, out) == (2, "")
    assert "answered 500" in err

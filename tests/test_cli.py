import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.broken import SilentDrafter, believing_walk
from tests.parity.conftest import TEXTS
from tests.tiny_models import write_tiny_model
from understudy import __version__
from understudy.cli import main
from understudy.control.cost import CostModel
from understudy.parity.settings import every_setting, pairwise

Run = Callable[..., tuple[int, str, str]]
ONE_SETTING = ("--budget", "0.001", "--threads", "1")  # the first setting always runs
PROMPT = "the cat and the dog and the other one went there then, the cat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit code, its output and its errors, which never hold a traceback."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def generate(run: Run, model: Path) -> Run:
    return lambda *argv: run("generate", "--model", model, "--threads", 1, "--max-tokens", 24, *argv)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    streams = []

    def pipe(content: bytes) -> None:
        streams.append(io.TextIOWrapper(io.BytesIO(content)))
        monkeypatch.setattr(sys, "stdin", streams[-1])

    yield pipe
    for stream in streams:
        stream.close()


# ------------------------------------------------------------------------------------------------ the frame


def test_a_tree_that_was_not_installed_has_the_command_too() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "understudy", "--version"], check=True, capture_output=True, text=True
    ).stdout
    assert shown.startswith("understudy ")


def test_help_is_fast_and_needs_no_torch() -> None:
    code = (
        "import sys, time; started = time.perf_counter(); from understudy.cli import main; "
        "codes = [main([*name, '--help']) for name in ([], ['generate'], ['verify'], ['race'], ['bench'])]; "
        "assert codes == [0] * 5; assert not {'torch', 'numba', 'numpy', 'rich', 'jinja2'} & set(sys.modules)"
    )
    started = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert time.perf_counter() - started < 10  # a loaded machine; half a second on an idle one
    assert shown.count("examples:") == 5


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"understudy {__version__}\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["generate", "--unknown", "x"],
        ["generate", "--temp", "1", "x"],
        ["generate", "--temperature", "warm", "x"],
        ["generate", "one", "two"],
        ["verify", "--budget", "soon"],
    ],
)
def test_what_is_not_understood_is_refused(run: Run, argv: list[str]) -> None:
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert "usage:" in err


# ------------------------------------------------------------------------------------------------ generate


def test_an_answer_is_streamed_and_summed_up(generate: Run) -> None:
    code, out, err = generate(PROMPT)
    assert code == 0
    assert out.endswith("\n")
    assert "24 tokens in" in err
    assert "tokens per cycle" in err
    assert "drafted tokens accepted" in err


def test_the_words_do_not_depend_on_the_drafters(generate: Run) -> None:
    words = {
        generate(PROMPT, "--temperature", 1, "--seed", 3, *how)[1]
        for how in (
            (),
            ("--no-speculation",),
            ("--drafters", "none"),
            ("--drafters", "ngram"),
            ("--drafters", "suffix, ngram,suffix"),
        )
    }
    assert len(words) == 1


def test_json_holds_everything(generate: Run) -> None:
    code, out, _ = generate("--json", "--n", 2, "--temperature", 1, "--seed", 11, PROMPT)
    value = json.loads(out)
    assert code == 0
    assert value["seed"] == 11
    assert value["model"] == "tiny"
    assert value["system_fingerprint"].startswith("fp_")
    assert [choice["index"] for choice in value["choices"]] == [0, 1]
    assert value["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in value["choices"])
    speculation = value["choices"][0]["speculation"]
    assert {"cycles", "drafted", "accepted", "rejected", "rows"} < set(speculation)
    assert sum(speculation["matched_by_position"]) == speculation["accepted"]
    alone = json.loads(generate("--json", "--temperature", 1, "--seed", 11, PROMPT)[1])
    assert alone["choices"][0]["token_ids"] == value["choices"][0]["token_ids"]


def test_several_answers_are_numbered_and_the_seed_is_told(generate: Run) -> None:
    code, out, err = generate("--n", 2, "--temperature", 1, PROMPT)
    assert code == 0
    assert out.startswith("[0] ")
    assert "\n[1] " in out
    assert "; seed " in err


def test_raw_leaves_the_chat_template_out(generate: Run) -> None:
    raw = json.loads(generate("--json", "--raw", PROMPT)[1])
    chat = json.loads(generate("--json", PROMPT)[1])
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_a_stop_string_ends_the_text(generate: Run) -> None:
    whole = json.loads(generate("--json", PROMPT)[1])["choices"][0]["text"]
    stop = whole[4:6]
    code, out, _ = generate("--json", PROMPT, "--stop", stop, "--stop", "never to be said")
    (choice,) = json.loads(out)["choices"]
    assert code == 0
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["stop_reason"] == stop


@pytest.mark.parametrize("argv", [(), ("-",)])
def test_a_prompt_can_be_piped_in(generate: Run, stdin: Callable[[bytes], None], argv: tuple[str, ...]) -> None:
    expected = json.loads(generate("--json", PROMPT)[1])
    stdin(PROMPT.encode() + b"\n")
    piped = json.loads(generate("--json", *argv)[1])
    assert piped["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert piped["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--temperature", "nan", "x"], "temperature is nan"),
        (["--temperature", "-1", "x"], "temperature is -1"),
        (["--temperature", "inf", "x"], "temperature is inf"),
        (["--top-p", "0", "x"], "top_p is 0"),
        (["--top-k", "-3", "x"], "top_k is -3"),
        (["--max-tokens", "0", "x"], "max_tokens is 0"),
        (["--max-tokens", "-5", "x"], "max_tokens is -5"),
        (["--max-tokens", str(10**30), "x"], "max_tokens is"),
        (["--seed", "-1", "x"], "seed is -1"),
        (["--n", "0", "x"], "n is 0"),
        (["--n", "1000000", "x"], "n is 1000000"),
        (["--stop", "", "x"], "stop must be"),
        (["--stop", "a\udcff", "x"], "Character 1 of the stop is not UTF-8"),
        (["--threads", "0", "x"], "num_threads is 0"),
        (["--drafters", "oracle", "x"], "no drafter named 'oracle'"),
        (["--drafters", "", "x"], "no drafter named ''"),
        (["--no-speculation", "--drafters", "ngram", "x"], "contradict"),
        (["--compare", "--no-speculation", "x"], "--compare needs speculation"),
        (["--compare", "--n", "2", "x"], "--compare needs speculation"),
        (["a\udcffb"], "Character 1 of the prompt is not UTF-8"),
        (["\ud800"], "Character 0 of the prompt is not UTF-8"),
        ([""], "The prompt is empty"),
    ],
)
def test_hostile_arguments_are_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = run("generate", *argv)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert what in err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "The prompt is empty"),
        (b"\n", "The prompt is empty"),
        (b"a\xffb", "Byte 1 of the prompt is not UTF-8"),
        (b"a" * 17 * 2**20, "The prompt has more than"),
    ],
)
def test_hostile_input_is_refused(run: Run, stdin: Callable[[bytes], None], content: bytes, what: str) -> None:
    stdin(content)
    code, out, err = run("generate")
    assert (code, out) == (2, "")
    assert what in err


def test_ten_megabytes_are_refused(generate: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"the cat and " * (10 * 2**20 // 12))
    code, out, err = generate("-")
    assert (code, out) == (2, "")
    assert err.startswith("error: The prompt has")


def test_a_prompt_longer_than_the_context_is_refused(generate: Run) -> None:
    code, out, err = generate("the cat and the dog " * 400)
    assert (code, out) == (2, "")
    assert "leaves no room in a context of 512" in err


def test_no_prompt_at_a_terminal_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    code, _, err = run("generate")
    assert code == 2
    assert "There is no prompt" in err


@pytest.mark.parametrize("command", [["generate", "x", "--model"], ["verify"]])
@pytest.mark.parametrize("place", ["/no/such/place", "x" * 5000, "a\udcff", __file__])
def test_a_model_that_is_not_there(run: Run, command: list[str], place: str) -> None:
    code, out, err = run(*command, place)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


@pytest.mark.parametrize(("error", "expected"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141), (MemoryError, 2)])
def test_interruptions_are_quiet(
    generate: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], expected: int
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("understudy.llm.LLM.run", interrupted)
    code, out, err = generate(PROMPT)
    assert (code, out) == (expected, "")
    assert (err == "") == (expected != 2)


def test_a_reader_that_leaves_is_no_drama() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait() in (0, 141)
    assert errors == b""


def test_a_model_that_computes_nonsense_is_an_error(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_finite(self: object, logits: object, *, position: int, **others: object) -> int:
        raise FloatingPointError(f"the model's logits at position {position} are not finite")

    monkeypatch.setattr("understudy.sampling.processors.Sampler.sample", not_finite)
    code, _, err = generate(PROMPT)
    assert code == 2
    assert "not finite" in err


# ------------------------------------------------------------------------------------------------ compare


def test_compare_shows_both_sides(generate: Run) -> None:
    code, out, err = generate("--compare", PROMPT)
    assert code == 0
    assert "speed-up" in out
    assert out.rstrip().splitlines()[-2].endswith("yes")
    assert err == ""


def test_compare_takes_three_of_our_own_prompts(run: Run, tmp_path: Path) -> None:
    wide = write_tiny_model(tmp_path / "wide", max_position_embeddings=2048)
    argv = ("generate", "--compare", "--json", "--model", wide, "--threads", 1, "--max-tokens", 16)
    code, out, _ = run(*argv, "--temperature", 0.7)
    value = json.loads(out)
    assert code == 0
    assert [line["prompt"] for line in value] == ["code", "summarization", "rag"]
    assert all(line["same"] and line["on_tokens_per_s"] > 0 and line["off_tokens_per_s"] > 0 for line in value)


def test_compare_tells_when_the_words_differ(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.sampling.verify.walk", believing_walk)
    free = CostModel({1: 1.0, 256: 1.0})  # rows cost nothing, so every draft is bought
    monkeypatch.setattr("understudy.assembly.measure_cost", lambda runner: free)
    code, out, _ = generate("--compare", "--max-tokens", 64, "--raw", "--temperature", 2, "--seed", 1, TEXTS[1])
    assert code == 1
    assert out.rstrip().splitlines()[-2].endswith("no")


# ------------------------------------------------------------------------------------------------ verify


def test_verify_proves_the_same_words(run: Run, model: Path, prompts: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "proof.json"
    code, out, err = run("verify", model, "--prompts", prompts, "--json", out_file, *ONE_SETTING)
    value = json.loads(out_file.read_text())
    assert code == 0
    assert "Same words: 16 of 16" in out
    assert value["compared"] == value["identical"] == 16
    assert value["differences"] == value["vacuous"] == []
    assert len(value["cut"]) == len(pairwise(every_setting())) - 1
    assert all(f"{name}: the budget left no time for it" in out for name in value["cut"])
    assert "identical" in err


def test_verify_can_write_to_the_output(run: Run, model: Path, prompts: Path) -> None:
    code, out, err = run("verify", model, "--prompts", prompts, "--json", "-", *ONE_SETTING)
    assert code == 0
    assert json.loads(out)["identical"] == 16
    assert "Same words" in err


def test_full_means_every_setting(run: Run, model: Path, prompts: Path) -> None:
    _, out, _ = run("verify", model, "--prompts", prompts, "--json", "-", "--full", *ONE_SETTING)
    assert len(json.loads(out)["cut"]) == 179


def test_verify_finds_a_broken_engine(run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.sampling.verify.walk", believing_walk)
    code, out, err = run("verify", model, "--prompts", prompts, *ONE_SETTING)
    assert code == 1
    assert "NOT the same words" in out
    assert "token_ids at token" in out
    assert "DIFFERS" in err


def test_verify_fails_when_nothing_was_tested(
    run: Run, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.assembly.make_drafter", lambda *name, **room: SilentDrafter())
    code, out, err = run("verify", model, "--prompts", prompts, *ONE_SETTING)
    assert code == 1
    assert "Not proven" in out
    assert "no token was drafted" in out
    assert "vacuous" in err


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--budget", "nan"], "--budget is nan"),
        (["--budget", "-1"], "--budget is -1"),
        (["--budget", "0"], "--budget is 0"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--max-tokens", "-2"], "--max-tokens is -2"),
        (["--threads", "0"], "--threads is 0"),
        (["--json", "/no/such/folder/out.json"], "cannot be written"),
        (["--json", "/"], "cannot be written"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
        (["--prompts", "/"], "/ cannot be read"),
        (["--prompts", __file__], "line 1: this is not JSON"),
    ],
)
def test_verify_refuses_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = run("verify", *argv)
    assert (code, out) == (2, "")
    assert what in err


def test_a_reader_who_leaves_is_not_a_difference() -> None:
    """The library that draws tables would leave with code 1, which says that words differ."""
    from understudy.commands.result import make_console

    console = make_console(stderr=False)
    with pytest.raises(BrokenPipeError):
        console.on_broken_pipe()

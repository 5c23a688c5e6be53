"""`understudy bench --widen`, and drafts by noise: the same words at another price, on tiny models and a tiny shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.test_model import context_of, drafter_of, propose
from tests.parity.conftest import TEXTS
from tests.tiny_models import TinyArchitecture, write_tiny_model
from understudy.assembly import DraftModel, Target, load_target, with_draft
from understudy.cli import main
from understudy.control.cost import CostModel
from understudy.core.request import SamplingParams
from understudy.core.shapes import SHAPES, Shape
from understudy.errors import ConfigError
from understudy.kernels.cpu import CpuKernels
from understudy.llm import LLM
from understudy.models.decoder import Decoder
from understudy.models.twin import load_draft
from understudy.runtime.runner import Runner

Run = Callable[..., tuple[int, str, str]]
WIDE = Shape(
    name="wide",
    hidden_size=160,
    intermediate_size=320,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny shape has a name, too, and a pass of it costs much more than one of the small model."""

    def cost(runner: Runner) -> CostModel:
        pass_s = 1.0 if runner.decoder.config.num_layers == WIDE.num_layers else 1e-4
        return CostModel({1: pass_s, 256: pass_s})

    monkeypatch.setitem(SHAPES, WIDE.name, WIDE)  # type: ignore[arg-type]
    monkeypatch.setattr("understudy.assembly.measure_cost", cost)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("widen")
    write_tiny_model(folder / "llama", "llama", seed=5, tie_word_embeddings=False, dtype=torch.bfloat16)
    write_tiny_model(folder / "qwen2", "qwen2", seed=5, tie_word_embeddings=False, dtype=torch.bfloat16)
    lines = [{"prompt": text, "class": "code" if "print" in text else "chat"} for text in TEXTS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["bench", *(str(argument) for argument in argv)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def measure(run: Run, folder: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Run one round and return the record, and what was told."""

    def measure(*argv: object) -> tuple[dict[str, Any], str]:
        work = ("--prompts", folder / "prompts.jsonl", "--max-tokens", 24, "--budget", "0.001")
        code, out, err = run(folder / "llama", "--threads", 1, "--json", "-", *work, *argv)
        assert code == 0
        return json.loads(out), err

    return measure


def words(target: Target) -> list[list[int]]:
    llm = LLM(target=target, num_threads=1)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [result.token_ids for result in llm.generate(TEXTS, sampling)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_words_are_the_small_models(folder: Path, architecture: TinyArchitecture) -> None:
    place = folder / architecture
    small, wide = (load_target(place, weights="fp32", widen=name, num_threads=1) for name in (None, "wide"))
    assert words(wide) == words(small)
    assert wide.decoder.config.hidden_size == 160
    assert wide.num_bytes > 2 * small.num_bytes


def test_a_record_says_what_was_widened(measure: Callable[..., tuple[dict[str, Any], str]]) -> None:
    small = measure()[0]["manifest"]
    record, told = measure("--widen", "wide")
    wide = record["manifest"]
    assert wide["model"]["name"] == "llama widened to wide"
    assert wide["model"]["hash"].startswith(small["model"]["hash"] + "+widened-wide-160-")
    assert wide["system_fingerprint"] != small["system_fingerprint"]
    assert (small["settings"]["widen"], wide["settings"]["widen"]) == (None, "wide")
    assert all(row["identical"] for row in record["rows"])
    assert told.startswith("Widening the model to wide.\n")


def with_twin(target: Target, sigma: float) -> Target:
    """The target with a twin that is not rounded to int8, so that noise alone makes it differ."""
    loaded = load_draft(f"twin:{sigma}", target.place)
    decoder = Decoder(loaded.config, loaded.tensors, CpuKernels(num_threads=1))
    vocabulary = with_draft(target, "twin:0").draft.vocabulary  # type: ignore[union-attr]
    return replace(target, draft=DraftModel(decoder, vocabulary, loaded.name, 0))


def share_accepted(target: Target) -> float:
    """Of what its draft model proposes along the target's own greedy text."""
    drafter = drafter_of(target)
    num_drafted = num_accepted = 0
    for number, text in enumerate(words(target)):
        known = target.tokenizer.encode(TEXTS[number])
        for place in range(0, 35, 5):
            draft = propose(drafter, context_of([*known, *text[:place]], sequence_id=number)).tokens
            agrees = [one == other for one, other in zip(draft, text[place:], strict=False)]
            num_drafted += len(agrees)
            num_accepted += (*agrees, False).index(False)
    assert num_drafted > 100
    return num_accepted / num_drafted


def test_a_twin_is_accepted_the_less_the_noisier_it_is(folder: Path) -> None:
    wide = load_target(folder / "llama", weights="fp32", widen="wide", num_threads=1)
    itself, good, poor = (share_accepted(with_twin(wide, sigma)) for sigma in (0, 0.05, 0.5))
    assert itself == 1.0
    assert 1.0 > good > poor


def test_a_bench_with_twins(measure: Callable[..., tuple[dict[str, Any], str]]) -> None:
    rates = []
    for sigma, name in ((0, "llama itself"), (2, "llama with noise 2")):
        record, _ = measure("--widen", "wide", "--draft", f"twin:{sigma}", "--drafter", "model")
        assert record["manifest"]["draft"] == {"name": name, "place": f"twin:{sigma}"}
        assert all(row["identical"] for row in record["rows"])
        rates += [row["acceptance_rate"] for row in record["rows"] if row["drafter"] == "model"][-1:]
    assert rates[0] > rates[1]


def test_a_twin_needs_no_widening(folder: Path) -> None:
    target = with_draft(load_target(folder / "llama", num_threads=1), "twin:0.1")
    assert target.draft is not None
    assert target.draft.name == "llama with noise 0.1"
    assert target.draft.decoder.config == target.decoder.config


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--widen", "7b"], "invalid choice: '7b'"),
        (["--widen", "wide", "--url", "http://localhost:1/v1"], "--widen has a meaning only on our own engine"),
        (["--draft", "twin:", "--widen", "wide"], "The draft 'twin:' does not say how much noise it has"),
        (["--draft", "twin:-1"], "The draft 'twin:-1' does not say how much noise it has"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert what in err


def test_a_model_that_does_not_fit_is_refused(run: Run, folder: Path) -> None:
    code, out, err = run(folder / "llama", "--widen", "8b")
    assert (code, out) == (2, "")
    assert err.startswith("error: This model cannot be widened to 8b: its heads have 16 dimensions and the shape's 128")
    assert "Shapes that it fits in: wide." in err


def test_an_unknown_shape_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.assembly.load_model", None)
    with pytest.raises(ConfigError, match="There is no shape named '7b'"):
        load_target(widen="7b")

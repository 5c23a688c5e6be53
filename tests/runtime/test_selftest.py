"""The start-up self-test passes on a sound machine, fails on one that is not, and what happens then keeps the words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, load_target
from understudy.config import EngineConfig
from understudy.core.events import Event, Fallback
from understudy.core.request import SamplingParams, Speculation
from understudy.core.weights import WEIGHTS_ON, WeightType
from understudy.kernels import cpu_attention, cpu_layer
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cpu_linear import Linear
from understudy.llm import LLM

Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, initializer_range=0.3)


def loaded(folder: Path, weights: WeightType = "fp32") -> tuple[Target, list[Event]]:
    events: list[Event] = []
    return load_target(folder, weights=weights, num_threads=1, emit=events.append), events


def make_output_uneven(patch: pytest.MonkeyPatch) -> None:
    call = Linear.__call__
    patch.setattr(Linear, "__call__", lambda self, x: call(self, x) * np.float32(1 + 1e-6 * (len(x) >= 2)))


def make_layers_uneven(patch: pytest.MonkeyPatch, *, from_rows: int = 2) -> None:
    compute = cpu_layer.behind_norm

    def compute_unevenly(x: Floats, *rest: Any) -> None:
        compute(x, *rest)
        x *= np.float32(1 + 1e-6 * (len(x) >= from_rows))

    patch.setattr(cpu_layer, "behind_norm", compute_unevenly)


def make_windows_uneven(patch: pytest.MonkeyPatch) -> None:
    compute, place = cpu_layer.behind_norm, 7

    def compute_unevenly(x: Floats, *rest: Any) -> None:
        window = rest[place] if rest[place] == cpu_attention.NO_WINDOW else rest[place] - (len(x) > 1)
        compute(x, *rest[:place], window, *rest[place + 1 :])

    patch.setattr(cpu_layer, "behind_norm", compute_unevenly)


@pytest.mark.parametrize("window", [5, 40, 500])
def test_windows_are_tested_however_wide_they_are(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path, "mistral", sliding_window=window)
    assert loaded(folder)[0].is_row_invariant
    make_windows_uneven(monkeypatch)
    assert not loaded(folder)[0].is_row_invariant


@pytest.mark.parametrize("weights", WEIGHTS_ON["cpu"])
def test_a_sound_machine_passes(folder: Path, weights: WeightType) -> None:
    target, events = loaded(folder, weights)
    assert target.is_row_invariant
    assert not [event for event in events if isinstance(event, Fallback) and event.what == "the self-test"]


def test_layers_that_are_uneven_with_many_rows_are_found_where_many_are_computed_otherwise(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_layers_uneven(patch, from_rows=64)
        assert loaded(folder)[0].is_row_invariant, "few rows show nothing"
        patch.setattr(CpuKernels, "sizes_apart", (48, 96))
        assert not loaded(folder)[0].is_row_invariant
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuKernels, "sizes_apart", (48, 96))
        assert loaded(folder)[0].is_row_invariant


def test_uneven_layers_of_8_bits_are_found(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_layers_uneven(patch)
        assert not loaded(folder, "int8")[0].is_row_invariant


@pytest.mark.parametrize("spoil", [make_output_uneven, make_layers_uneven])
def test_an_uneven_machine_computes_row_by_row_without_drafts(folder: Path, spoil: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)  # type: ignore[operator]
        target, events = loaded(folder)
        assert not target.is_row_invariant
        assert [event.what for event in events if isinstance(event, Fallback)] == ["the self-test"]
        llm = LLM(target=target, config=EngineConfig(kv_tokens=1024, num_threads=1))
        sampling = SamplingParams(max_tokens=40, seed=5, logprobs=1)
        plain = llm.generate("the cat and the dog", sampling, speculation=Speculation(enabled=False))[0]
        drafted = llm.generate("the cat and the dog", sampling, speculation=Speculation(forced=True))[0]
    assert drafted.completions[0].speculation.drafted == 0
    assert drafted.token_ids == plain.token_ids
    assert drafted.completions[0].logprobs == plain.completions[0].logprobs

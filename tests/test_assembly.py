"""What an engine takes of a GPU's memory: told at start, and refused with numbers where it is not to be had.

There need be no GPU: a target says that it is on one, and what is free there is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, build_engine, load_target, with_draft
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.core.events import Event, Notice
from understudy.engine.engine import Engine
from understudy.errors import CapacityError, ConfigError
from understudy.kernels.devices import packing

COST = CostModel({1: 1.0})
GIB, MIB = 1 << 30, 1 << 20
TOKEN_BYTES = 2 * 2 * 4 * 2 * 16
"""Of the tiny model: keys and values of two layers of two heads of 16, fp32."""
SetRoom = Callable[[int], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    """A target that says that it is on a GPU."""
    found = replace(load_target(folder, num_threads=1), device="cuda")
    assert found.kv_bytes_per_token == TOKEN_BYTES
    return found


@pytest.fixture
def set_room(monkeypatch: pytest.MonkeyPatch) -> SetRoom:
    return lambda num_bytes: monkeypatch.setattr("understudy.assembly.room_for_cache", lambda device: num_bytes)


def built(target: Target, **settings: object) -> tuple[Engine, list[str]]:
    """An engine, and what it told of memory."""
    told: list[Event] = []
    config = EngineConfig.from_mapping({"drafters": (), "max_sequences": 4} | settings)
    engine = build_engine(target, config, cost=COST, draft_cost=COST, emit=told.append)
    notices = [event for event in told if isinstance(event, Notice)]
    return engine, [notice.text for notice in notices if notice.what == "the GPU's memory"]


def test_memory_is_told_on_a_gpu_alone(target: Target, set_room: SetRoom) -> None:
    num_tokens = 40 * target.page_tokens
    set_room(num_tokens * TOKEN_BYTES + 1)
    engine, (told,) = built(target, max_context=512)
    assert engine.num_blocks == 40
    weights, kv = (f"{count / MIB:.2f} MiB" for count in (target.num_bytes, num_tokens * TOKEN_BYTES))
    assert told == f"{weights} of weights, {kv} of keys and values; room for {num_tokens:,} tokens"
    assert built(replace(target, device="cpu"), max_context=512)[1] == []


def test_the_draft_has_its_share(target: Target, set_room: SetRoom) -> None:
    """One of two layers drafts, in a cache of its own: a token takes half as much again."""
    drafted = with_draft(target, "layers:1")
    num_tokens = 40 * target.page_tokens
    set_room(num_tokens * TOKEN_BYTES * 3 // 2)
    engine, (told,) = built(drafted, max_context=512, drafters=("model",))
    assert engine.num_blocks == 40
    assert f"; of the draft, 0.00 MiB of weights, {num_tokens * TOKEN_BYTES / 2 / MIB:.2f} MiB of keys and" in told
    engine, (told,) = built(drafted, max_context=512)
    assert engine.num_blocks == 60, "nobody drafts"
    assert "of the draft" not in told


@pytest.mark.parametrize("drafters", [(), ("model",)])
def test_a_gpu_without_room_for_one_text_is_refused(
    target: Target, set_room: SetRoom, drafters: tuple[str, ...]
) -> None:
    drafted = with_draft(target, "layers:1")
    token_bytes = TOKEN_BYTES * 3 // 2 if drafters else TOKEN_BYTES
    least = (512 + target.page_tokens) * token_bytes
    set_room(least)
    built(drafted, max_context=512, drafters=drafters)
    set_room(least // 2)
    with pytest.raises(CapacityError) as refused:
        built(drafted, max_context=512, drafters=drafters)
    told = f"One text of 512 tokens wants {least / MIB:.2f} MiB of keys and values ({token_bytes:,} bytes a token)"
    assert refused.value.message.startswith(told)
    assert f"{least // 2 / MIB:.2f} MiB of the GPU's memory are free" in refused.value.message
    assert refused.value.remedy.startswith("Lower max_context")
    assert ("leave the draft out" in refused.value.remedy) == bool(drafters)
    assert built(drafted, kv_tokens=64, drafters=drafters)[0].num_blocks == -(-64 // target.page_tokens)
    set_room(0)
    built(replace(drafted, device="cpu"), max_context=512)  # its memory is taken as it is needed


class FullKernels:
    """The CPU's kernels, in whose memory no more than so many weights fit."""

    def __init__(self, kernels: Any, *, most: int) -> None:
        self._kernels = kernels
        self._left = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(self, *args: Any, **options: Any) -> Any:
        """Pack, or fail as a GPU does."""
        if not self._left:
            raise torch.OutOfMemoryError
        self._left -= 1
        return self._kernels.linear(*args, **options)


def test_weights_that_do_not_fit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers pack three weights each in this way, and the output layer is the seventh."""
    from understudy import assembly

    make_kernels = assembly.make_kernels
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (GIB // 2, 8 * GIB))

    def load(most: int, draft: Path | None = None) -> Target:
        monkeypatch.setattr(
            "understudy.assembly.make_kernels",
            lambda *args, **options: FullKernels(make_kernels(*args, **options), most=most),
        )
        return load_target(folder, weights="fp32", draft=draft, num_threads=1)

    assert load(7).draft is None
    for most, draft in ((4, None), (6, None), (13, folder)):
        with pytest.raises(CapacityError, match=r"tiny does not fit on the GPU: .*, and of 8\.0 GiB 0\.5 were free"):
            load(most, draft)
    assert load(14, folder).draft is not None


def test_what_weights_want_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (3 * GIB, 24 * GIB))
    with pytest.raises(CapacityError) as refused, packing("m", wanted_bytes=140 * GIB):
        raise torch.OutOfMemoryError
    assert refused.value.message == (
        "m does not fit on the GPU: its weights take 140.0 GiB, and of 24.0 GiB 3.0 were free when there was no room "
        "for more."
    )
    assert "leave the draft out" in refused.value.remedy


def test_more_rows_than_there_are_places_for_words_are_refused_on_a_gpu(target: Target, set_room: SetRoom) -> None:
    set_room(GIB)
    with pytest.raises(ConfigError, match="max_rows_per_step is 1025") as error:
        built(target, max_context=512, max_rows_per_step=1025)
    assert "1024" in error.value.remedy
    built(target, max_context=512, max_rows_per_step=1024)
    built(replace(target, device="cpu"), max_context=512, max_rows_per_step=1025)

"""Which device a choice comes to: a GPU that is there and cannot be used is said to be one, with the reason."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from understudy.errors import ConfigError
from understudy.kernels import cuda_plans, devices
from understudy.kernels.cuda_plans import Tile
from understudy.kernels.devices import choose_device


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that torch finds, with Triton beside it."""
    found = SimpleNamespace(name="NVIDIA H200", shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    devices._tell_once.cache_clear()
    return found


def test_a_gpu_with_room_for_the_tiles_is_used(gpu: SimpleNamespace) -> None:
    assert [choose_device(wanted) for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    del gpu.shared_memory_per_block_optin  # some builds of torch do not tell
    assert choose_device("auto") == "cuda"


def test_a_gpu_without_it_is_left_alone_and_its_owner_is_told_once(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.name, gpu.shared_memory_per_block_optin = "NVIDIA A100", 163 << 10
    reason = "a block has 163 KB of shared memory on an NVIDIA A100, and the kernels take up to 200 (Hopper has them)"
    with caplog.at_level(logging.WARNING):
        assert [choose_device("auto"), choose_device("auto"), choose_device("cpu")] == ["cpu"] * 3
    assert caplog.messages == [f"The GPU is not used: {reason}."]
    with pytest.raises(ConfigError) as found:
        choose_device("cuda")
    assert found.value.message == f"No GPU can be used: {reason}."


def test_no_triton_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto") == "cpu"
    assert caplog.messages == ["The GPU is not used: the package triton is not installed."]


def test_no_tile_takes_more_than_is_asked_for() -> None:
    tiles = [(name, tile) for name, table in vars(cuda_plans).items() for tile in _tiles(table)]
    assert len(tiles) > 30
    for name, tile in tiles:
        outputs = tile.outputs * (2 if "GATED" in name else 1)  # gate and up
        assert 2 * (outputs + tile.rows) * tile.inputs * tile.num_stages <= devices._SHARED_BYTES, (name, tile)


def _tiles(table: object) -> list[Tile]:
    return [tile for tile in table.values() if isinstance(tile, Tile)] if isinstance(table, dict) else []

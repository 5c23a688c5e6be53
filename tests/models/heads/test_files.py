"""A draft's folder: what is written is read, and what was not written so is refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_heads import tiny_guesser, tiny_spec, tiny_teacher
from understudy.errors import ModelError
from understudy.models.heads.files import SPEC_FILE, WEIGHTS_FILE, TrainedHead, is_head_folder, load_head, save_head
from understudy.models.heads.spec import HEAD_KINDS, HeadKind, HeadSpec, spread_layers


def trained(kind: HeadKind) -> TrainedHead:
    guesser = tiny_guesser(kind, seed=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in guesser.head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return TrainedHead(guesser.head.spec, guesser.head, guesser.vocabulary, {"seed": 4})


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_fp16_round_trip(kind: HeadKind, tmp_path: Path) -> None:
    written = trained(kind)
    save_head(tmp_path / "new", written, stored="fp16")
    read = load_head(tmp_path / "new")
    assert read.spec == written.spec
    assert dict(read.provenance) == {"seed": 4}
    assert torch.equal(read.vocabulary.ids, written.vocabulary.ids)
    was = written.head.state_dict()
    for name, parameter in read.head.state_dict().items():
        expected = was[name].half().float() if was[name].dim() == 2 else was[name]
        assert torch.equal(parameter, expected), name
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in read.head.parameters())
    assert not any(buffer.is_meta for buffer in read.head.buffers())


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_int8_round_trip_is_within_half_a_step(kind: HeadKind, tmp_path: Path) -> None:
    written = trained(kind)
    save_head(tmp_path, written)
    was = written.head.state_dict()
    for name, parameter in load_head(tmp_path).head.state_dict().items():
        if was[name].dim() == 2:
            step = was[name].abs().amax(dim=1, keepdim=True) / 127
            assert bool(((parameter - was[name]).abs() <= 0.501 * step).all()), name
    first = (tmp_path / WEIGHTS_FILE).read_bytes()
    save_head(tmp_path, load_head(tmp_path))
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == first  # nothing is lost by storing it again


def test_a_folder_is_known_by_its_spec(tmp_path: Path) -> None:
    assert not is_head_folder(tmp_path)
    save_head(tmp_path, trained("medusa"))
    assert is_head_folder(tmp_path)


def cut_off(folder: Path) -> None:
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-10])


def flip(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(bytes(data))


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()


def cut_spec(folder: Path) -> None:
    (folder / SPEC_FILE).write_text((folder / SPEC_FILE).read_text()[:-9])


@pytest.mark.parametrize(
    ("damage", "file"),
    [(cut_off, WEIGHTS_FILE), (flip, WEIGHTS_FILE), (no_weights, WEIGHTS_FILE), (cut_spec, SPEC_FILE)],
)
def test_damaged_files_are_refused_by_name(damage: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    save_head(tmp_path, trained("eagle"))
    damage(tmp_path)
    with pytest.raises(ModelError, match=file) as raised:
        load_head(tmp_path)
    assert raised.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"kind": "oracle"},
        {"kind": "medusa"},
        {"feature_layers": [1, 2, 9]},
        {"feature_layers": "all"},
        {"num_tokens": 0},
        {"num_draft_ids": 41},
        {"intermediate_size": 64},
        {"target": None},
        {"weights": None},
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_head(tmp_path, trained("eagle"))
    declared = json.loads((tmp_path / SPEC_FILE).read_text())
    (tmp_path / SPEC_FILE).write_text(json.dumps(declared | change))
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_head(tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_weights_of_another_network_are_refused(is_there: bool, tmp_path: Path) -> None:
    save_head(tmp_path, trained("eagle"))
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    if is_there:
        tensors["surplus"] = torch.zeros(1)
    else:
        del tensors["attention.q.weight.scale"]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    data = (tmp_path / WEIGHTS_FILE).read_bytes()
    declared = json.loads((tmp_path / SPEC_FILE).read_text())
    declared["weights"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (tmp_path / SPEC_FILE).write_text(json.dumps(declared))
    with pytest.raises(ModelError, match="surplus" if is_there else "scales"):
        load_head(tmp_path)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    broken = trained("medusa")
    with torch.no_grad():
        next(broken.head.parameters())[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        save_head(tmp_path, broken)
    assert not is_head_folder(tmp_path)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_spec_round_trip(kind: HeadKind) -> None:
    spec = tiny_spec(kind, tiny_teacher("qwen3").config)
    assert HeadSpec.from_description(json.loads(json.dumps(spec.describe()))) == spec


def test_another_target_is_refused() -> None:
    target = tiny_teacher().config
    spec = tiny_spec("eagle", target)
    spec.check_target(target, "sha256:tiny")
    spec.check_target(replace(target, eos_ids=(5,), max_positions=64))
    with pytest.raises(ModelError, match=r"hidden_size is 64; this model's is 128"):
        spec.check_target(replace(target, hidden_size=128))
    with pytest.raises(ModelError, match="other weights"):
        spec.check_target(target, "sha256:other")


def test_layers_are_spread() -> None:
    assert spread_layers(30, 3) == (2, 15, 28)
    assert spread_layers(30, 5) == (2, 8, 15, 22, 28)
    assert spread_layers(4, 3) == (1, 2, 4)
    for num_layers in range(1, 40):
        for count in range(1, num_layers + 1):
            layers = spread_layers(num_layers, count)
            assert len(set(layers)) == count
            assert 1 <= min(layers) <= max(layers) <= num_layers
    with pytest.raises(ModelError, match="medusa"):
        spread_layers(2, 3)

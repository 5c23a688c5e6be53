"""Weights are loaded whole and right, or a ModelError says what is wrong with which file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_tensors, write_tiny_gguf, write_tiny_model
from understudy.errors import ModelError
from understudy.models import weights
from understudy.models.config import RopeScaling
from understudy.models.load import load_model
from understudy.models.rotary import inverse_frequencies, llama3_divisors
from understudy.models.weights import load_folder, load_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("gguf")
    return write_tiny_gguf(write_tiny_model(place / "tiny", num_hidden_layers=1), place / "tiny.gguf").read_bytes()


def original(folder: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    return tiny_tensors(json.loads((folder / "config.json").read_text()), seed=seed)


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_folder(tmp_path: Path, architecture: Any, sharded: bool, dtype: torch.dtype) -> None:
    written = write_tiny_model(tmp_path / "m", architecture, seed=3, sharded=sharded, dtype=dtype)
    model = load_folder(written)
    expected = {name: tensor.to(dtype).float() for name, tensor in original(written, seed=3).items()}
    assert_same_tensors(model.tensors, expected)
    assert (model.name, model.config.architecture, model.config.eos_ids) == ("m", architecture, (2,))
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"


def test_untied_head_is_loaded_and_a_tied_one_ignored(tmp_path: Path) -> None:
    untied = load_folder(write_tiny_model(tmp_path / "untied", tie_word_embeddings=False))
    assert untied.tensors["lm_head.weight"].shape == (304, 64)
    tied = write_tiny_model(tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    extra = {"lm_head.weight": torch.zeros(304, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file({**tensors, **extra}, tied / "model.safetensors")
    assert_same_tensors(load_folder(tied).tensors, tensors)


def test_the_caller_may_write_without_touching_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    load_folder(folder).tensors["model.norm.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_hash_names_the_contents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_folder(folder).source_hash
    assert whole.startswith("sha256:")
    assert load_folder(folder).source_hash == whole
    monkeypatch.setattr(weights, "FULL_HASH_BYTES", 1000)
    sampled = load_folder(folder).source_hash
    assert sampled.startswith("sha256-sampled:")
    monkeypatch.undo()
    write_tiny_model(folder, seed=1)
    assert load_folder(folder).source_hash != whole
    monkeypatch.setattr(weights, "FULL_HASH_BYTES", 1000)
    assert load_folder(folder).source_hash != sampled


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_gguf_equals_its_safetensors_twin(tmp_path: Path, architecture: Any, tied: bool) -> None:
    twin = write_tiny_model(tmp_path / "m", architecture, tie_word_embeddings=tied)
    path = write_tiny_gguf(twin, tmp_path / "m.gguf")
    steps: list[tuple[int, int]] = []
    model = load_gguf(path, progress=lambda done, total: steps.append((done, total)))
    assert_same_tensors(model.tensors, load_folder(twin).tensors)
    assert model.config == load_folder(twin).config
    assert steps == [(done, len(model.tensors)) for done in range(1, len(model.tensors) + 1)]
    assert model.source_hash == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    text = "the other one, def add(a, b): é😀<|im_end|>"
    assert model.tokenizer.encode(text) == load_folder(twin).tokenizer.encode(text)
    assert model.tokenizer.chat_template == load_folder(twin).tokenizer.chat_template


def test_quantised_gguf_is_close_to_its_twin(tmp_path: Path) -> None:
    twin = write_tiny_model(tmp_path / "m")
    model = load_gguf(write_tiny_gguf(twin, tmp_path / "m.gguf", quantized=True))
    for name, tensor in load_folder(twin).tensors.items():
        assert torch.allclose(model.tensors[name], tensor, atol=float(tensor.abs().max()) / 127), name


def add_gguf_tensor(monkeypatch: pytest.MonkeyPatch, name: str, values: np.ndarray) -> None:
    """Make the next GGUF file hold one more tensor."""
    import gguf

    written = gguf.GGUFWriter.write_header_to_file

    def with_one_more(writer: Any) -> None:
        writer.add_tensor(name, values)
        written(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)


def test_gguf_rotary_divisors_become_llama3_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    twin = write_tiny_model(tmp_path / "m", rope_parameters=rope)
    plain = load_folder(write_tiny_model(tmp_path / "plain", rope_theta=500000.0)).config
    divisors = llama3_divisors(inverse_frequencies(plain), RopeScaling(kind="llama3", factor=32.0))
    add_gguf_tensor(monkeypatch, "rope_freqs.weight", divisors.astype(np.float32))
    assert load_gguf(write_tiny_gguf(twin, tmp_path / "m.gguf")).config == load_folder(twin).config


def test_unknown_rotary_divisors_are_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gguf_tensor(monkeypatch, "rope_freqs.weight", np.linspace(1, 5, 8, dtype=np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        load_gguf(write_tiny_gguf(folder, tmp_path / "m.gguf"))


def test_gguf_surplus_tensor_is_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gguf_tensor(monkeypatch, "blk.0.attn_sinks.weight", np.ones(16, dtype=np.float32))
    with pytest.raises(ModelError, match=r"nothing reads blk\.0\.attn_sinks\.weight"):
        load_gguf(write_tiny_gguf(folder, tmp_path / "m.gguf"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(NORM), r"tiny has no tensor model\.norm\.weight \(expected \[64\]\)"),
        (
            lambda t: t.update({NORM: torch.ones(65)}),
            r"model\.safetensors: model\.norm\.weight is \[65\], expected \[64\]",
        ),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}), "nothing reads .*q_norm"),
        (lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}), r"model\.norm\.weight is I8"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], named: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=named) as caught:
        load_folder(folder)
    assert caught.value.remedy


def test_a_config_of_endless_layers_fails_at_once(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**30}))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2\."):
        load_folder(folder)


def only(folder: Path, *names: str) -> None:
    """Leave just these files, empty ones where they are new."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    for name in names:
        (folder / name).touch()


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: only(f), "is empty"),
        (lambda f: only(f, "config.json", "pytorch_model.bin"), r"pickle only \(pytorch_model\.bin\)"),
        (lambda f: only(f, "config.json", "tokenizer.json"), r"no \*\.safetensors"),
        (lambda f: only(f, "model.safetensors"), r"no config\.json"),
        (lambda f: only(f, "a.gguf", "config.json"), r"Give the file: .*a\.gguf"),
        (write("config.json", "{"), r"config\.json cannot be read"),
        (write("config.json", "[1]"), r"config\.json holds no JSON object"),
        (write("config.json", "[" * 100_000), r"config\.json cannot be read"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), r"config\.json cannot be read"),
        (write("generation_config.json", "nonsense"), r"generation_config\.json cannot be read"),
        (write("config.json", '{"model_type": "bert"}'), r"config\.json: .*'bert'"),
        (write("model.safetensors", "not safetensors"), r"model\.safetensors is damaged or truncated"),
        (write("model.safetensors", ""), r"model\.safetensors is damaged or truncated"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json does not exist"),
        (write("tokenizer.json", "{}"), r"tokenizer\.json cannot be read"),
        (write("tokenizer_config.json", "[]"), r"tokenizer_config\.json holds no JSON object"),
        (write("tokenizer_config.json", "{"), r"tokenizer_config\.json cannot be read"),
    ],
)
def test_damaged_folder(folder: Path, damage: Callable[[Path], Any], named: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=named) as caught:
        load_folder(folder)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({}, "no weight_map"),
        ([1], "no weight_map"),
        ({"a": "../other/model.safetensors"}, "no safetensors file of this folder"),
        ({"a": "pytorch_model.bin"}, "no safetensors file of this folder"),
        ({"a": 3}, "no safetensors file of this folder"),
        ({"a": "model-00003-of-00003.safetensors"}, "does not exist, but"),
    ],
)
def test_damaged_index(tmp_path: Path, weight_map: object, named: str) -> None:
    sharded = write_tiny_model(tmp_path / "m", sharded=True)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=named):
        load_folder(sharded)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer has 300 tokens, the model only 288"):
        load_folder(write_tiny_model(tmp_path / "m", vocab_size=288))


def test_truncated_safetensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    contents = path.read_bytes()
    for length in np.linspace(0, len(contents) - 1, 20, dtype=int):
        path.write_bytes(contents[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged or truncated") as caught:
            load_folder(folder)
        assert "again" in caught.value.remedy


def test_truncated_gguf(tmp_path: Path, gguf_bytes: bytes) -> None:
    path = tmp_path / "m.gguf"
    for length in np.linspace(4, len(gguf_bytes) - 33, 25, dtype=int):
        path.write_bytes(gguf_bytes[:length])
        with pytest.raises(ModelError, match=r"m\.gguf.*truncated"):
            load_gguf(path)
    path.write_bytes(gguf_bytes[: len(gguf_bytes) // 2])
    with pytest.raises(ModelError, match=r"inside the tensor blk\.0\.ffn_down\.weight.*Download the file again"):
        load_gguf(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), change=st.integers(1, 255))
def test_a_gguf_with_one_wrong_byte_loads_or_is_a_model_error(
    tmp_path: Path, gguf_bytes: bytes, place: float, change: int
) -> None:
    metadata_end = gguf_bytes.index(b"token_embd.weight") + 600  # beyond it are weights, where any byte is a number
    damaged = bytearray(gguf_bytes)
    damaged[int(place * metadata_end)] ^= change
    (tmp_path / "m.gguf").write_bytes(damaged)
    with contextlib.suppress(ModelError):
        load_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"GG",
        b"not a model at all, only text",
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
        # one field "k", an array of 2^60 bytes
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    ],
)
def test_not_a_gguf_file(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(contents)
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        load_gguf(path)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer__ggml__pre": "tekken"}, "'tekken'"),
        ({"tokenizer__ggml__model": "bert"}, "'bert'"),
        ({"tokenizer__ggml__merges": ["x y z", "q"]}, "tokenizer is damaged"),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 9999}, "tokenizer is damaged"),
        ({"tokenizer__ggml__tokens": None}, "vocab_size"),
        ({"llama__vocab_size": 304, "tokenizer__ggml__tokens": None}, "no tokenizer"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"split__count": 2}, "one of 2 parts"),
        ({"llama__embedding_length": 128}, r"is \[304, 64\], expected \[304, 128\]"),
    ],
)
def test_gguf_refused_by_name(tmp_path: Path, folder: Path, metadata: dict[str, Any], named: str) -> None:
    path = write_tiny_gguf(folder, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ModelError, match=named) as caught:
        load_gguf(path)
    assert "m.gguf" in caught.value.message


def test_load_model_finds_the_kind(tmp_path: Path, folder: Path) -> None:
    path = write_tiny_gguf(folder, tmp_path / "m.GGUF")
    assert_same_tensors(load_model(path).tensors, load_model(str(folder)).tensors)
    for wrong in ("HuggingFaceTB/SmolLM2-135M", tmp_path / "nothing.gguf"):
        with pytest.raises(ModelError, match="hub:"):
            load_model(wrong)
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        load_model(folder / "config.json")

"""A model's weights, from a safetensors folder or a GGUF file, checked before anything is built on them.

Both come out the same: fp32 tensors under their Hugging Face names. Every tensor that the configuration calls for
must be there in its shape, and no other may be: a tensor that nothing reads means that the model is not what its
configuration says. Nothing here runs code from a model: no pickle, no remote modules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from understudy.errors import ModelError
from understudy.models.config import ModelConfig
from understudy.models.rope_scaling import ROPE_SUPPORTED, RopeScaling
from understudy.models.rotary import inverse_frequencies, llama3_divisors
from understudy.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from understudy.models.gguf_file import GgufFile

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

MEBIBYTE = 2**20
FULL_HASH_BYTES = 256 * MEBIBYTE
"""Files up to this size are hashed whole; of larger ones the name, the size and the first and last MiB."""
AGAIN = "Download the model again, or give a complete one."
FLOAT_KINDS = ("F32", "F16", "BF16")
_UNPACKING_THREADS = 4
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory."""

    config: ModelConfig
    tensors: MutableMapping[str, torch.Tensor]
    """fp32, by Hugging Face name: `model.layers.0.self_attn.q_proj.weight` is [heads * head_dim, hidden].

    With `config.tie_embeddings` there is no `lm_head.weight`. Tensors may be views of a private file mapping, and those
    of a widened model are bf16, each made when it is taken.
    """
    tokenizer: Tokenizer
    name: str
    source_hash: str
    """`sha256:` and the hash of all bytes, or `sha256-sampled:` where files are too large (see FULL_HASH_BYTES)."""


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Give the name and shape of every tensor that the decoder reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, hidden)
            if config.attention_bias:
                yield f"{prefix}.self_attn.{name}.bias", (rows,)
        if config.head_norms:
            yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def load_folder(path: str | Path, *, source_hash: str | None = None) -> LoadedModel:
    """Load a folder with config.json, safetensors (whole or in shards) and tokenizer.json.

    `source_hash` is for a caller who knows the folder's contents already; otherwise it is computed.
    """
    folder = Path(path)
    _refuse_unless_model_folder(folder)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else None
    try:
        config = ModelConfig.from_hugging_face(read_json(folder / "config.json"), generation)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error.message}", error.remedy) from None
    files = _tensor_files(folder)
    tensors = _read_safetensors(folder, files, config)
    tokenizer = Tokenizer.from_folder(folder, eos_ids=config.eos_ids)
    hashed = [
        folder / "config.json",
        folder / "tokenizer.json",
        *(folder / name for name in sorted(set(files.values()))),
    ]
    return _settle(config, tensors, tokenizer, folder, source_hash or hash_files(hashed))


def load_gguf(path: str | Path, *, progress: Progress | None = None) -> LoadedModel:
    """Load a GGUF file of the llama, qwen2 or qwen3 architecture, dequantised to fp32."""
    from understudy.models.gguf_file import GgufFile, hugging_face_name  # a cached or plain folder needs no gguf

    file = Path(path)
    if not file.is_file():
        raise ModelError(f"{file} does not exist or is not a file.", "Give the path of a .gguf file.")
    source = GgufFile(file)
    try:
        config = _gguf_config(source)
        tokenizer = Tokenizer.from_gguf(source.fields, eos_ids=config.eos_ids)
    except ModelError as error:
        raise ModelError(f"{file}: {error.message}", error.remedy) from None
    names = {hugging_face_name(name) or name: name for name in source.names() if name != "rope_freqs.weight"}
    _check(config, {name: source.shape(stored) for name, stored in names.items()}, dict.fromkeys(names, file))
    tensors: dict[str, torch.Tensor] = {}

    def unpacked(item: tuple[str, str]) -> torch.Tensor:
        return torch.from_numpy(source.tensor(item[1], permuted_heads=_permuted_heads(config, item[0])))

    with ThreadPoolExecutor(_UNPACKING_THREADS) as threads:
        for name, tensor in zip(names, threads.map(unpacked, names.items()), strict=True):
            tensors[name] = tensor
            if progress is not None:
                progress(len(tensors), len(names))
    return _settle(config, tensors, tokenizer, file, hash_files([file]))


def hash_files(paths: list[Path]) -> str:
    """Hash files; a single one up to FULL_HASH_BYTES gives its plain SHA-256, as `sha256sum` prints it."""
    sizes = [path.stat().st_size for path in paths]
    whole = sum(sizes) <= FULL_HASH_BYTES
    digest = hashlib.sha256()
    for path, size in zip(paths, sizes, strict=True):
        if len(paths) > 1 or not whole:
            digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if whole:
                while block := file.read(MEBIBYTE):
                    digest.update(block)
            else:
                digest.update(file.read(MEBIBYTE))
                file.seek(max(0, size - MEBIBYTE))
                digest.update(file.read(MEBIBYTE))
    return f"{'sha256' if whole else 'sha256-sampled'}:{digest.hexdigest()}"


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", AGAIN) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.", AGAIN)
    return value


def _refuse_unless_model_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"{folder} does not exist or is not a folder.", "Give a folder that holds a model.")
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}.", "Give a folder that this user may read.") from None
    if not names:
        raise ModelError(f"{folder} is empty.", AGAIN)
    has_weights = any(name.endswith(".safetensors") for name in names)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not has_weights:
        raise ModelError(
            f"{folder} has its weights as pickle only ({pickles[0]}), which can run code when it is read: refused.",
            "Download the safetensors form, or convert it where you trust it "
            "(transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)).",
        )
    gguf_files = [name for name in names if name.endswith(".gguf")]
    if gguf_files and not has_weights:
        raise ModelError(f"{folder} holds GGUF files, not safetensors.", f"Give the file: {folder / gguf_files[0]}")
    if "config.json" not in names or not has_weights:
        raise ModelError(f"{folder} has no {'*.safetensors' if 'config.json' in names else 'config.json'}.", AGAIN)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Map each tensor to the file in this folder that holds it; a tensor's name is unknown until a shard is read."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file() or not index.is_file():
        names = [single.name] if single.is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
        return {name: name for name in names}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.", AGAIN)
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}, which is no safetensors file of this folder.", AGAIN)
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} does not exist, but {index.name} names it.", AGAIN)
    return {str(tensor): str(name) for tensor, name in weight_map.items()}


def _read_safetensors(folder: Path, files: Mapping[str, str], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Check the headers of all files, then take the tensors; fp32 ones stay in the mapped file until they are used."""
    with ExitStack() as stack:
        holders: dict[str, Any] = {}  # tensor -> its open file
        places: dict[str, Path] = {}
        for file in (folder / name for name in sorted(set(files.values()))):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or truncated: {error}.", AGAIN) from None
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if not name.endswith("rotary_emb.inv_freq") and not (
                    config.tie_embeddings and name == "lm_head.weight"
                ):
                    holders[name], places[name] = opened, file
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name, opened in holders.items()}
        _check(config, shapes, places, whole=folder)
        for name, opened in holders.items():
            kind = opened.get_slice(name).get_dtype()
            if kind not in FLOAT_KINDS:
                raise ModelError(f"{places[name]}: {name} is {kind}.", f"Supported are {', '.join(FLOAT_KINDS)}.")
        return {name: opened.get_tensor(name).to(torch.float32) for name, opened in holders.items()}


def _check(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[str, Path],
    *,
    whole: Path | None = None,
) -> None:
    """Refuse a model whose tensors are not exactly those that its configuration calls for."""
    where = whole or next(iter(places.values()), None)
    expected: set[str] = set()
    for name, shape in expected_tensors(config):
        if name not in shapes:
            raise ModelError(f"{where} has no tensor {name} (expected {list(shape)}).", AGAIN)
        if shapes[name] != shape:
            found = list(shapes[name])
            raise ModelError(f"{places[name]}: {name} is {found}, expected {list(shape)} by its configuration.", AGAIN)
        expected.add(name)
    surplus = sorted(shapes.keys() - expected)
    if surplus:
        raise ModelError(
            f"{places[surplus[0]]}: nothing reads {surplus[0]} ({len(surplus)} such): the model is of another kind.",
            "Give a model whose weights are those of its architecture.",
        )


def _gguf_config(source: GgufFile) -> ModelConfig:
    """Complete the configuration with what only the tensors tell: a tied head, and llama3's rotary divisors."""
    names = set(source.names())
    config = replace(ModelConfig.from_gguf(source.fields), tie_embeddings="output.weight" not in names)
    if "rope_freqs.weight" not in names:
        return config
    divisors = source.tensor("rope_freqs.weight")  # [head_dim / 2]
    if config.rope_scaling is not None:
        raise ModelError("rope_freqs.weight together with another rotary scaling is not supported.", ROPE_SUPPORTED)
    if np.all(divisors == 1.0):
        return config
    # The file keeps the divisors but not the parameters. Every published llama3 scaling has those below (the
    # defaults of RopeScaling); the factor is the largest divisor.
    scaling = RopeScaling(kind="llama3", factor=float(divisors.max()))
    computed = llama3_divisors(inverse_frequencies(config), scaling)
    if divisors.shape != computed.shape or not np.allclose(divisors, computed, rtol=1e-4, atol=0.0):
        raise ModelError("rope_freqs.weight is not that of a llama3 scaling: this is not supported.", ROPE_SUPPORTED)
    return replace(config, rope_scaling=scaling)


def _permuted_heads(config: ModelConfig, name: str) -> int:
    """How many heads of a GGUF tensor are in paired rotary order: those of q and k of llama files, else none."""
    if config.architecture != "llama":
        return 0
    if name.endswith("q_proj.weight"):
        return config.num_heads
    return config.num_kv_heads if name.endswith("k_proj.weight") else 0


def _settle(
    config: ModelConfig, tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, path: Path, source_hash: str
) -> LoadedModel:
    """Bring the parts together and check that they speak of the same vocabulary."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}.",
            "Give the tokenizer that belongs to the model.",
        )
    bos_id = tokenizer.bos_id if config.bos_id is None else config.bos_id
    settled = replace(
        config, bos_id=bos_id, eos_ids=tuple(token for token in tokenizer.eos_ids if token < config.vocab_size)
    )
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return LoadedModel(settled, tensors, tokenizer, name, source_hash)

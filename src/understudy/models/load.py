"""One door for every model: nothing for the embedded one, a folder, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from understudy.errors import ModelError
from understudy.models.embedded import load_embedded
from understudy.models.weights import LoadedModel, Progress, load_folder, load_gguf


def load_model(source: str | Path | None, progress: Progress | None = None) -> LoadedModel:
    """Load the embedded model (None), a safetensors folder or a .gguf file."""
    if source is None:
        return load_embedded(progress)
    path = Path(source).expanduser()
    if path.is_dir():
        return load_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return load_gguf(path, progress=progress)
    if path.is_file():
        raise ModelError(f"{path} is neither a folder nor a .gguf file.", "Give the folder that holds the model.")
    raise ModelError(
        f"There is no model at {path}.",
        "Give a folder with config.json and safetensors, or a .gguf file; names on a hub are not looked up yet, so "
        "download the model first. Without a name the embedded model is used.",
    )

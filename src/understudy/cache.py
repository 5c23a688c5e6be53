"""Where things that can be made again are kept: the converted embedded model, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Give the folder for what can be made again: UNDERSTUDY_CACHE, else the user's cache."""
    chosen = os.environ.get("UNDERSTUDY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "understudy"

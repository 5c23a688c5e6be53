"""Where things that can be made again are kept: the converted embedded model, compiled kernels."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Give the folder for what can be made again: UNDERSTUDY_CACHE, else the user's cache."""
    chosen = os.environ.get("UNDERSTUDY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else _home() / ".cache") / "understudy"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir())

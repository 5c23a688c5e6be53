"""How compiled kernels are made: numba, cached on disk under the hash of all their sources.

numba itself renews a cached function only when that function's own file changes, although functions of other files
are compiled into it. A folder named after every source leaves no such trap, and needs no write access to the package.
Where no folder can be written, kernels are compiled anew at every start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from understudy.cache import cache_folder

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_SOURCES = (
    "compiled.py",
    "kernels/simd.py",
    "kernels/cpu_attention.py",
    "kernels/cpu_ops.py",
    "kernels/cpu_linear.py",
    "kernels/cpu_int8.py",
    "kernels/cpu_layer.py",
    "kernels/cpu_drafts.py",
    "sampling/noise.py",
    "sampling/contenders.py",
    "sampling/processors.py",
    "drafters/automaton.py",
    "control/choosing.py",
)


def _writable_folder() -> Path | None:
    """The folder for these sources' kernels, if it can be written."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_PACKAGE / name).read_bytes())
    folder = cache_folder() / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _writable_folder()
numba.config.CACHE_DIR = str(_FOLDER or "")  # type: ignore[attr-defined]


def _compiler(**options: Any) -> Callable[[Function], Function]:
    decorator: Callable[[Function], Function] = numba.njit(
        cache=_FOLDER is not None, nogil=True, error_model="numpy", **options
    )
    return decorator


jit = _compiler()
"""Compile a function of numbers and arrays."""

jit_exact = _compiler(fastmath={"contract"})
"""As `jit`, and a multiply and an add may be fused, but no sum is ever reordered."""

jit_exact_parallel = _compiler(fastmath={"contract"}, parallel=True)
"""As `jit_exact`; its prange loops run on the shared pool of threads."""

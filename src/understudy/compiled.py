"""How compiled kernels are made: numba, cached on disk under the hash of all their sources.

numba itself renews a cached function only when that function's own file changes, although functions of other files
are compiled into it. A folder named after every source leaves no such trap, and needs no write access to the package.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba

from understudy.cache import cache_folder

_PACKAGE = Path(__file__).parent
_SOURCES = (
    "compiled.py",
    "kernels/simd.py",
    "kernels/cpu_ops.py",
    "kernels/cpu_linear.py",
    "sampling/noise.py",
    "sampling/processors.py",
    "drafters/automaton.py",
)


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_PACKAGE / name).read_bytes())
    return digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(  # type: ignore[attr-defined]
    cache_folder() / "kernels" / _sources_hash()
)

jit = numba.njit(cache=True, nogil=True, error_model="numpy")
"""Compile a function of numbers and arrays."""

jit_exact = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
"""As `jit`, with fused multiply-add and no other liberty: no sum is ever reordered."""

jit_exact_parallel = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"}, parallel=True)
"""As `jit_exact`; its prange loops run on the shared pool of threads."""

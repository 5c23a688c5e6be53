"""One pool of threads for torch and for the compiled kernels.

torch brings an OpenMP library of its own and numba looks for the system's. Loaded side by side, each keeps a pool
whose threads spin while they wait for work, and when both are used in turn the two pools fight for the same cores:
single steps were seen to take 40 times as long. The dynamic linker takes a library that is loaded already for any
later one of the same name, so loading the system's before torch leaves one pool for both. A step uses numba's alone,
so a program that imported torch first loses nothing in a step.

Spinning is also bounded: where other processes want the cores, a thread that spins without end keeps out the very
thread it waits for.

This module is imported before anything that might import torch, and itself imports next to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_NUMBAS_OPENMP = "libgomp.so.1.0.0"
_SPINS = "10000"


def share_one_pool() -> None:
    """Load the OpenMP library that both can use, unless torch came first."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    with contextlib.suppress(OSError):  # the system may have none
        ctypes.CDLL(_NUMBAS_OPENMP, mode=ctypes.RTLD_GLOBAL)

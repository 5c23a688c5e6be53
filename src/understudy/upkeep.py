"""What a process that serves does about garbage and memory: for whoever owns the process."""

from __future__ import annotations

import ctypes
import gc
import sys

_NEW_OBJECTS = 50_000
"""Objects between two looks. A step with hundreds of texts makes thousands, and nearly all are gone by its end."""
_OWN_MAPPING_BYTES = 32 * 2**20
_MOST_FREE_BYTES = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def calm_process() -> None:
    """Look for garbage seldom and never at the model, and keep memory that will be wanted again."""
    _calm_process()
    _keep_memory()


def _calm_process() -> None:
    """Leave all that is there now out of every look to come, and look less often.

    One look at all of a small model takes as long as thirty of its steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 50)


def _keep_memory() -> None:
    """Let freed memory be used again instead of giving it back to the system.

    Every pass asks for megabytes and frees them; a page of 4 KiB that comes anew from the system costs up to two
    microseconds, more than is done with it.
    """
    if not sys.platform.startswith("linux"):
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries than GNU's may have none
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        tune(_M_TRIM_THRESHOLD, _MOST_FREE_BYTES)

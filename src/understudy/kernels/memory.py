"""Memory in large pages, for what every pass reads from end to end: weights, keys and values.

A processor remembers where a few thousand pages are. In pages of 4 KiB that is less than a small model's weights, so a
pass looks most of its addresses up anew, and whoever fetches ahead stops at every page's end. In pages of 2 MiB all of
it is remembered. The system gives them where it has them (`madvise`), and small ones where it has not.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PAGE_BYTES = 2 * 2**20
_PIECE_BYTES = 32 * 2**20
_LINE_BYTES = 64


def large_zeros(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Zeros whose memory the system hands out, a large page at a time, when they are written; raises OSError."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not on this system; it was built without
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    first = -everything.ctypes.data % _PAGE_BYTES
    return everything[first : first + num_bytes].view(dtype).reshape(shape)


class Shelf:
    """Hands out parts of large pages to arrays that are smaller than one, as most weights of a small model are.

    A piece is given back when the last array that lies in it is gone.
    """

    def __init__(self) -> None:
        self._piece: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Zeros of their own."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > len(self._piece):
            self._piece = large_zeros((max(num_bytes, _PIECE_BYTES),), np.uint8)
        taken, self._piece = self._piece[:num_bytes], self._piece[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
        return taken.view(dtype).reshape(shape)

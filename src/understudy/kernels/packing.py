"""How the weights of a linear layer are laid out in panels by all cores at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.kernels.simd import LANES

Floats = NDArray[np.float32]
Result = TypeVar("Result")
Zeros = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""Shape and type -> zeros: where panels are to lie."""


def pack_in_parts(pack: Callable[..., Result], weight: Floats, panels: NDArray[Any], scales: Floats) -> list[Result]:
    """Call pack(weight, panels, scales) with all cores, some panels each; what each call returned.

    The threads end here: who has loaded a model can still be forked (stem.py).
    """
    num_parts: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    share = -(-len(panels) // num_parts)
    with ThreadPoolExecutor(num_parts) as threads:

        def part(first: int) -> Result:
            places = slice(first, first + share)
            return pack(weight[first * LANES : (first + share) * LANES], panels[places], scales[places])

        return list(threads.map(part, range(0, len(panels), share)))

"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch, Hopper and later).

A kernel on this path lets its successor start as soon as all its own programs run, and reads nothing that another
kernel wrote before `wait_for_inputs`. What a successor may do until then is what depends on nobody: compute addresses
and ask for its first weights. That hides the start of a kernel behind the end of the last. No value can change by it.

The interpreter on the CPU knows nothing of this, nor do GPUs before Hopper: there `overlap` is off.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LINES_AHEAD = tl.constexpr(2)
"""Lines of the cache, for each output, that are asked for ahead"""

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def can_overlap() -> bool:
    """Whether this GPU can start a kernel ahead of the end of the last."""
    return not IS_INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """What every launch of a kernel on this path is given besides its arguments.

    The compiler may not fuse a multiply with an add of its own accord: two kernels that mean the same arithmetic, or
    two branches of one, could be fused differently.
    """
    return {
        "overlap": can_overlap(),
        "launch_pdl": can_overlap(),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": False,
    }


@triton.jit
def wait_for_inputs(overlap: tl.constexpr):
    """From here on all that earlier kernels wrote can be read; the next kernel may begin to get ready."""
    if overlap:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_for(places):
    """Let what lies at some places be on its way to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_inputs(lines, first, num_inputs, overlap: tl.constexpr):
    """Ask for the first weights of some lines [lines, 1], so that they are in the second-level cache when read.

    Each request is for 64 weights of 16 bits, a line of the cache.
    """
    if overlap:
        places = first + tl.minimum(tl.arange(0, _LINES_AHEAD) * 64, num_inputs - 64)
        ask_for(lines + places[None, :])

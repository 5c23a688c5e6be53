"""Which device computes, and with what kernels. The GPU's are loaded only when one is used: they need Triton."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

import torch

from understudy.core.weights import WEIGHTS_ON, Device, DeviceChoice, WeightType
from understudy.errors import CapacityError, ConfigError
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.interface import Kernels

log = logging.getLogger("understudy.kernels")

_KEPT_FREE_BYTES = 3 << 30
"""On a GPU, for what passes hold while they run, and for their graphs."""
_SHARED_BYTES = 200 << 10
"""Of a GPU's shared memory, what the largest tiles take (cuda_plans.py)."""
_SHARE_OF_GPU = 0.85
_SHARE_OF_CPU = 0.25
_MOST_CPU_BYTES = 2 << 30


def choose_device(wanted: DeviceChoice) -> Device:
    """The device that a choice comes to on this machine. Whoever has a GPU that cannot be used is told why."""
    if wanted == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        reason = "torch finds none, or was built without CUDA"
    else:
        reason = _why_not_this_gpu()
        if reason and wanted == "auto":
            _tell_once(f"The GPU is not used: {reason}.")
    if wanted == "cuda" and reason:
        raise ConfigError(f"No GPU can be used: {reason}.", "Choose device='cpu', or 'auto' to use one where it is.")
    return "cpu" if reason else "cuda"


def _why_not_this_gpu() -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    gpu = torch.cuda.get_device_properties()
    room = getattr(gpu, "shared_memory_per_block_optin", _SHARED_BYTES)  # some builds of torch do not tell
    if room < _SHARED_BYTES:
        return (
            f"a block has {room >> 10} KB of shared memory on an {gpu.name}, and the kernels take up to "
            f"{_SHARED_BYTES >> 10} (Hopper has them)"
        )
    return ""


@lru_cache
def _tell_once(what: str) -> None:
    log.warning(what)


def choose_weights(wanted: WeightType | None, device: Device) -> WeightType:
    """The weights that were asked for, if the device computes with them; else its default."""
    known = WEIGHTS_ON[device]
    if wanted is not None and wanted not in known:
        where = "the CPU" if device == "cpu" else "a GPU"
        raise ConfigError(
            f"Weights of type {wanted} are not computed with on {where}.", f"Choose {' or '.join(known)}."
        )
    return wanted or known[0]


def make_kernels(device: Device, weights: WeightType, *, num_threads: int | None = None) -> Kernels:
    """The kernels of a device, for weights of a type that it computes with."""
    if device == "cpu":
        return CpuKernels(num_threads=num_threads)
    from understudy.kernels.cuda import CudaKernels

    return cast(Kernels, CudaKernels(dtype=torch.bfloat16 if weights == "bf16" else torch.float16))


@contextmanager
def one_thread() -> Iterator[int]:
    """Let torch compute with this thread alone; gives the number that it computes with otherwise."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def packing(name: str, *, wanted_bytes: int) -> Iterator[None]:
    """While weights are packed: a GPU that cannot hold them is an error that says how much they are."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = (count / 2**30 for count in torch.cuda.mem_get_info())
        raise CapacityError(
            f"{name} does not fit on the GPU: its weights take {wanted_bytes / 2**30:.1f} GiB, and of {total:.1f} GiB "
            f"{free:.1f} were free when there was no room for more.",
            "Choose a smaller model or draft, leave the draft out, or compute on the CPU (device='cpu').",
        ) from None


def room_for_cache(device: Device) -> int:
    """Bytes that keys and values may take, of what is free."""
    if device == "cuda":
        torch.cuda.empty_cache()  # what packing the weights has left behind is free, too
        free, _ = torch.cuda.mem_get_info()
        return max(0, int(_SHARE_OF_GPU * (free - _KEPT_FREE_BYTES)))
    return min(_MOST_CPU_BYTES, int(_SHARE_OF_CPU * _free_bytes()))


def device_facts(device: Device) -> dict[str, str]:
    """What names a GPU and what computes on it; nothing for the CPU, which is known by its instructions."""
    if device == "cpu":
        return {}
    import triton

    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": capability,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
    }


def _free_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return 4 * _MOST_CPU_BYTES

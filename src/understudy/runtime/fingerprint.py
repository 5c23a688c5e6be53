"""The name of an installation: everything besides a request and its seed that its words are a function of.

Two answers with the same fingerprint, request and seed are the same token for token. What changes no word (threads,
drafters, batch size, caches, where the model's file lies) is not in it. What might is: the weights and how they are
held, our own version, the libraries that compute, and the vector instructions that they choose by.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version

import llvmlite.binding

from understudy.core.weights import NUMERICS, Device
from understudy.kernels.devices import device_facts

_LIBRARIES = ("understudy", "torch", "numpy", "numba", "llvmlite")
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512vnni")


def system_fingerprint(source_hash: str, *, weights: str, is_row_invariant: bool, device: Device = "cpu") -> str:
    """Hash the parts into a name such as `fp_1f0c9e2b7a64d305`."""
    parts = {
        "model": source_hash,
        "weights": weights,
        "numerics": NUMERICS,
        "device": device,
        **device_facts(device),
        "machine": platform.machine(),
        "instructions": instructions(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "self_test": is_row_invariant,
    }
    return "fp_" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def instructions() -> list[str]:
    """The vector instructions of this processor that arithmetic is chosen by."""
    features = llvmlite.binding.get_host_cpu_features()
    return [name for name in _INSTRUCTIONS if features.get(name)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"

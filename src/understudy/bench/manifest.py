"""What a run was measured on and with: without this a number means nothing."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from understudy import __version__
from understudy.bench.prompts import Prompt
from understudy.bench.statistics import BOOTSTRAP_SEED, CONFIDENCE, NUM_RESAMPLES

_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8")
_ARM_FLAGS = ("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2")
_PACKAGES = ("torch", "numpy", "numba", "llvmlite", "tokenizers", "safetensors", "gguf")

DEFINITIONS = {
    "busy time": "during which at least one request was unanswered",
    "tokens_per_s": "tokens of all answers by the busy time",
    "speedup": "tokens_per_s by the baseline's over turns with the same work; with the same tokens, the ratio of times",
    "speedup_low, speedup_high": (
        f"bootstrap over turns: {NUM_RESAMPLES} resamples, {CONFIDENCE:.0%}, seed {BOOTSTRAP_SEED}; "
        "with a single turn, the point itself"
    ),
    "acceptance_rate": "accepted by drafted positions of the longest path of each draft",
    "acceptance_by_position": "matched at the position by walks that came to it",
    "tokens_per_cycle": "emitted tokens by verify passes",
    "rows_per_cycle": "rows of a verify pass for one sequence: 1 and the drafted ones",
    "bandwidth_gb_s": (
        "what the target's passes must read (weights without the embedding's table, keys and values of their texts) "
        "by the seconds until their words were seen, in 1e9 bytes per second"
    ),
    "cycle_time": "mean seconds of a cycle: draft; forward (verify); sample (the host, of which hidden_s while the "
    "next cycle was under way); other (between cycles)",
    "ttft_ms": "from submission, in an open loop from the time the request was due, to the first token",
    "tpot_ms": "from the first token to the last, by the tokens after the first",
    "request_ms": "from the same start as ttft_ms to the end",
    "percentiles": "over requests, linear between neighbours",
    "identical": "text, token ids and finish reason are the baseline's; for a URL, text and finish reason",
}


def hardware() -> dict[str, Any]:
    """Describe this machine."""
    info = _cpu_info()
    flags = set(info.get("flags", info.get("features", "")).split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "num_cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "flags": [flag for flag in (*_FLAGS, *_ARM_FLAGS) if flag in flags],
        "kernel": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for a package that is not there."""
    found: dict[str, str | None] = {"understudy": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit(folder: Path | None = None) -> dict[str, Any]:
    """Name the commit that our source is at, and whether it was changed since; both None outside of a checkout."""
    unknown = {"commit": None, "dirty": None}
    here = folder or Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", str(here)) is None:
        return unknown  # no checkout, or one that happens to lie around an installed package
    head = _git(here, "rev-parse", "HEAD")
    if head is None:
        return unknown
    top = _git(here, "rev-parse", "--show-toplevel")
    return {"commit": head, "dirty": bool(_git(Path(top or here), "status", "--porcelain"))}


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Hash what is asked, in order: two runs with the same hash asked the same."""
    lines = [[prompt.prompt_class, [dict(message) for message in prompt.messages], prompt.text] for prompt in prompts]
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo, where there is such a file."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return None

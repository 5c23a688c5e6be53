"""How long a later start takes, in a process of its own: the model is converted and the kernels are compiled already.

The aim is five seconds on an idle machine. Test machines are shared, so the bound here is generous, is stretched while
more processes want to run than there are cores, and the best of a few attempts counts; `pytest -s` prints what was
measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import understudy

BOUND_S = 15.0
MOST_ATTEMPTS = 3
LIGHT_IMPORT_BOUND_S = 1.0

STARTUP = """
import json, sys, time
started = time.perf_counter()
import understudy
light = time.perf_counter()
has_torch = "torch" in sys.modules
import understudy.llm
imported = time.perf_counter()
llm = understudy.LLM()
ready = time.perf_counter()
(result,) = llm.generate("Once upon a time", understudy.SamplingParams(temperature=0, max_tokens=8))
print(json.dumps({
    "import understudy": light - started,
    "import torch and the rest": imported - light,
    "LLM()": ready - imported,
    "eight words": time.perf_counter() - ready,
    "ready": ready - started,
    "torch came with the light import": has_torch,
    "words": len(result.token_ids),
}))
"""


def start() -> dict[str, float]:
    """Start once in a new process and return what each part took, in seconds."""
    source = Path(understudy.__file__).parents[1]
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", STARTUP],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def bound_s() -> float:
    """Fifteen seconds, or as much longer as the machine is overcommitted."""
    return BOUND_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.embedded
def test_a_later_start_is_quick() -> None:
    """The first attempt may be the one that fills the caches; a quick one ends the test."""
    for _ in range(MOST_ATTEMPTS):
        measured = start()
        print(measured)
        assert measured["words"] == 8
        if measured["ready"] < BOUND_S:
            break
    assert measured["ready"] < bound_s()
    assert not measured["torch came with the light import"]
    assert measured["import understudy"] < LIGHT_IMPORT_BOUND_S

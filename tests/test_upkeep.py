"""A process that serves looks for garbage seldom, and asks the system for memory once."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import gc, resource
import numpy as np
from understudy.upkeep import calm_process

model = [[] for _ in range(10_000)]
{calm}
assert (gc.get_freeze_count() >= 10_000) == {is_calm}


def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        kept = [np.ones((8, 49152), np.float32) for _ in range(12)]  # freed all at once, as a text's rows are
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


num_faults()
print(num_faults())
"""


def faults(calm: bool) -> int:
    code = STEPS.format(calm="calm_process()" if calm else "", is_calm=calm)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's C library")
def test_memory_that_was_freed_is_used_again() -> None:
    assert faults(calm=True) < faults(calm=False) / 10

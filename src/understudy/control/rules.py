"""Rules of thumb that hold until something is measured, and give way to it.

They are what people who run speculation in production agree on: begin with a depth of four, less where the temperature
is high; below 40 % acceptance it is probably not worth it; what a draft takes of the memory is missing elsewhere. (That
it is to be far smaller than its target and of the same family is told where it is loaded: models/draft_check.py.)
"""

from __future__ import annotations

START_DEPTH = 4
LEAST_ACCEPTANCE = 0.40
"""Below this a drafter is off for a class, unless it was measured to gain all the same."""
RETURN_ACCEPTANCE = 0.45
"""It comes back from this on: the two are apart so that it does not flap."""
KNOWN_PROPOSALS = 24.0
"""Proposals after which a class, a drafter and a temperature are known, and the depth rule needs no cap."""


def start_depth(temperature: float) -> int:
    """How deep to draft for a class of which nothing is known: four, one less for every half degree."""
    return max(1, START_DEPTH - int(2.0 * temperature))


def memory_notice(*, draft_bytes: int, kv_bytes_per_sequence: int) -> str:
    """What a draft's memory would have held instead; empty if not even one sequence."""
    num_sequences = draft_bytes // max(1, kv_bytes_per_sequence)
    if num_sequences < 1:
        return ""
    plural = "sequence" if num_sequences == 1 else "sequences"
    return (
        f"the draft takes {draft_bytes / 2**20:.0f} MiB, which would hold the keys and values of "
        f"{num_sequences} more {plural} of full length"
    )

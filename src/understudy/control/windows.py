"""Short windows of random length in which a treatment holds for everybody, and what each of them came to.

The lot of a window and its length, 2 to 6 s, are hashes of the salt and the window's number, so nobody's traffic can
fall into step with them. A window begins and ends with the engine's cycles: where nobody asks for anything, time stands
still. Its first half second is left out: it still has drafts and caches of the window before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from understudy.control.experiment import Experiment
from understudy.core.events import Cycle

SHORTEST_S, LONGEST_S = 2.0, 6.0
LEFT_OUT_S = 0.5
_FEWEST_TOKENS = 16
"""A window with fewer says nothing."""


@dataclass(slots=True)
class Window:
    """One window, and what was seen of it."""

    number: int
    opened_s: float
    length_s: float
    waited_s: float = 0.0
    """Seconds of all cycles, once for each of their sequences."""
    num_tokens: int = 0
    num_ended: int = 0
    num_failed: int = 0

    @classmethod
    def open(cls, experiment: Experiment, number: int, now_s: float) -> Window:
        """The window of that number, from now on."""
        length_s = SHORTEST_S + (LONGEST_S - SHORTEST_S) * experiment.place_of(f"length of window {number}")
        return cls(number, now_s, length_s)

    @property
    def unit(self) -> str:
        """What its lot is drawn for."""
        return f"window {self.number}"

    def is_over(self, now_s: float) -> bool:
        """Whether the next one is due."""
        return now_s >= self.opened_s + self.length_s

    def add(self, cycle: Cycle, now_s: float) -> None:
        """Count a cycle. One that reads a prompt is left out: its time is not that of its words."""
        if now_s >= self.opened_s + LEFT_OUT_S and not cycle.num_prompt_rows:
            self.waited_s += cycle.total_s * cycle.num_sequences
            self.num_tokens += cycle.num_emitted

    def ended(self, is_failed: bool) -> None:
        """Count a request that ended."""
        self.num_ended += 1
        self.num_failed += is_failed

    @property
    def log_time_per_token(self) -> float | None:
        """Seconds that a sequence waited for a token; None if the window says nothing."""
        if self.num_tokens < _FEWEST_TOKENS or self.waited_s <= 0.0:
            return None
        return math.log(self.waited_s / self.num_tokens)

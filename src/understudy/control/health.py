"""Acceptance as a sign of health: a sudden fall or rise means that something has changed that nobody announced.

A fall: the drafts' state may be corrupt, or the traffic is another. A rise: a text repeats itself, or a drafter was put
right. Two averages are kept, a quick and a slow one; when they are further apart than chance explains, that is an
alarm, and both begin anew where things stand now, so that one change is told once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_QUICK = 1.0 / 16.0
_SLOW = 1.0 / 256.0
_LEAST_DRAFTED = 48.0
"""Drafted words before anything can be called sudden."""
_LEAST_CHANGE = 0.3
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Acceptance was `before` for long, and is `after` now."""

    kind: Literal["fall", "rise"]
    before: float
    after: float


@dataclass(slots=True)
class Health:
    """The acceptance of one drafter for one class, or within one text."""

    _quick: float = 0.0
    _slow: float = 0.0
    _num_drafted: float = 0.0

    def observe(self, *, drafted: int, accepted: int) -> Alarm | None:
        """Count the drafted words of a step; an alarm if they show a sudden change."""
        if not drafted:
            return None
        share = accepted / drafted
        self._num_drafted += drafted
        # a plain mean at first, so that the first few words are not taken for the usual
        self._quick += max(min(1.0, _QUICK * drafted), min(1.0, drafted / self._num_drafted)) * (share - self._quick)
        self._slow += max(min(1.0, _SLOW * drafted), min(1.0, drafted / self._num_drafted)) * (share - self._slow)
        change = self._quick - self._slow
        # the quick average rests on 2 / _QUICK words or so
        error = math.sqrt(max(0.01, self._slow * (1.0 - self._slow)) * _QUICK / 2.0)
        if self._num_drafted < _LEAST_DRAFTED or abs(change) < max(_LEAST_CHANGE, _STANDARD_ERRORS * error):
            return None
        alarm = Alarm("rise" if change > 0 else "fall", self._slow, self._quick)
        self._slow, self._num_drafted = self._quick, _LEAST_DRAFTED / 2.0
        return alarm

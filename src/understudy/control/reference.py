"""When to take a plain step among those with drafts, so that what a plain step takes stays known.

Every so often; soon, where steps with drafts take longer or shorter than predicted, since that may be the drafted
rows or the whole machine, and only a plain step tells which; and once more after a plain step that was itself a
surprise, which may have been a disturbance. As long as plain steps do not end the doubt, it has to wait twice as long
each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_DRAFTED_STEPS = 64
"""Steps with drafts in a row, at most."""
_LEAST_DRAFTED_STEPS = 2
"""Before doubt is acted on."""
_DOUBT = 0.1
"""Logarithm of measured over predicted time that is a surprise."""
_WEIGHT = 0.125
_MOST_SURPRISE = math.log(2.0)
"""A single step says no more than this."""


@dataclass(slots=True)
class Reference:
    """Says when a plain step is due."""

    _num_drafted: int = 0
    """Steps with drafts since the last plain one."""
    _doubt: float = 0.0
    """By how much more these were mispredicted than plain steps are, lately."""
    _usual: float = 0.0
    """By how much plain steps are mispredicted: more than a little only where the cost model cannot follow."""
    _patience: int = _LEAST_DRAFTED_STEPS
    _again: bool = False

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be plain."""
        in_doubt = abs(self._doubt) > _DOUBT and self._num_drafted >= self._patience
        return self._again or in_doubt or self._num_drafted >= _MOST_DRAFTED_STEPS

    def observe(self, ratio: float, *, is_plain: bool) -> None:
        """Count a step that took so many times as long as predicted."""
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, math.log(ratio))) if ratio > 0.0 else 0.0
        if not is_plain:
            self._num_drafted += 1
            self._doubt += _WEIGHT * (surprise - self._usual - self._doubt)
            return
        was_drafted = self._num_drafted > 0
        if was_drafted:
            in_doubt = abs(self._doubt) > _DOUBT
            self._patience = min(_MOST_DRAFTED_STEPS, 2 * self._patience) if in_doubt else _LEAST_DRAFTED_STEPS
        self._again = was_drafted and abs(surprise - self._usual) > _DOUBT
        self._usual += _WEIGHT * (surprise - self._usual)
        self._num_drafted, self._doubt = 0, 0.0

"""Whether a step was disturbed: its cores were given to somebody else while it was computed.

Whoever computes on a CPU that others use, too, is interrupted now and then: a step of four milliseconds takes forty.
That says nothing of what rows or asking cost, but written down beside drafts it would be speculation's debt, and
nothing would be drafted for hundreds of steps. So the thread's own clock is held against the wall's, and a step in
which the thread did not run for much of the time is left out of ledgers, costs and what asking is worth, drafted or
plain.

Where many steps are like that, that is how things are on this machine, and all of them count.

After a pause a process finds its memory laid aside by the system, and the first steps that touch it again may take
twenty times as long. Of the first steps after one, those that took several times what was expected are left out, too.
"""

from __future__ import annotations

from collections.abc import Callable

_LEAST_SHARE = 0.25
"""Of a step: a thread that waited for less was hardly disturbed."""
_MOST_DISTURBED = 0.25
"""Share of the latest steps above which disturbances are what steps are like."""
_WEIGHT = 1.0 / 16.0
_PAUSE_S = 1.0
_FIRST_STEPS = 32
"""After a pause, that may find their memory laid aside."""
_MOST_EXPECTED = 4.0
"""Times what was expected that such a step may take and still count."""


class Disturbance:
    """Looks at every step of an engine."""

    def __init__(self, running: Callable[[], float] | None) -> None:
        """`running`: for how long the thread that computes has run; None where that says nothing."""
        self._running = running
        self._began_s = 0.0
        self._ran_s = 0.0
        self._share = 0.0  # of the latest steps, that were disturbed
        self._ended_s: float | None = None
        self._num_first = 0  # steps that are still the first after a pause

    def begin(self, now_s: float) -> None:
        """Note that a step begins."""
        self._began_s = now_s
        if self._ended_s is None or now_s - self._ended_s > _PAUSE_S:
            self._num_first = _FIRST_STEPS
        if self._running is not None:
            self._ran_s = self._running()

    def leaves_out(self, now_s: float, expected_s: float) -> bool:
        """Whether the step that ends was disturbed, as few are. To be asked once for each step."""
        if self._running is None:
            return False
        self._ended_s = now_s
        self._num_first = max(0, self._num_first - 1)
        passed_s, ran_s = now_s - self._began_s, self._running() - self._ran_s
        if self._num_first and passed_s > _MOST_EXPECTED * expected_s:
            return True
        is_disturbed = ran_s < (1.0 - _LEAST_SHARE) * passed_s
        self._share += _WEIGHT * (is_disturbed - self._share)
        return is_disturbed and self._share <= _MOST_DISTURBED

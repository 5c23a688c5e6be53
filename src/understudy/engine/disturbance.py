"""Whether a step was disturbed: its cores were given to somebody else while it was computed.

Whoever computes on a CPU that others use, too, is interrupted now and then: a step of four milliseconds takes forty.
That says nothing of what rows or asking cost, but written down beside drafts it would be speculation's debt, and
nothing would be drafted for hundreds of steps. So the thread's own clock is held against the wall's, and a step in
which the thread did not run for much of the time is left out of ledgers, costs and what asking is worth, drafted or
plain.

Where many steps are like that, that is how things are on this machine, and all of them count.
"""

from __future__ import annotations

from collections.abc import Callable

_LEAST_SHARE = 0.25
"""Of a step: a thread that waited for less was hardly disturbed."""
_MOST_DISTURBED = 0.25
"""Share of the latest steps above which disturbances are what steps are like."""
_WEIGHT = 1.0 / 16.0


class Disturbance:
    """Looks at every step of an engine."""

    def __init__(self, running: Callable[[], float] | None) -> None:
        """`running`: for how long the thread that computes has run; None where that says nothing."""
        self._running = running
        self._began_s = 0.0
        self._ran_s = 0.0
        self._share = 0.0  # of the latest steps, that were disturbed

    def begin(self, now_s: float) -> None:
        """Note that a step begins."""
        self._began_s = now_s
        if self._running is not None:
            self._ran_s = self._running()

    def leaves_out(self, now_s: float) -> bool:
        """Whether the step that ends was disturbed, as few are. To be asked once for each step."""
        if self._running is None:
            return False
        passed_s, ran_s = now_s - self._began_s, self._running() - self._ran_s
        is_disturbed = ran_s < (1.0 - _LEAST_SHARE) * passed_s
        self._share += _WEIGHT * (is_disturbed - self._share)
        return is_disturbed and self._share <= _MOST_DISTURBED

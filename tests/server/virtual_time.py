"""An event loop on which time passes only when there is nothing else to do: hours of waiting in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when no task can run."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, min(timers))
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

"""What was decided, by whom and why: the last decisions, in memory, in the log, and for whoever else listens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from understudy.core.events import Decided

log = logging.getLogger("understudy.server")

MOST_DECISIONS = 10_000
"""Older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision with its time and its author."""

    time_s: float
    """Since 1970."""
    what: str
    subject: str
    outcome: str
    reason: str
    who: str


class Journal:
    """The decisions of a server, and of its earlier lives where something was kept of them."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)  # the oldest first
        self.listeners: list[Callable[[Decision], None]] = []
        """Hear every decision at once. They must not raise, and must not take long."""

    def add(self, decided: Decided, *, who: str) -> None:
        """Note a decision."""
        decision = Decision(time.time(), decided.what, decided.subject, decided.outcome, decided.reason, who)
        self._decisions.append(decision)
        log.info("%s: %s %s: %s (%s)", decided.what, decided.subject, decided.outcome, decided.reason, who)
        for listener in self.listeners:
            listener(decision)

    def restore(self, decisions: Iterable[Decision]) -> None:
        """Put what an earlier life decided, the oldest first, before what this one did."""
        later = list(self._decisions)
        self._decisions.clear()
        self._decisions.extend([*decisions, *later])

    def find(self, *, limit: int, what: str | None = None, subject: str | None = None) -> list[Decision]:
        """The newest first. A subject such as `code, suffix` is found under all of it and under each part."""
        found = (
            decision
            for decision in reversed(self._decisions)
            if (what is None or decision.what == what)
            and (subject is None or subject in (decision.subject, *decision.subject.split(", ")))
        )
        return list(islice(found, limit))

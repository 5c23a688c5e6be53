"""Tells a person what an engine wants known, once each: what did not go the first way, and what something costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.core.events import Event, Fallback, Notice

if TYPE_CHECKING:
    from rich.console import Console


class Teller:
    """A sink of events that prints those meant for people, and remembers them."""

    def __init__(self, console: Console) -> None:
        self.notes: list[str] = []
        """What was told, in order."""
        self._console = console

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Fallback):
            self._tell(f"{event.what}: {event.reason}")
        elif isinstance(event, Notice):
            self._tell(f"{event.what}: {event.text}")

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            self._console.print(f"note: {note}", markup=False, soft_wrap=True)

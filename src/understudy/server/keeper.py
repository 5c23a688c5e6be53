"""What survives a restart, and how things stood when the engine was last asked.

The engine is asked every few seconds while it works. What it has learned is kept under the model that it was learned
with, so that another model never begins with these numbers; and so is whatever else has a state to keep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from understudy.control.classes import TEMPERATURES
from understudy.core.backend import Backend
from understudy.core.control import ControlView, Learned
from understudy.core.events import Ended, Event
from understudy.errors import EngineLost
from understudy.server.journal import Journal
from understudy.server.store import LEARNED, ControlStore

log = logging.getLogger("understudy.server")

POLL_S = 10.0
EXPLAIN_S = 2.0
"""An engine that says nothing for this long is asked again later."""


class Stateful(Protocol):
    """Whatever has a state that JSON can hold."""

    def export(self) -> Any:
        """The state as it is now."""

    def restore(self, state: Any) -> None:
        """Go on with a state that was exported before."""


class Keeper:
    """Keeps what is learned, decided and tried. Without a file it only asks."""

    def __init__(self, backend: Backend, journal: Journal, file: Path | None) -> None:
        self._backend = backend
        self._journal = journal
        self._store = None if file is None else ControlStore(file)
        self._stateful: dict[str, Stateful] = {}
        self._documents: dict[str, bytes] = {}  # as they are in the file
        self._has_worked = False
        self._is_open = False
        self._num_failures = 0  # of the file, when its documents were last compared
        self.on_view: Callable[[ControlView], None] = lambda view: None
        """Hears how things stand, whenever the engine was asked."""
        backend.listen(self._hear, Ended)

    @property
    def num_failures(self) -> int:
        """How often something could not be read or written."""
        return 0 if self._store is None else self._store.num_failures

    def keep(self, name: str, stateful: Stateful) -> None:
        """Keep the state of this under a name. Said before `open`, which restores it."""
        assert not self._is_open, "what was kept has been handed out already"
        self._stateful[name] = stateful

    async def open(self) -> None:
        """Take up what an earlier life left."""
        if self._store is None:
            return
        stored = await self._store.read()
        self._documents = dict(stored.documents)
        self._journal.restore(stored.decisions)
        self._journal.listeners.append(self._store.add)
        for name, stateful in self._stateful.items():
            if name in stored.documents:
                self._restore(name, stateful, stored.documents[name])
        self._is_open = True  # not before: what is not restored yet must not take the place of what was kept

    def recall(self) -> None:
        """Let the engine know what was learned with its model. Said when it is ready: only then is the model known."""
        document = self._documents.get(self._learned_name)
        if document is None:
            return
        try:
            self._backend.remember(_plausible(msgspec.json.decode(document, type=Learned)))
        except msgspec.MsgspecError as error:
            log.warning("what was learned earlier cannot be read, and is learned anew: %s", error)

    async def look(self) -> ControlView | None:
        """Ask the engine how things stand, and keep what it has learned; None where it does not answer in time."""
        if self._backend.state.phase != "ready":
            return None
        self._has_worked = False
        try:
            async with asyncio.timeout(EXPLAIN_S):
                view = await self._backend.explain()
        except (TimeoutError, EngineLost):
            self._has_worked = True  # it is asked again
            return None
        self._put(self._learned_name, view.learned)
        self.on_view(view)
        return view

    def save(self) -> None:
        """Keep every state that has changed, and all of them after something could not be written."""
        if self.num_failures != self._num_failures:
            self._num_failures = self.num_failures
            self._documents.clear()
        for name, stateful in self._stateful.items():
            try:
                self._put(name, stateful.export())
            except Exception:  # whatever it is, serving goes on
                log.exception("the state of %s cannot be kept", name)

    async def watch(self) -> None:
        """Ask and keep, again and again, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Ask if anything was computed since the last time, and keep what has changed."""
        if self._has_worked:
            await self.look()
        self.save()

    async def close(self) -> None:
        """Write what waits."""
        self.save()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    # within

    @property
    def _learned_name(self) -> str:
        """Acceptance is a matter of the target and of the draft model."""
        info = self._backend.info
        return f"{LEARNED}{info.system_fingerprint} {info.draft}"

    def _hear(self, event: Event) -> None:
        self._has_worked = True

    def _put(self, name: str, state: object) -> None:
        if self._store is None or not self._is_open:
            return
        document = msgspec.json.encode(state)
        if document != self._documents.get(name):
            self._documents[name] = document
            self._store.put(name, document)

    @staticmethod
    def _restore(name: str, stateful: Stateful, document: bytes) -> None:
        try:
            stateful.restore(msgspec.json.decode(document))
        except Exception:  # a state that cannot be understood is begun anew
            log.exception("the state of %s cannot be taken up, and is begun anew", name)


def _plausible(learned: Learned) -> Learned:
    """Without numbers that no counting can come to: the file is only a file, and the engine trusts what it is given."""
    return replace(
        learned,
        rates=tuple(rate for rate in learned.rates if 0 <= rate.hits <= rate.trials and rate.index >= 0),
        breakers=tuple(
            breaker
            for breaker in learned.breakers
            if breaker.rest_steps >= 0 and 0 <= breaker.temperature_band < len(TEMPERATURES)
        ),
        answer_lengths={name: length for name, length in learned.answer_lengths.items() if length >= 0},
    )

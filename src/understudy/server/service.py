"""The one way from a request to its words: a place in the queue, the backend, and everybody who keeps count."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from understudy.core.backend import Backend
from understudy.core.events import Decided, Event, Fallback
from understudy.core.request import Output
from understudy.errors import CapacityError, EngineLost, InvalidRequest
from understudy.server.admission import Admission, Overloaded, Place
from understudy.server.audit import AuditLog
from understudy.server.config import ServerConfig
from understudy.server.exchange import Exchange, Outcome
from understudy.server.experiments import Experiments
from understudy.server.journal import Journal
from understudy.server.keeper import Keeper
from understudy.server.record import Recorder
from understudy.server.shadow import Shadows
from understudy.server.switchboard import Switchboard
from understudy.text.tokenizer import Tokenizer

_NUM_FALLBACKS = 50


class Observer(Protocol):
    """Who wants to know of every request: metrics, records."""

    def ended(self, exchange: Exchange) -> None:
        """See what a request came to. Must not raise, and must not take long."""


class Service:
    """What the routes are given."""

    def __init__(self, backend: Backend, config: ServerConfig, *, observers: list[Observer] | None = None) -> None:
        self.backend = backend
        self.config = config
        self.admission = Admission(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_per_tenant=config.max_per_key,
            timeout_s=config.queue_timeout_s,
            request_timeout_s=config.request_timeout_s,
        )
        self.switchboard = Switchboard(
            backend, AuditLog(config.audit_file), file=config.switch_file, max_depth=config.max_depth
        )
        self.journal = Journal()
        self.keeper = Keeper(backend, self.journal, config.state_file)
        self.shadows = Shadows(backend, self.admission, self.switchboard, decide=self.decide, share=config.shadow_share)
        self.keeper.keep("parity", self.switchboard)
        self.keeper.keep("shadows", self.shadows)
        self.switchboard.on_decision = self._flipped
        self.observers = [*(observers or []), self.shadows]
        self.on_ignored_fields: Callable[[Iterable[str]], None] = lambda names: None
        """Hears of the fields of requests that had no effect."""
        self.recorder: Recorder | None = None
        if config.record_dir is not None:
            self.recorder = Recorder(
                config.record_dir, max_bytes=config.record_max_bytes, max_age_s=config.record_max_age_s
            )
            self.observers.append(self.recorder)
        self.experiments = Experiments(backend, self.switchboard, decide=self.decide)
        self.observers.append(self.experiments)
        self.keeper.keep("experiments", self.experiments)
        self._tokenizer: tuple[str, Tokenizer] | None = None
        self.fallbacks: deque[dict[str, str]] = deque(maxlen=_NUM_FALLBACKS)
        """What did not go the first way lately, and why, the oldest first."""
        backend.listen(self._hear, Fallback, Decided)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Fallback):
            time_of_day = datetime.now(UTC).isoformat(timespec="seconds")
            self.fallbacks.append({"time": time_of_day, "what": event.what, "reason": event.reason})
        elif isinstance(event, Decided):
            self.decide(event)

    def decide(self, decided: Decided, who: str = "controller") -> None:
        """Let it be known that something was decided, and by whom."""
        self.journal.add(decided, who=who)

    def _flipped(self, decided: Decided, who: str) -> None:
        self.decide(decided, who)
        self.keeper.save()  # what must outlive a crash is written now

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return self.config.served_name or self.backend.info.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, read once for every life of the engine."""
        info = self.backend.info
        if self._tokenizer is None or self._tokenizer[0] != info.tokenizer_folder:
            tokenizer = Tokenizer.from_folder(Path(info.tokenizer_folder), eos_ids=info.eos_ids)
            self._tokenizer = (info.tokenizer_folder, tokenizer)
        return self._tokenizer[1]

    async def answer(self, exchange: Exchange) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request. Closing the iterator aborts it, wherever it is.

        If the backend dies before the first word, nobody has seen anything: it is asked once more.
        """
        async with self._accounted(exchange) as place:
            for is_last in (False, True):
                try:
                    await place.wait_for(self.backend.wait_ready())
                    exchange.admitted_s = time.monotonic()
                    async with contextlib.aclosing(self.backend.generate(exchange.request)) as outputs:
                        async for output in place.in_time(outputs):
                            exchange.saw(output)
                            yield output
                    return
                except EngineLost:
                    if is_last or exchange.num_tokens or self.backend.state.phase == "stopped":
                        raise

    @contextlib.asynccontextmanager
    async def _accounted(self, exchange: Exchange) -> AsyncGenerator[Place, None]:
        """A place for a request; whatever becomes of it there, everybody who keeps count is told."""
        exchange.outcome = "cancelled"  # unless it comes to something else
        if self.recorder is not None or self.shadows.wants(exchange):
            exchange.answers = {}
        request, caller = exchange.request, exchange.caller
        # only an admin may go before those who ask for nothing special
        priority = request.priority if caller.is_admin else max(0, request.priority)
        places = self.admission.place(tenant=caller.tenant, priority=priority, num_choices=request.sampling.n)
        try:
            await self.shadows.give_way()
            async with places as place:
                yield place
            if exchange.outcome == "cancelled":  # no choice of it ended with an error
                exchange.outcome = "finished"
        except Exception as error:
            exchange.outcome = _outcome(error)
            raise
        finally:
            exchange.ended_s = time.monotonic()
            for observer in self.observers:
                observer.ended(exchange)


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, InvalidRequest | CapacityError):
        return "refused"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "lost" if isinstance(error, EngineLost) else "error"

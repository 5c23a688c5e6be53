"""Our engine in a process of its own: started, listened to, and started again when it dies or hangs.

The engine's process holds no request that is not being computed, so its death costs only those: each ends with a clear
error, and whoever waits for a place waits a little longer. What was switched off stays off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, TypeVar, get_args

from msgspec import Raw

from understudy.config import EngineConfig
from understudy.core.backend import BackendState, EngineCheck, EngineLoad, ModelInfo, Taker
from understudy.core.control import ControlView, Learned, PassCosts
from understudy.core.events import Ended, Event, EventSink, Fallback, Preempted
from understudy.core.request import Output, Request
from understudy.core.switches import ALL_ON, Switches
from understudy.errors import CapacityError, EngineLost, InvalidRequest, ModelError
from understudy.server.mailbox import Mailbox
from understudy.server.processes import Process, Processes
from understudy.wire.frames import Frames, frame, reports, unpack_tally
from understudy.wire.messages import (
    Abort,
    Check,
    Checked,
    Command,
    Explain,
    Explained,
    Failed,
    Ready,
    Recall,
    Refused,
    Report,
    Start,
    Stepped,
    Submit,
    Switch,
    Told,
)

log = logging.getLogger("understudy.server")

Answer = TypeVar("Answer")

STEP_TIMEOUT_S = 60.0
"""An engine that has work and says nothing for this long hangs."""
START_TIMEOUT_S = 1800.0
_MOST_BACKOFF_S = 30.0
_MOST_UNTOLD = 256


class EngineProcess(asyncio.Protocol):
    """A Backend."""

    def __init__(
        self,
        model: str | None,
        config: EngineConfig,
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self._model = model
        self._config = config
        self._step_timeout_s = step_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="understudy-", ignore_cleanup_errors=True)
        self._processes = Processes()
        self._mail: dict[str, Mailbox] = {}
        self._switches = ALL_ON
        self._sinks: dict[type[Event], list[EventSink]] = {kind: [] for kind in get_args(Event)}
        self._untold: deque[Raw] = deque()  # the tallies of steps, packed
        self._tells_at_once = False
        self._state = BackendState("starting")
        self._info: ModelInfo | None = None
        self._load = EngineLoad()
        self._newest: Raw | None = None  # the last tally, which says more of it
        self._failure: ModelError | None = None
        self._checks: list[asyncio.Future[EngineCheck]] = []
        self._explanations: list[asyncio.Future[ControlView]] = []
        self._learned = Learned()
        self._cost: PassCosts | None = None  # as the first engine measured it
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._frames = Frames()
        self._process: Process | None = None
        self._heard_s = 0.0
        self._supervision: asyncio.Task[None] | None = None
        self._num_failures = 0
        self.num_restarts = 0

    # what a server asks

    @property
    def state(self) -> BackendState:
        """Whether it can answer now."""
        return self._state

    @property
    def info(self) -> ModelInfo:
        """What it serves."""
        assert self._info is not None, "asked before it was ever ready"
        return self._info

    @property
    def load(self) -> EngineLoad:
        """How full it was after its last step."""
        newest = self._newest  # nothing is written here: any thread may ask
        return self._load if newest is None else unpack_tally(newest).load

    @property
    def pid(self) -> int | None:
        """The engine's process, once it was ready and while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the engine and wait until it is ready. A first start that fails is not tried again."""
        await self._spawn()
        ready, gone = asyncio.create_task(self._ready.wait()), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait({ready, gone}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            gone.cancel()
        if not self._ready.is_set():
            await self.close()
            raise self._failure or ModelError("The engine's process ended before it was ready.", "See its messages.")
        self._supervision = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Return when it can answer."""
        await self._ready.wait()
        if self._state.phase == "stopped":
            raise EngineLost("The server is being stopped.")

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request until every choice has ended; closing the iterator aborts it."""
        if not self._ready.is_set() or self._state.phase == "stopped":
            raise EngineLost("The engine is being started again.", "Ask again in a few seconds.")
        request_id = request.request_id
        assert request_id not in self._mail, "every request has an id of its own"
        if not self._mail:  # it had nothing to say until now
            self._heard_s = time.monotonic()
        mailbox = self._mail[request_id] = Mailbox(request.sampling.n, lambda: self._send(Abort(request_id)))
        try:
            self._send(Submit(request))
            while not mailbox.is_finished:
                yield await mailbox.take()
        finally:
            del self._mail[request_id]
            if not mailbox.is_finished:
                self._send(Abort(request_id))

    def offer(self, request_id: str, taker: Taker) -> None:
        """Offer the next outputs of a request to a taker while its iterator waits for them."""
        if request_id in self._mail:
            self._mail[request_id].taker = taker

    def switch(self, switches: Switches) -> None:
        """Switch speculation, now and after every restart."""
        self._switches = switches
        self._send(Switch(switches))

    def listen(self, sink: EventSink, *kinds: type[Event], at_once: bool = False) -> None:
        """Let `sink` hear what the engine emits: the events of these kinds, or all of them if none is named."""
        for kind in kinds or get_args(Event):
            self._sinks[kind].append(sink)
        self._tells_at_once = self._tells_at_once or at_once

    def tell_cycles(self) -> None:
        """Let those who listen hear of every step until now.

        Until somebody asks, cycles are kept as they came: while an engine keeps pushing everything else out of the
        processor's caches, reading and counting them takes as long as sending a word. Any thread may ask.
        """
        with contextlib.suppress(IndexError):  # none is left
            while True:
                for cycle in unpack_tally(self._untold.popleft()).cycles:
                    self._emit(cycle)

    async def check(self) -> EngineCheck:
        """Let the engine count its blocks."""
        await self.wait_ready()
        answer: asyncio.Future[EngineCheck] = asyncio.get_running_loop().create_future()
        self._checks.append(answer)
        self._send(Check())
        return await answer

    async def explain(self) -> ControlView:
        """Ask the engine how things stand in its control plane."""
        await self.wait_ready()
        answer: asyncio.Future[ControlView] = asyncio.get_running_loop().create_future()
        self._explanations.append(answer)
        self._send(Explain())
        return await answer

    def remember(self, learned: Learned) -> None:
        """Let the engine go on from this, now and after every restart."""
        self._learned = learned
        self._send(Recall(learned))

    async def close(self) -> None:
        """End the engine's process, and wait until it is gone."""
        self._state = BackendState("stopped")
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._end()
        self._lose("The server is being stopped.")
        self._ready.set()  # whoever waits is told
        await self._processes.close()
        self._folder.cleanup()

    # one life

    async def _spawn(self) -> None:
        self._frames = Frames()
        self._ready.clear()
        self._gone.clear()
        folder = tempfile.mkdtemp(dir=self._folder.name)
        self._process = process = await self._processes.take()
        loop = asyncio.get_running_loop()
        process.transport, _ = await loop.create_unix_connection(lambda: self, sock=process.connection)
        self._heard_s = time.monotonic()
        self._send(Start(self._model, self._config, folder, self._switches, self._learned, self._cost))

    async def _end(self) -> int | None:
        """End this life, and return its process's status."""
        process, self._process = self._process, None
        return None if process is None else await process.end()

    async def _supervise(self) -> None:
        """Wait for the engine's end, and begin again."""
        while True:
            await self._wait_for_end()
            status = await self._end()
            reason = self._failure.message if self._failure else f"its process ended with status {status}"
            self._state = BackendState("restarting", f"the engine died: {reason}")
            log.error("the engine died: %s; starting it again", reason)
            self._emit(Fallback("the engine", f"started again: {reason}"))
            self._lose("The engine died while it computed this answer.")
            if self._num_failures:  # it did not even start: trying again at once would only burn
                await asyncio.sleep(_backoff_s(self._num_failures))
            self._num_failures += 1  # until it is ready
            self.num_restarts += 1
            self._failure = None
            try:
                await self._spawn()
            except OSError as error:  # no memory, no descriptor, no room on the disk: later there may be
                self._failure = ModelError(f"no process could be started: {error}")
                self._gone.set()

    async def _wait_for_end(self) -> None:
        """Return when the connection is lost, or when the engine has been silent for too long with work to do."""
        while not self._gone.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._gone.wait(), timeout=self._step_timeout_s / 4)
            limit_s = self._step_timeout_s if self._ready.is_set() else START_TIMEOUT_S
            # answers that are whole and only wait for their reader are none of the engine's work
            has_work = any(mailbox.is_expecting for mailbox in self._mail.values())
            if (has_work or not self._ready.is_set()) and time.monotonic() - self._heard_s > limit_s:
                log.error("the engine said nothing for %.0f s", limit_s)
                return
            if not has_work and self._ready.is_set():
                self._heard_s = time.monotonic()

    def _lose(self, message: str) -> None:
        self._load, self._newest = EngineLoad(), None
        for mailbox in self._mail.values():
            mailbox.fail(EngineLost(message, "Ask again; with the same seed the answer will be the same."))
        waiting: list[asyncio.Future[Any]] = [*self._checks, *self._explanations]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineLost(message))
        self._checks.clear()
        self._explanations.clear()

    def _send(self, command: Command) -> None:
        """Send a command. With nobody there it is dropped: what must be known again is told at the next start."""
        if self._process is not None and self._process.transport is not None:
            self._process.transport.write(frame(command))

    # what the engine says: asyncio calls these

    def data_received(self, data: bytes) -> None:
        """Read reports."""
        self._heard_s = time.monotonic()
        for body in self._frames.add(data):
            report = reports.decode(body)
            if type(report) is Stepped:  # every word comes this way: what tells kinds apart costs as much as decoding
                for output in report.outputs:
                    self._deliver(output)
                self._keep(report.tally)
            else:
                self._hear(report)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is gone, or will be: to take back what a large one held takes a while."""
        if self._state.phase == "ready":
            self._state = BackendState("restarting", "the engine died")
        self._ready.clear()
        self._gone.set()

    def _hear(self, report: Report) -> None:
        match report:
            case Refused():
                if report.request_id in self._mail:
                    self._mail[report.request_id].fail(_refusal(report))
            case Told(fallbacks, notices, decisions, num_preempted):
                events: list[Event] = [*fallbacks, *notices, *decisions, *[Preempted("", 0)] * num_preempted]
                for event in events:
                    self._emit(event)
            case Ready(info, load, cost, pid):
                self._info, self._cost = info, cost
                self._load, self._newest = load, None
                if self._process is not None:
                    self._process.pid = pid
                self._state = BackendState("ready")
                self._num_failures = 0
                self._ready.set()
            case Failed(message, remedy):
                self._failure = ModelError(message, remedy)
            case Checked(check):
                _answer(self._checks.pop(0), check)
            case Explained(view):
                self._learned = view.learned
                _answer(self._explanations.pop(0), view)

    def _keep(self, tally: Raw) -> None:
        self._newest = tally
        if self._tells_at_once:  # here, and not in the thread of whoever asks for numbers: it is never kept
            for cycle in unpack_tally(tally).cycles:
                self._emit(cycle)
            return
        self._untold.append(tally)
        if len(self._untold) >= _MOST_UNTOLD:
            self.tell_cycles()

    def _deliver(self, output: Output) -> None:
        mailbox = self._mail.get(output.request_id)
        if mailbox is not None:
            mailbox.put(output)
        if output.facts is not None and output.finish_reason is not None:
            self._emit(Ended(output.request_id, output.choice, output.finish_reason, output.facts))

    def _emit(self, event: Event) -> None:
        for sink in self._sinks[type(event)]:
            try:
                sink(event)
            except Exception:  # whoever listens (a terminal that was closed) must not cost the engine its life
                log.exception("an event could not be told")


def _answer(asked: asyncio.Future[Answer], found: Answer) -> None:
    if not asked.done():  # whoever asked may have left
        asked.set_result(found)


def _backoff_s(num_failures: int) -> float:
    """How long to wait after so many starts that failed."""
    return min(_MOST_BACKOFF_S, 0.5 * 2.0 ** min(num_failures, 10))


def _refusal(report: Refused) -> InvalidRequest | CapacityError:
    if report.too_large:
        return CapacityError(report.message, report.remedy)
    return InvalidRequest(report.message, report.remedy, parameter=report.parameter)

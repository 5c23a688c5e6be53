"""Who is computed now, who waits, and who is sent away: a bounded queue with deadlines, in the HTTP process.

The engine is given only what it can compute at once. All others wait here, and nothing of theirs is lost when the
engine dies. Who comes next:

* the most urgent; among equals whoever's tenant holds the fewest places; then in order of arrival;
* a request of many choices that does not fit yet is passed by those that do, but by no more than a full house: then
  what comes free is kept for it;
* when the queue is full, the one sent away is the least urgent, then of the tenant with the most waiting, then the
  youngest, whether it is the newcomer or not.

Nobody is let wait in vain: whoever is expected to wait longer than it may is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from understudy.errors import UnderstudyError

Cause = Literal["queue_full", "queue_timeout", "draining", "rate_limit", "engine", "deadline"]

_CODES: dict[Cause, str] = {
    "queue_full": "overloaded",
    "queue_timeout": "queue_timeout",
    "draining": "draining",
    "rate_limit": "rate_limit_exceeded",
    "engine": "engine_restarting",
    "deadline": "deadline_exceeded",
}
_FRESHNESS = 0.1
"""How much the newest request says about how long a place is held."""

T = TypeVar("T")


class Overloaded(UnderstudyError):
    """A request that cannot be taken on now. `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, cause: Cause, retry_after_s: float) -> None:
        super().__init__(message, f"Try again in {retry_after_s:.0f} s.")
        self.cause: Cause = cause
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> str:
        """The cause in the words of the HTTP interface."""
        return _CODES[self.cause]


@dataclass(frozen=True, slots=True)
class Place:
    """The right to be computed, until it is given back."""

    deadline_s: float
    """On the event loop's clock: by then the engine must be ready."""
    ends_s: float | None = None
    """By then the answer must be finished; None lets it take its time."""

    async def wait_for(self, readiness: Awaitable[None]) -> None:
        """Wait for the engine, no longer than the deadline."""
        try:
            async with asyncio.timeout_at(max(self.deadline_s, asyncio.get_running_loop().time() + 0.001)):
                await readiness
        except TimeoutError:
            raise Overloaded("The engine is not ready.", cause="engine", retry_after_s=5.0) from None

    def in_time(self, steps: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """The parts of the answer as they come, for as long as the answer may take."""
        return steps if self.ends_s is None else self._each_before_end(steps)

    async def _each_before_end(self, steps: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        while (step := await self.before_end(anext(steps, None))) is not None:
            yield step

    async def before_end(self, step: Awaitable[T]) -> T:
        """Wait for a part of the answer, no longer than the answer may take."""
        if self.ends_s is None:
            return await step
        try:
            async with asyncio.timeout_at(self.ends_s):
                return await step
        except TimeoutError:
            message = "The answer was not finished in the time that a request may take."
            raise Overloaded(message, cause="deadline", retry_after_s=5.0) from None


@dataclass(eq=False, slots=True)
class _Waiting:
    tenant: str
    priority: int
    number: int
    """In order of arrival."""
    num_places: int
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_passed: int = 0
    """Places that were given to others although it was this one's turn."""


class Admission:
    """Places, and the queue before them. A place is one choice; a request of several takes as many at once."""

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_per_tenant: int | None = None,
        timeout_s: float = 30.0,
        request_timeout_s: float | None = None,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_per_tenant = max_per_tenant
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._numbers = itertools.count()
        self._queue: list[_Waiting] = []
        self._num_requests: Counter[str] = Counter()  # by tenant, running and waiting
        self._num_places: Counter[str] = Counter()  # by tenant, held
        self._mean_hold_s: float | None = None
        self.num_running = 0
        """Choices that hold a place."""
        self.is_draining = False

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def mean_hold_s(self) -> float:
        """How long a place is held, going by the last requests; 0 before the first."""
        return self._mean_hold_s or 0.0

    @contextlib.asynccontextmanager
    async def place(self, *, tenant: str, priority: int = 0, num_choices: int = 1) -> AsyncGenerator[Place, None]:
        """Wait for a place, hold it, and give it back; or raise `Overloaded`."""
        self._refuse_at_the_door(tenant)
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        num_places = min(num_choices, self._max_running)
        waiting = _Waiting(tenant, priority, next(self._numbers), num_places)
        with self._counted(tenant):
            deadline_s = arrived_s + self._longest_wait_s()
            await self._wait(waiting, deadline_s)
            started_s = loop.time()
            try:
                ends_s = None if self._request_timeout_s is None else arrived_s + self._request_timeout_s
                yield Place(arrived_s + self._timeout_s, ends_s)
            finally:
                self._learn(loop.time() - started_s)
                self._give_back(waiting)

    def drain(self) -> None:
        """Take nobody else on; who waits is sent away, who runs goes on."""
        self.is_draining = True
        for waiting in self._queue:
            _send_away(waiting, _draining())
        self._queue.clear()

    def retry_after_s(self) -> float:
        """When a place is likely to be free for somebody who comes now."""
        ahead = 1 + sum(waiting.num_places for waiting in self._queue)
        return min(60.0, max(1.0, self._expected_wait_s(ahead)))

    # at the door

    def check(self, tenant: str) -> None:
        """Raise at once what `place` would raise at once for a request that is not more urgent than others.

        Under a flood, what is sent away must cost next to nothing: this needs nothing of the request but its sender.
        """
        self._refuse_at_the_door(tenant)
        if self.num_running < self._max_running:
            return
        newcomer = _Waiting(tenant, 0, sys.maxsize, 1)
        self._refuse_in_vain(newcomer, self._longest_wait_s())
        if len(self._queue) >= self._max_waiting and self._last([*self._queue, newcomer]) is newcomer:
            raise self._full()

    def _refuse_at_the_door(self, tenant: str) -> None:
        if self.is_draining:
            raise _draining()
        if self._max_per_tenant is not None and self._num_requests[tenant] >= self._max_per_tenant:
            message = f"This key has {self._max_per_tenant} requests running or waiting already."
            raise Overloaded(message, cause="rate_limit", retry_after_s=self.retry_after_s())

    def _longest_wait_s(self) -> float:
        """How long a request may wait: what is admitted later would not be finished in time."""
        if self._request_timeout_s is None:
            return self._timeout_s
        return min(self._timeout_s, max(0.0, self._request_timeout_s - self.mean_hold_s))

    def _expected_wait_s(self, num_places_ahead: int) -> float:
        """Places come free at a rate of all of them in the time that one is held."""
        return self.mean_hold_s * num_places_ahead / self._max_running

    @contextlib.contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        self._num_requests[tenant] += 1
        try:
            yield
        finally:
            self._num_requests[tenant] -= 1
            self._num_requests += Counter()  # forgets tenants of whom nothing is here

    # in the queue

    async def _wait(self, waiting: _Waiting, deadline_s: float) -> None:
        """Return when the place is given. Whatever else happens, it is not held afterwards."""
        self._queue.append(waiting)
        self._let_in()
        if not waiting.admitted.done():
            self._make_room(waiting, deadline_s)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiting.admitted
        except TimeoutError:
            self._leave(waiting)
            raise self._timed_out() from None
        except BaseException:
            self._leave(waiting)
            raise

    def _make_room(self, newcomer: _Waiting, deadline_s: float) -> None:
        """Send the newcomer away if it would wait in vain, or somebody if the queue is too long now."""
        try:
            self._refuse_in_vain(newcomer, deadline_s - asyncio.get_running_loop().time())
        except Overloaded as error:
            self._queue.remove(newcomer)
            _send_away(newcomer, error)
            return
        if len(self._queue) > self._max_waiting:
            last = self._last(self._queue)
            self._queue.remove(last)
            _send_away(last, self._full())

    def _refuse_in_vain(self, newcomer: _Waiting, longest_s: float) -> None:
        ahead = sum(other.num_places for other in self._queue if self._rank(other) < self._rank(newcomer))
        if self._expected_wait_s(ahead) > longest_s:
            raise self._timed_out()

    @staticmethod
    def _last(queue: Sequence[_Waiting]) -> _Waiting:
        """Who goes first when there are too many: the least urgent, then the greediest tenant's, then the youngest."""
        num_by_tenant = Counter(waiting.tenant for waiting in queue)
        return max(queue, key=lambda waiting: (waiting.priority, num_by_tenant[waiting.tenant], waiting.number))

    def _full(self) -> Overloaded:
        return Overloaded("The queue is full.", cause="queue_full", retry_after_s=self.retry_after_s())

    def _let_in(self) -> None:
        while (waiting := self._next()) is not None:
            self._queue.remove(waiting)
            self.num_running += waiting.num_places
            self._num_places[waiting.tenant] += waiting.num_places
            waiting.admitted.set_result(None)

    def _next(self) -> _Waiting | None:
        """Whoever is to be let in now, if anybody can be."""
        num_free = self._max_running - self.num_running
        if not num_free:
            return None
        passed: list[_Waiting] = []
        for waiting in sorted(self._queue, key=self._rank):
            if waiting.admitted.done():  # it was cancelled, and has not noticed yet
                continue
            if waiting.num_places <= num_free:
                for other in passed:
                    other.num_passed += waiting.num_places
                return waiting
            if waiting.num_passed >= self._max_running:
                return None
            passed.append(waiting)
        return None

    def _rank(self, waiting: _Waiting) -> tuple[int, int, int]:
        return waiting.priority, self._num_places[waiting.tenant], waiting.number

    def _leave(self, waiting: _Waiting) -> None:
        """Somebody gives up waiting, perhaps just after being let in."""
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._let_in()  # it may have kept places for itself
        elif not waiting.admitted.cancelled() and waiting.admitted.exception() is None:
            self._give_back(waiting)

    def _give_back(self, waiting: _Waiting) -> None:
        self.num_running -= waiting.num_places
        self._num_places[waiting.tenant] -= waiting.num_places
        self._num_places += Counter()
        self._let_in()

    def _learn(self, held_s: float) -> None:
        known_s = held_s if self._mean_hold_s is None else self._mean_hold_s
        self._mean_hold_s = known_s + _FRESHNESS * (held_s - known_s)

    def _timed_out(self) -> Overloaded:
        message = f"No place comes free within the {self._longest_wait_s():.3g} s that a request may wait."
        return Overloaded(message, cause="queue_timeout", retry_after_s=self.retry_after_s())


def _send_away(waiting: _Waiting, error: Overloaded) -> None:
    if not waiting.admitted.done():
        waiting.admitted.set_exception(error)


def _draining() -> Overloaded:
    return Overloaded("The server is being stopped.", cause="draining", retry_after_s=5.0)

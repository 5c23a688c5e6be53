"""Shadow runs: a share of the answers is computed again in quiet moments, once without drafts and once with them.

All three must have the same words. If they do not, exactness is broken: speculation is switched off altogether (the
source `parity` of the kill switch), and stays off until an admin has looked. The two new runs are alone in the engine,
so their times may be compared; which of them goes first alternates.

A shadow run holds no place, and ends as soon as anybody real asks for something; it may be tried again later. What was
asked is held in memory only. Left out are answers that did not come whole, and those that say little or take long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from understudy.control.classes import OTHER, ClassNames, label_of
from understudy.core.backend import Backend
from understudy.core.events import Decided
from understudy.core.request import Request, Speculation
from understudy.core.switches import OFF
from understudy.errors import UnderstudyError
from understudy.server.admission import Admission
from understudy.server.exchange import Exchange
from understudy.server.switchboard import Switchboard

log = logging.getLogger("understudy.server")

SHADOW_PREFIX = "shadow-"
"""Begins the ids of requests that nobody sent."""
WHO = "shadow run"
QUIET_S = 0.25
"""For so long nobody must have wanted anything."""
_TICK_S = 0.05
_LIMIT_S = 120.0
_MOST_WAITING = 32
_MOST_ATTEMPTS = 3
_MOST_PROMPT_TOKENS = 8192
_MOST_ANSWER_TOKENS = 2048
_SUMMARY_EVERY = 100
_LEAST_URGENT = 2**31 - 1
_ENDPOINTS = ("chat", "completions")
_PLAIN = Speculation(enabled=False)

Words = dict[int, tuple[int, ...]]
"""Token ids by choice."""


@dataclass(slots=True)
class Tally:
    """What the shadow runs of a class came to."""

    num_same: int = 0
    num_different: int = 0
    num_timed: int = 0
    sum_log_speedup: float = 0.0

    @property
    def speedup(self) -> float | None:
        """Time per token without drafts over that with them, the geometric mean; None before the first."""
        return math.exp(self.sum_log_speedup / self.num_timed) if self.num_timed else None


@dataclass(slots=True)
class _Waiting:
    request: Request
    answer: Words
    fingerprint: str
    num_attempts: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    words: Words
    token_s: float | None
    """Per token, after the first output; None if all came at once."""


class Shadows:
    """An observer that keeps a few requests, and a task that repeats them."""

    def __init__(
        self,
        backend: Backend,
        admission: Admission,
        switchboard: Switchboard,
        *,
        decide: Callable[[Decided, str], None],
        share: float,
    ) -> None:
        self._backend = backend
        self._admission = admission
        self._switchboard = switchboard
        self._decide = decide
        self._share = share
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAITING)
        self._has_waiting = asyncio.Event()
        self._classes = ClassNames()
        self._limit: asyncio.Timeout | None = None  # of the run under way
        self._gives_way = False
        self._stopped = asyncio.Event()
        self._quiet_since_s: float | None = None
        self._num_compared = 0
        self.tallies: dict[str, Tally] = {}
        """By class."""
        self.on_compared: Callable[[bool], None] = lambda is_same: None
        """Hears of every answer that was computed again whether its words were the same."""

    # what a service tells

    def wants(self, exchange: Exchange) -> bool:
        """Whether the words of an answer are needed here. It is the request's id that decides, drawn by us."""
        request = exchange.request
        if exchange.endpoint not in _ENDPOINTS or len(request.prompt_ids) > _MOST_PROMPT_TOKENS:
            return False
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._share * 2**64

    def ended(self, exchange: Exchange) -> None:
        """Keep a request for later, if it is one of the share and its answer is whole."""
        request, answers, facts = exchange.request, exchange.answers, exchange.facts
        if exchange.outcome != "finished" or answers is None or not self.wants(exchange):
            return
        is_whole = len(facts) == request.sampling.n and sum(fact.num_tokens for fact in facts) == exchange.num_tokens
        if not is_whole or not 2 <= exchange.num_tokens <= _MOST_ANSWER_TOKENS:
            return
        # the seed that was drawn if none was given; and numbers beside the words, which would only take time
        sampling = replace(request.sampling, seed=facts[0].seed, logprobs=None, prompt_logprobs=None)
        words = {choice: tuple(token_ids) for choice, token_ids in answers.items()}
        fingerprint = self._backend.info.system_fingerprint
        self._waiting.append(_Waiting(replace(request, sampling=sampling), words, fingerprint))
        self._has_waiting.set()

    async def give_way(self) -> None:
        """Return when no shadow run is in the way: at once, or when the one under way was aborted."""
        self._quiet_since_s = None
        if self._limit is None:
            return
        self._gives_way = True
        with contextlib.suppress(RuntimeError):  # it is ending already
            self._limit.reschedule(asyncio.get_running_loop().time())
        await self._stopped.wait()

    def export(self) -> dict[str, object]:
        """What came of it so far, to be kept."""
        return {name: asdict(tally) for name, tally in self.tallies.items()}

    def restore(self, state: Any) -> None:
        """Go on counting from there."""
        tallies = msgspec.convert(state, dict[str, Tally])
        self.tallies = {self._classes.known(name): tally for name, tally in tallies.items()}
        self._num_compared = sum(tally.num_same + tally.num_different for tally in tallies.values())

    # the task

    async def run(self) -> None:
        """Repeat what waits whenever it is quiet, for ever."""
        while True:
            await self._has_waiting.wait()
            await asyncio.sleep(_TICK_S)
            if self._is_quiet():
                try:
                    await self._repeat_next()
                except Exception:  # of ours: it must not end the task
                    log.exception("a shadow run failed")

    def _is_quiet(self) -> bool:
        """Whether nobody has wanted anything for a while."""
        admission, load = self._admission, self._backend.load
        is_busy = admission.num_running or admission.num_waiting or load.num_running or load.num_waiting
        if is_busy or admission.is_draining or self._backend.state.phase != "ready":
            self._quiet_since_s = None
            return False
        now_s = asyncio.get_running_loop().time()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        return now_s - self._quiet_since_s >= QUIET_S

    async def _repeat_next(self) -> None:
        waiting = self._waiting.popleft()
        if not self._waiting:
            self._has_waiting.clear()
        switches = self._switchboard.effective
        drafted = _drafted(waiting.request.speculation)
        is_off = not switches.depth_of(drafted, waiting.request.workload_class)
        if is_off or waiting.fingerprint != self._backend.info.system_fingerprint:
            return
        runs = await self._alone(waiting, drafted)
        if runs is not None:
            # what was tried before may have been learned from: drafts that know the answer prove nothing about time
            is_timed = not waiting.num_attempts and switches == self._switchboard.effective
            self._judge(waiting, *runs, is_timed=is_timed)

    async def _alone(self, waiting: _Waiting, drafted: Speculation) -> tuple[_Run, _Run] | None:
        """Run without drafts and with them; None if that was not to be."""
        self._gives_way = False
        self._stopped.clear()
        try:
            async with asyncio.timeout(_LIMIT_S) as self._limit:
                if self._num_compared % 2:
                    with_drafts = await self._ask(waiting.request, drafted)
                    return await self._ask(waiting.request, _PLAIN), with_drafts
                return await self._ask(waiting.request, _PLAIN), await self._ask(waiting.request, drafted)
        except TimeoutError:
            waiting.num_attempts += 1
            if self._gives_way and waiting.num_attempts < _MOST_ATTEMPTS:
                self._waiting.append(waiting)
                self._has_waiting.set()
        except UnderstudyError as error:  # the engine died, or cannot serve this any more
            log.info("a shadow run came to nothing: %s", error)
        finally:
            self._limit = None
            self._stopped.set()
        return None

    async def _ask(self, request: Request, speculation: Speculation) -> _Run:
        """Ask the engine. Each setting has a tenant of its own: nobody's cache and drafts are used or added to."""
        asked = replace(
            request,
            request_id=f"{SHADOW_PREFIX}{uuid.uuid4().hex}",
            tenant=f"{WHO} {'with' if speculation.enabled else 'without'} drafts",
            speculation=speculation,
            priority=_LEAST_URGENT,
        )
        words: dict[int, list[int]] = {}
        clock = asyncio.get_running_loop().time
        first_s = last_s = num_first = num_tokens = 0.0
        async with contextlib.aclosing(self._backend.generate(asked)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise UnderstudyError(output.error)
                last_s = clock()
                num_tokens += len(output.token_ids)
                if not words:
                    first_s, num_first = last_s, num_tokens
                words.setdefault(output.choice, []).extend(output.token_ids)
        token_s = (last_s - first_s) / (num_tokens - num_first) if num_tokens > num_first else None
        return _Run({choice: tuple(token_ids) for choice, token_ids in words.items()}, token_s)

    # what it came to

    def _judge(self, waiting: _Waiting, plain: _Run, drafted: _Run, *, is_timed: bool) -> None:
        name = self._classes.known(label_of(waiting.request.workload_class) or OTHER)
        tally = self.tallies.setdefault(name, Tally())
        self._num_compared += 1
        if is_timed and plain.token_s and drafted.token_s:
            tally.num_timed += 1
            tally.sum_log_speedup += math.log(plain.token_s / drafted.token_s)
        is_same = waiting.answer == plain.words == drafted.words
        self.on_compared(is_same)
        if is_same:
            tally.num_same += 1
            self._tell_of_same(name)
            return
        tally.num_different += 1
        reason = f"request {waiting.request.request_id}: " + "; ".join(
            _difference(*named)
            for named in (
                ("the answer", waiting.answer, "a run without drafts", plain.words),
                ("the answer", waiting.answer, "a run with drafts", drafted.words),
                ("a run without drafts", plain.words, "a run with drafts", drafted.words),
            )
        )
        self._decide(Decided("shadow", name, "different", reason), WHO)
        self._switchboard.set("parity", OFF, who=WHO, why=f"other words than were answered: {reason}")

    def _tell_of_same(self, name: str) -> None:
        """The first time, and now and then."""
        if self._num_compared == 1:
            reason = "the first answer that was computed again, without drafts and with them, has the same words"
            self._decide(Decided("shadow", name, "same", reason), WHO)
        elif self._num_compared % _SUMMARY_EVERY == 0:
            told = [
                f"{name} {tally.num_same}" + (f" at {tally.speedup:.2f}x" if tally.speedup is not None else "")
                for name, tally in sorted(self.tallies.items())
            ]
            reason = f"of {self._num_compared} answers computed again these have the same words: {', '.join(told)}"
            self._decide(Decided("shadow", "all", "same", reason), WHO)


def _drafted(allowed: Speculation) -> Speculation:
    """What a request allows, or the default if it allows nothing."""
    return allowed if allowed.enabled and allowed.max_depth and allowed.max_rows else Speculation()


def _difference(first_name: str, first: Words, second_name: str, second: Words) -> str:
    """Where two runs part, without a word of what they say."""
    for choice in sorted({*first, *second}):
        one, other = first.get(choice, ()), second.get(choice, ())
        if one != other:
            place = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                         min(len(one), len(other)))  # fmt: skip
            return f"{first_name} and {second_name} part at token {place} of choice {choice}"
    return f"{first_name} and {second_name} are the same"

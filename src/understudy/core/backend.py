"""The seam between a server and what computes its answers: our engine in its own process, another one, or a fake."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from understudy.core.control import ControlView, Learned
from understudy.core.events import Event, EventSink
from understudy.core.request import Output, Request
from understudy.core.switches import Switches

Phase = Literal["starting", "ready", "restarting", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a backend serves."""

    name: str
    system_fingerprint: str
    max_context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer_folder: str
    """Where the model's tokenizer and chat template can be read from, as `Tokenizer.from_folder` does."""
    drafters: tuple[str, ...] = ()
    draft: str = ""
    """What the draft is called, if there is one."""
    draft_problem: str = ""
    """Why there is no draft although one was asked for, or comes with the package."""
    weights: str = ""
    max_sequences: int = 1
    """Choices that are computed together, at most; more would only wait."""
    max_tokens: int = 0
    """Tokens of prompt and answer that the cache can hold at once."""
    target_bytes: int = 0
    draft_bytes: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether answers can be had now, and if not, why not."""

    phase: Phase
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full an engine is."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What an engine found when it counted its blocks."""

    load: EngineLoad
    num_live_requests: int
    problem: str = ""


Taker = Callable[[Output], bool]
"""Takes an output where it arrives, or says False and has done nothing. It is no task and cannot wait."""


class Backend(Protocol):
    """Answers requests."""

    @property
    def state(self) -> BackendState:
        """Whether it can answer now."""

    @property
    def info(self) -> ModelInfo:
        """What it serves; known once it was ready for the first time."""

    @property
    def load(self) -> EngineLoad:
        """How full it was after its last step."""

    @property
    def num_restarts(self) -> int:
        """How often its engine was started again."""

    async def start(self) -> None:
        """Return when it is ready; what makes that impossible is raised."""

    async def wait_ready(self) -> None:
        """Return when it can answer."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request as they come, until every choice has ended.

        Closing the iterator aborts the request. `InvalidRequest` and `CapacityError` say that it can never be served,
        `EngineLost` that the engine died while it was computed.
        """

    def offer(self, request_id: str, taker: Taker) -> None:
        """Offer the next outputs of a request that runs to a taker while its iterator waits for them.

        What the taker takes is not yielded; the last output of a choice is yielded always. It is a shorter way and no
        other one: a backend may offer what it likes, or nothing.
        """

    def switch(self, switches: Switches) -> None:
        """Switch speculation, now and after every restart."""

    def listen(self, sink: EventSink, *kinds: type[Event], at_once: bool = False) -> None:
        """Let `sink` hear what the engine emits: the events of these kinds, or all of them if none is named.

        Cycles may be kept and told many at a time, unless somebody wants them at once; `tell_cycles` tells those that
        are kept.
        """

    def tell_cycles(self) -> None:
        """Let those who listen hear of every step until now. Any thread may ask."""

    async def check(self) -> EngineCheck:
        """Let the engine count its blocks and compare them with those who hold them."""

    async def explain(self) -> ControlView:
        """How things stand in the control plane, and what it has learned."""

    def remember(self, learned: Learned) -> None:
        """Let the engine go on from this, now and after every restart."""

    async def close(self) -> None:
        """Stop; what was being computed is lost."""

"""A backend without a model: its words are a function of the prompt and the seed, as an engine's are."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core.backend import BackendState, EngineCheck, EngineLoad, ModelInfo, Taker
from understudy.core.control import ControlView, Learned
from understudy.core.events import Ended, Event, EventSink
from understudy.core.request import Facts, Output, Request, SpeculationCounts, TokenLogprob
from understudy.core.switches import ALL_ON, Switches
from understudy.errors import EngineLost, InvalidRequest
from understudy.text.detokenize import Detokenizer
from understudy.text.tokenizer import Tokenizer


@dataclass
class FakeBackend:
    """Says random words of a tokenizer, several at a time where speculation is on, one by one where it is not."""

    info: ModelInfo
    step_s: float = 0.0
    """How long a step takes."""
    first_s: float = 0.0
    """How long a prompt takes."""
    state: BackendState = field(default_factory=lambda: BackendState("ready"))
    load: EngineLoad = field(default_factory=EngineLoad)
    switches: Switches = ALL_ON
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sinks: list[EventSink] = field(default_factory=list)
    num_restarts: int = 0
    num_taken: int = 0
    """Outputs that a taker had."""
    view: ControlView = field(default_factory=ControlView)
    remembered: Learned | None = None

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_folder(Path(self.info.tokenizer_folder), eos_ids=self.info.eos_ids)
        self._takers: dict[str, Taker] = {}
        self._ready = asyncio.Event()
        self._ready.set()

    async def start(self) -> None:
        """There is nothing to load."""

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self.state.phase == "stopped":
            raise EngineLost("The server is being stopped.")

    def die(self) -> None:
        """Lose whatever is running; nothing is answered until `revive`."""
        self.state = BackendState("restarting", "it died")
        self._ready.clear()

    def revive(self) -> None:
        self.state = BackendState("ready")
        self._ready.set()

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        if not self._ready.is_set():
            raise EngineLost("The engine is being started again.")
        if len(request.prompt_ids) >= self.info.max_context:
            raise InvalidRequest("The prompt is too long.", parameter="prompt")
        self.requests.append(request)
        self.running.add(request.request_id)
        ended = False
        try:
            await asyncio.sleep(self.first_s)
            choices = [_Choice(request, choice, self._tokenizer) for choice in range(request.sampling.n)]
            while any(not choice.is_finished for choice in choices):
                for choice in choices:
                    if not choice.is_finished:
                        output = choice.step(self.switches)
                        if output.facts is not None and output.finish_reason is not None:
                            for sink in self.sinks:
                                sink(Ended(request.request_id, choice.index, output.finish_reason, output.facts))
                        if output.finish_reason is not None or not self._take(output):
                            yield output
                await asyncio.sleep(self.step_s)
                if not self._ready.is_set() or self.state.phase == "stopped":
                    raise EngineLost("The engine died while it computed this answer.")
            ended = True
        finally:
            self.running.discard(request.request_id)
            self._takers.pop(request.request_id, None)
            if not ended:
                self.aborted.append(request.request_id)

    def offer(self, request_id: str, taker: Taker) -> None:
        self._takers[request_id] = taker

    def _take(self, output: Output) -> bool:
        is_taken = output.request_id in self._takers and self._takers[output.request_id](output)
        self.num_taken += is_taken
        return is_taken

    def switch(self, switches: Switches) -> None:
        self.switches = switches

    def listen(self, sink: EventSink, *kinds: type[Event], at_once: bool = False) -> None:
        self.sinks.append(sink)  # those hear more than they asked for, and must not mind

    def tell_cycles(self) -> None:
        """It tells nothing of its steps."""

    async def check(self) -> EngineCheck:
        return EngineCheck(self.load, len(self.running))

    async def explain(self) -> ControlView:
        return self.view

    def remember(self, learned: Learned) -> None:
        self.remembered = learned

    async def close(self) -> None:
        self.state = BackendState("stopped")
        self._ready.set()


class _Choice:
    """One answer: random words until the end token or the limit."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self.is_finished = False
        self._request = request
        self._tokenizer = tokenizer
        self._seed = 7 if request.sampling.seed is None else request.sampling.seed
        digest = hashlib.sha256(repr((request.prompt_ids, self._seed, index)).encode()).digest()
        self._draw = random.Random(digest)
        self._detokenizer = Detokenizer(tokenizer, request.sampling.stop)
        self._counts = SpeculationCounts()
        self._said: list[int] = []

    def step(self, switches: Switches) -> Output:
        sampling, request = self._request.sampling, self._request
        depth = switches.depth_of(request.speculation, request.workload_class)
        accepted = min(depth, 2, sampling.max_tokens - len(self._said) - 1)
        tokens: list[int] = []
        text: list[str] = []
        reason: str | None = None
        stop_reason: int | str | None = None
        while len(tokens) <= accepted and reason is None:
            token = self._word()
            tokens.append(token)
            self._said.append(token)
            text.append(self._detokenizer.add(token))
            if self._detokenizer.stopped is not None:
                reason, stop_reason = "stop", self._detokenizer.stopped
            elif len(self._said) >= sampling.max_tokens:
                reason = "length"
        if reason is not None:
            text.append(self._detokenizer.finish())
            self.is_finished = True
        self._count(depth, len(tokens), cut=reason == "stop")
        logprobs = tuple(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in tokens) if sampling.logprobs is not None else ()
        prompt = request.prompt_ids[1:] if sampling.prompt_logprobs is not None else ()
        first = len(self._said) == len(tokens)
        return Output(
            request.request_id,
            self.index,
            tuple(tokens),
            "".join(text),
            logprobs,
            reason,  # type: ignore[arg-type]
            stop_reason,
            sources=("suffix",) * (len(tokens) - 1) + ("",),
            prompt_logprobs=tuple(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in prompt) if first else (),
            facts=Facts(request.workload_class, len(self._said), self._seed, 0, 0, self._counts)
            if reason is not None
            else None,
        )

    def _word(self) -> int:
        while True:
            token = self._draw.randrange(self._tokenizer.vocab_size)
            if token not in self._tokenizer.special_ids and token not in self._tokenizer.eos_ids:
                return token

    def _count(self, depth: int, num_tokens: int, *, cut: bool) -> None:
        counts = self._counts
        counts.cycles += 1
        drafted = min(depth, 4)
        if not drafted:
            return
        accepted = num_tokens if cut else min(num_tokens - 1, drafted)
        counts.drafted += drafted
        counts.rows += drafted
        counts.accepted += accepted
        counts.rejected += 0 if cut else drafted - accepted
        counts.add_walk([True] * accepted + [False] * (accepted < drafted and not cut))
        counts.add_draft(("suffix",) * drafted, range(accepted))
        counts.proposed["suffix"] = counts.proposed.get("suffix", 0) + drafted

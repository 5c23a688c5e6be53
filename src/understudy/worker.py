"""The engine's process, once it has a channel: reads commands between two steps, and tells what every step said.

It ends when the other end of its channel does: nothing is left running. An error in a step ends it too; whoever started
it starts another (stem.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from understudy.assembly import Target, build_engine, load_configured, load_to_fork, tested
from understudy.config import DEFAULT, MODEL, NO_DRAFT, TRAINED_DRAFTERS, EngineConfig, names_a_draft
from understudy.core.backend import EngineCheck, EngineLoad, ModelInfo
from understudy.core.events import Cycle, Decided, Event, Fallback, Notice, Preempted
from understudy.core.request import Request
from understudy.engine.engine import Engine
from understudy.errors import CapacityError, InvalidRequest, UnderstudyError
from understudy.upkeep import calm_process
from understudy.wire.frames import Channel, pack_tally
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
    Start,
    Stepped,
    Submit,
    Switch,
    Tally,
    Told,
)

log = logging.getLogger("understudy.engine")

Made = TypeVar("Made")

_QUIET_S = 0.5
"""Whoever asks again sooner than that does not wait for a pass that is being made ready."""


class Worker:
    """An engine and the channel to whoever asks it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._cycles: list[Cycle] = []
        self._told = Told([], [])
        self._others: list[Command] = []
        self._quiet_s: float | None = 0.0  # how long nobody asks before a pass is made ready; None: all are

    def wait_for_start(self) -> Start:
        """The first command, which says what to load."""
        start, *self._others = self._channel.receive(wait_s=None)
        assert isinstance(start, Start), "the first command says what to load"
        return start

    def load_to_share(self, start: Start) -> Target | None:
        """Load what engines to be forked will share, or tell why that cannot be."""
        try:
            target, problem = _with_draft(
                start.config, lambda config: load_to_fork(start.model, config, emit=self._hear)
            )
        except UnderstudyError as error:
            self._channel.send(Failed(error.message, error.remedy))
            return None
        return replace(target, draft_problem=problem) if problem else target

    def serve(self, start: Start, shared: Target | None) -> int:
        """Serve what was loaded already, or else is loaded now, until the other end is gone; return the exit status."""
        try:
            engine = self._start(start, shared)
            if engine is None:
                return 2
            for command in self._others:
                self._obey(engine, command)
            while True:
                self._turn(engine)
        except (EOFError, ConnectionError):
            return 0

    def _start(self, start: Start, shared: Target | None) -> Engine | None:
        try:
            target, engine = self._build(start, shared)
        except UnderstudyError as error:
            self._channel.send(Failed(error.message, error.remedy))
            return None
        calm_process()
        engine.switch(start.switches)
        engine.recall(start.learned)
        _ = engine.grammars  # made now: the first request with a grammar must not hold up the others
        target.tokenizer.save(Path(start.tokenizer_folder))
        self._tell()
        info = model_info(target, engine, start.tokenizer_folder)
        self._channel.send(Ready(info, load_of(engine), engine.cost.measured, os.getpid()))
        return engine

    def _build(self, start: Start, shared: Target | None) -> tuple[Target, Engine]:
        """A target and an engine around it. Nobody else holds what is loaded here: a draft that fails is gone."""

        def build(config: EngineConfig) -> tuple[Target, Engine]:
            if shared is None:
                target = load_configured(start.model, config, emit=self._hear)
            else:
                has_draft = config.wanted_draft != NO_DRAFT
                target = tested(shared if has_draft else replace(shared, draft=None), self._hear)
            return target, build_engine(target, config, measured=start.cost, emit=self._hear)

        problem = shared.draft_problem if shared is not None and names_a_draft(start.config.wanted_draft) else ""
        if problem:
            built = build(without_draft(start.config))
        else:
            built, problem = _with_draft(start.config, build)
        if not problem:
            return built
        self._hear(Fallback("the draft", f"serving without it: {problem}"))
        target, engine = built
        return replace(target, draft_problem=problem), engine

    def _turn(self, engine: Engine) -> None:
        commands = self._channel.receive(wait_s=0.0 if engine.has_work else self._quiet_s)
        for command in commands:
            self._obey(engine, command)
        if engine.has_work:
            self._quiet_s = None if self._quiet_s is None else _QUIET_S
            outputs = engine.step()
            cycles, self._cycles = self._cycles, []
            self._channel.send(Stepped(outputs, pack_tally(Tally(load_of(engine), cycles))))
        elif not commands:
            self._quiet_s = 0.0 if engine.prepare() else None
        self._tell()

    def _obey(self, engine: Engine, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(engine, request)
            case Abort(request_id):
                engine.abort(request_id)
            case Switch(switches):
                engine.switch(switches)
            case Check():
                self._channel.send(Checked(check(engine)))
            case Explain():
                self._channel.send(Explained(engine.explain()))
            case Recall(learned):
                engine.recall(learned)
            case Start():
                raise AssertionError("an engine starts once")

    def _submit(self, engine: Engine, request: Request) -> None:
        try:
            engine.submit(request)
        except (InvalidRequest, CapacityError) as error:
            parameter = getattr(error, "parameter", None)
            too_large = isinstance(error, CapacityError)
            self._channel.send(Refused(request.request_id, error.message, error.remedy, parameter, too_large))

    def _hear(self, event: Event) -> None:
        if isinstance(event, Cycle):
            self._cycles.append(event)
        elif isinstance(event, Fallback):
            self._told.fallbacks.append(event)
        elif isinstance(event, Notice):
            self._told.notices.append(event)
        elif isinstance(event, Decided):
            self._told.decisions.append(event)
        elif isinstance(event, Preempted):
            self._told.num_preempted += 1

    def _tell(self) -> None:
        told = self._told
        if told.fallbacks or told.notices or told.decisions or told.num_preempted:
            self._channel.send(told)
            self._told = Told([], [])


def _with_draft(config: EngineConfig, make: Callable[[EngineConfig], Made]) -> tuple[Made, str]:
    """Make something with the draft that was asked for, or if that fails without it, and with the reason.

    A draft is no condition for an answer: without it the words are the same.
    """
    try:
        return make(config), ""
    except Exception as error:
        if not names_a_draft(config.wanted_draft):
            raise
        problem = str(error) or type(error).__name__
    # here the error is gone, and with it what had been made
    return make(without_draft(config)), problem


def without_draft(config: EngineConfig) -> EngineConfig:
    """The same configuration with no draft."""
    drafters = tuple(name for name in config.drafters if name not in (MODEL, *TRAINED_DRAFTERS))
    return replace(config, draft=NO_DRAFT, drafters=drafters or (DEFAULT,))


def model_info(target: Target, engine: Engine, tokenizer_folder: str) -> ModelInfo:
    """What a server needs to know of an engine."""
    model = target.decoder.config
    kv_tokens = engine.num_blocks * target.page_tokens
    return ModelInfo(
        name=target.name,
        system_fingerprint=target.system_fingerprint,
        max_context=engine.max_context,
        vocab_size=model.vocab_size,
        eos_ids=tuple(model.eos_ids),
        tokenizer_folder=tokenizer_folder,
        drafters=tuple(engine.drafter_names),
        draft="" if target.draft is None else target.draft.name,
        draft_problem=target.draft_problem,
        weights=target.weights,
        max_sequences=engine.config.max_sequences,
        max_tokens=kv_tokens,
        target_bytes=target.num_bytes,
        draft_bytes=0 if target.draft is None else target.draft.num_bytes,
        kv_bytes=kv_tokens * target.kv_bytes_per_token,
    )


def load_of(engine: Engine) -> EngineLoad:
    """How full an engine is."""
    return EngineLoad(*engine.num_sequences, engine.num_free_blocks, engine.num_blocks)


def check(engine: Engine) -> EngineCheck:
    """Compare the blocks' counts with those who hold them."""
    try:
        engine.check()
        problem = ""
    except AssertionError as error:
        problem = str(error) or "the counts differ"
    return EngineCheck(load_of(engine), engine.num_live_requests, problem)

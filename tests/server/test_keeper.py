"""What a server knows after a restart: what was learned with its model, what was decided, what was tried."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import fake_service
from tests.tiny_models import write_tiny_model
from understudy.config import EngineConfig
from understudy.core.backend import BackendState
from understudy.core.control import ControlView, Learned, LearnedBreaker, LearnedRate
from understudy.core.events import Decided, Ended, Event
from understudy.core.request import Facts, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.core.switches import OFF
from understudy.server import keeper as keeper_module
from understudy.server import store as store_module
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.run import listen, serve
from understudy.server.service import Service
from understudy.server.supervisor import EngineProcess

LEARNED = Learned(
    rates=(LearnedRate("position", "code", 0, "suffix", 2, 3.25, 7.5),),
    breakers=(LearnedBreaker("chat", 2, "ngram", "off", "too little was accepted", 400),),
    answer_lengths={"code": 81.5},
)
WORKED = Ended("r", 0, "stop", Facts("code", 3, 1, 0, 0, SpeculationCounts(cycles=2)))


class Trials:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.state: Any = None

    def export(self) -> Any:
        return self.state

    def restore(self, state: Any) -> None:
        self.state = state


def service_of(tmp_path: Path, **settings: Any) -> Service:
    config = ServerConfig(port=0, state_file=tmp_path / "state" / "s.sqlite", **settings)
    return fake_service(tmp_path, config)


@asynccontextmanager
async def living(service: Service) -> AsyncGenerator[Service, None]:
    """A server from its start to its end, with everything but requests over HTTP."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    ready = asyncio.Event()
    serving = asyncio.create_task(serve(service, app, listen(service.config), on_ready=ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        yield service
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await serving
    assert asyncio.all_tasks() == {asyncio.current_task()}, "something was left running"


async def live(service: Service) -> Service:
    async with living(service):
        pass
    return service


def fake(service: Service) -> Any:
    """The backend, with what only a fake has."""
    return service.backend


def tell(service: Service, event: Event) -> None:
    for sink in fake(service).sinks:
        sink(event)


def worked(service: Service, learned: Learned) -> None:
    fake(service).view = ControlView(learned=learned)
    tell(service, WORKED)


def test_what_was_learned_decided_and_tried_survives(tmp_path: Path) -> None:
    async def test() -> None:
        first, trials = service_of(tmp_path), Trials()
        first.keeper.keep("experiments", trials)
        async with living(first):
            assert fake(first).remembered is None
            trials.state = {"arms": [1, 2], "name": "depth"}
            worked(first, LEARNED)
            tell(first, Decided("breaker", "code, suffix", "off", "it lost time"))
            first.switchboard.set("parity", OFF, who="shadow run", why="other words")
        second, trials = service_of(tmp_path), Trials()
        second.keeper.keep("experiments", trials)
        async with living(second):
            assert fake(second).remembered == LEARNED
            assert trials.state == {"arms": [1, 2], "name": "depth"}
            breaker, flip, again = reversed(second.journal.find(limit=10))
            assert (breaker.outcome, breaker.reason, breaker.who) == ("off", "it lost time", "controller")
            assert (flip.what, flip.subject, flip.outcome, flip.who) == ("switch", "parity", "off", "shadow run")
            assert (again.subject, again.reason) == ("parity", "other words")
            assert not second.switchboard.effective.enabled
            assert not fake(second).switches.enabled
            second.switchboard.clear("parity", who="an admin", why="mended")
        third = await live(service_of(tmp_path))
        assert third.switchboard.effective.enabled
        assert third.keeper.num_failures == 0

    asyncio.run(test())


@pytest.mark.parametrize("other", [{"system_fingerprint": "fp_other"}, {"draft": "another draft"}])
def test_numbers_of_another_model_are_not_used(tmp_path: Path, other: dict[str, str]) -> None:
    async def test() -> None:
        async with living(service_of(tmp_path)) as first:
            worked(first, LEARNED)
        second = service_of(tmp_path)
        fake(second).info = replace(fake(second).info, **other)
        async with living(second):
            assert fake(second).remembered is None
            worked(second, Learned())
        third = await live(service_of(tmp_path))
        assert fake(third).remembered == LEARNED, "each has its own"

    asyncio.run(test())


def test_engine_is_asked_while_it_works_and_not_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.01)

    async def test() -> None:
        service = service_of(tmp_path)
        views: list[ControlView] = []
        service.keeper.on_view = views.append
        async with living(service):
            await asyncio.sleep(0.1)
            assert not views
            worked(service, LEARNED)
            await asyncio.sleep(0.1)
            assert len(views) == 1
        assert len(views) == 1, "nothing was computed since"

    asyncio.run(test())


def test_engine_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.01)
    monkeypatch.setattr(keeper_module, "EXPLAIN_S", 0.01)

    async def test() -> None:
        service = service_of(tmp_path)
        views: list[ControlView] = []
        service.keeper.on_view = views.append
        explain = service.backend.explain

        async def silent() -> ControlView:
            await asyncio.sleep(60)
            raise AssertionError

        async with living(service):
            fake(service).explain = silent
            worked(service, LEARNED)
            assert await service.keeper.look() is None
            await asyncio.sleep(0.05)
            fake(service).explain = explain
            await asyncio.sleep(0.1)
            assert len(views) == 1
            fake(service).state = BackendState("restarting")
            assert await service.keeper.look() is None

    asyncio.run(test())


def test_what_no_counting_can_come_to_is_left_out(tmp_path: Path) -> None:
    async def test() -> None:
        async with living(service_of(tmp_path)) as first:
            good = LEARNED.rates[0]
            bad = (replace(good, hits=-1.0), replace(good, hits=9.0), replace(good, index=-1), good)
            worked(first, Learned(rates=bad, answer_lengths={"a": -1.0}))
        second = await live(service_of(tmp_path))
        assert fake(second).remembered == Learned(rates=(good,))

    asyncio.run(test())


@pytest.mark.parametrize("document", [b"{", b"[]", b'{"rates": [{"kind": "guess"}]}', b"\xff"])
def test_documents_that_cannot_be_understood(tmp_path: Path, document: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with living(service_of(tmp_path)) as first:
            worked(first, LEARNED)
            first.switchboard.set("parity", OFF, who="shadow run", why="other words")
        file = first.config.state_file
        assert file is not None
        with sqlite3.connect(file) as connection:
            connection.execute("UPDATE documents SET value = ?", (document,))
        connection.close()
        second = await live(service_of(tmp_path))
        assert fake(second).remembered is None
        assert second.switchboard.effective.enabled
        assert "learned anew" in caplog.text

    asyncio.run(test())


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BUSY_S", 0.02)

    async def test() -> None:
        async with living(service_of(tmp_path)) as first:
            file = first.config.state_file
            assert file is not None
            other = sqlite3.connect(file, isolation_level=None)
            other.execute("BEGIN EXCLUSIVE")
            first.switchboard.set("parity", OFF, who="shadow run", why="other words")
            async with asyncio.timeout(10):
                while first.keeper.num_failures < 3:  # the decision, and two documents
                    await asyncio.sleep(0.01)
            other.execute("ROLLBACK")
            other.close()
        second = await live(service_of(tmp_path))
        assert not second.switchboard.effective.enabled

    asyncio.run(test())


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    async def test() -> None:
        service = fake_service(tmp_path, ServerConfig(port=0))
        async with living(service):
            worked(service, LEARNED)
            assert await service.keeper.look() is not None
        assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}

    asyncio.run(test())


def test_end_of_the_server_ends_a_shadow_run(tmp_path: Path) -> None:
    async def test() -> None:
        service = service_of(tmp_path, shadow_share=1.0)
        async with living(service):
            fake(service).step_s = 0.01
            request = Request(request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=500))
            assert [output async for output in service.answer(Exchange(request, Caller(), "chat"))]
            async with asyncio.timeout(10):
                while not fake(service).running:
                    await asyncio.sleep(0.01)
        (aborted,) = fake(service).aborted
        assert aborted.startswith("shadow-")

    asyncio.run(test())


def test_a_real_engine_goes_on_from_what_it_had_learned(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=5, tie_word_embeddings=False)
    config = ServerConfig(port=0, state_file=tmp_path / "s.sqlite", shadow_share=0.0)

    def new_service() -> Service:
        return Service(EngineProcess(str(model), EngineConfig(num_threads=1, kv_tokens=4096)), config)

    async def learned_by(service: Service) -> Learned:
        view = await service.keeper.look()
        assert view is not None
        return view.learned

    async def test() -> None:
        async with living(new_service()) as first:
            assert (await learned_by(first)).rates == ()
            request = Request(
                request_id="a",
                prompt_ids=(1, 40, 41, 42, 40, 41, 42, 40, 41),
                sampling=SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True),
                speculation=Speculation(forced=True),
                workload_class="code",
            )
            async with aclosing(first.answer(Exchange(request, Caller(), "chat"))) as outputs:
                assert [output async for output in outputs]
            learned = await learned_by(first)
            assert {rate.workload_class for rate in learned.rates} == {"code"}
        async with living(new_service()) as second:
            assert set((await learned_by(second)).rates) == set(learned.rates)
            backend = second.backend
            assert isinstance(backend, EngineProcess)
            os.kill(backend.pid or 0, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not backend.num_restarts or backend.state.phase != "ready":
                    await asyncio.sleep(0.05)
            assert set((await learned_by(second)).rates) == set(learned.rates), "an engine that died goes on from there"

    asyncio.run(test())

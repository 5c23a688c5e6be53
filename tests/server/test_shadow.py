"""Shadow runs: which answers are repeated, when, what they find, and that nobody real waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_backend import FakeBackend
from tests.server.serving import model_info, tokenizer_folder
from tests.server.virtual_time import run_virtual
from tests.server.watched import value
from understudy.core.backend import BackendState, EngineLoad
from understudy.core.request import Output, Request, SamplingParams, Speculation
from understudy.core.switches import OFF, Switches
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.metrics import Metrics
from understudy.server.service import Service
from understudy.server.shadow import QUIET_S, SHADOW_PREFIX

Story = Callable[["Stage"], Awaitable[None]]
STEP_S = 0.01


@dataclass
class Crowded(FakeBackend):
    """A step takes longer the more is computed together, as an engine's does."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                await asyncio.sleep(STEP_S * len(self.running))
                yield output


@dataclass
class Lying(FakeBackend):
    """Without drafts its words are others, from the tenth on."""

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        num_tokens = 0
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                num_tokens += len(output.token_ids)
                if num_tokens > 10 and not request.speculation.enabled:
                    output = output._replace(token_ids=tuple(token + 1 for token in output.token_ids))
                yield output


@dataclass
class Stage:
    backend: FakeBackend
    service: Service
    metrics: Metrics

    async def ask(self, name: str, *, endpoint: str = "chat", **fields: Any) -> list[int]:
        sampling = SamplingParams(**{"max_tokens": 40, **fields.pop("sampling", {})})
        request = Request(**{"workload_class": "code", **fields}, request_id=name, prompt_ids=(1, 2), sampling=sampling)
        exchange = Exchange(request, Caller(), endpoint)
        return [token async for output in self.service.answer(exchange) for token in output.token_ids]

    @property
    def shadows(self) -> list[Request]:
        return [request for request in self.backend.requests if request.request_id.startswith(SHADOW_PREFIX)]

    def told(self) -> list[tuple[str, str, str]]:
        return [(made.what, made.subject, made.outcome) for made in reversed(self.service.journal.find(limit=100))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tokenizer_folder(tmp_path))


def play(
    folder: Path, story: Story, *, backend: type[FakeBackend] = FakeBackend, share: float = 1.0, **settings: Any
) -> Stage:
    """Tell a story on a clock that jumps, with the shadows' task beside it."""

    async def main() -> Stage:
        fake = backend(model_info(str(folder)), step_s=STEP_S)
        service = Service(fake, ServerConfig(shadow_share=share, **settings))
        stage = Stage(fake, service, Metrics())
        stage.metrics.watch(service)
        shadowing = asyncio.create_task(service.shadows.run())
        try:
            await story(stage)
        finally:
            assert not shadowing.done()
            shadowing.cancel()
        return stage

    return run_virtual(main())


def test_an_answer_is_computed_again_with_and_without_drafts(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a", sampling={"temperature": 0.7, "logprobs": 3}, tenant="somebody", priority=2)
        assert not stage.shadows
        await asyncio.sleep(QUIET_S + 5)

    stage = play(folder, story)
    plain, drafted = stage.shadows
    assert (plain.speculation, drafted.speculation) == (Speculation(enabled=False), Speculation())
    assert plain.prompt_ids == drafted.prompt_ids == (1, 2)
    assert plain.workload_class == drafted.workload_class == "code"
    expected = SamplingParams(max_tokens=40, temperature=0.7, seed=7)
    assert plain.sampling == drafted.sampling == expected, "with the seed that was drawn, without numbers beside"
    assert len({plain.tenant, drafted.tenant, "somebody"}) == 3
    assert plain.priority == drafted.priority == 2**31 - 1
    assert stage.told() == [("shadow", "code", "same")]
    tally = stage.service.shadows.tallies["code"]
    assert (tally.num_same, tally.num_different, tally.num_timed) == (1, 0, 1)
    assert tally.speedup == pytest.approx(39 / 13 * 37 / 39, rel=0.01), "three words a step, after the first output"
    assert value(stage.metrics, "understudy_parity_checks_total", result="same") == 1
    assert value(stage.metrics, "understudy_choices_total") == 1, "what nobody asked for is not counted"
    assert value(stage.metrics, "understudy_generation_tokens_total") == 40


def test_the_order_alternates_and_a_summary_comes_now_and_then(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        for number in range(200):
            await stage.ask(f"r{number}", speculation=Speculation(enabled=number % 3 == 0, max_depth=4))
            await asyncio.sleep(QUIET_S + 3)

    stage = play(folder, story)
    enabled = [request.speculation.enabled for request in stage.shadows]
    assert enabled == [False, True, True, False] * 100
    assert {request.speculation.max_depth for request in stage.shadows if request.speculation.enabled} == {4, 16}
    assert stage.told() == [("shadow", "code", "same"), ("shadow", "all", "same"), ("shadow", "all", "same")]
    assert "code 200 at 2.8" in stage.service.journal.find(limit=1)[0].reason


def test_other_words_switch_speculation_off_until_an_admin_has_looked(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        await stage.ask("b")
        await asyncio.sleep(QUIET_S + 5)
        assert stage.service.switchboard.settings["parity"].who == "shadow run"
        assert not stage.backend.switches.enabled
        assert len(stage.shadows) == 2, "what is off needs no comparison"
        stage.service.switchboard.clear("parity", who="an admin", why="looked")
        assert stage.backend.switches.enabled
        await stage.ask("c")
        await asyncio.sleep(QUIET_S + 5)
        assert not stage.backend.switches.enabled

    stage = play(folder, story, backend=Lying)
    assert stage.told() == [
        ("shadow", "code", "different"),
        ("switch", "parity", "off"),
        ("switch", "parity", "on"),
        ("shadow", "code", "different"),
        ("switch", "parity", "off"),
    ]
    reason = stage.service.journal.find(limit=1, what="shadow")[0].reason
    assert "the answer and a run without drafts part at token 10 of choice 0" in reason
    assert "the answer and a run with drafts are the same" in reason
    assert value(stage.metrics, "understudy_parity_checks_total", result="different") == 2
    assert value(stage.metrics, "understudy_switch_flips_total", source="parity") == 3


@pytest.mark.parametrize("num_at_once", [1, 5])
def test_nobody_real_waits_for_a_shadow(folder: Path, num_at_once: int) -> None:
    took: list[float] = []

    async def real(stage: Stage, name: str) -> None:
        clock = asyncio.get_running_loop().time
        arrived_s = clock()
        await asyncio.gather(*(stage.ask(f"{name}{number}") for number in range(num_at_once)))
        took.append(clock() - arrived_s)

    async def story(stage: Stage) -> None:
        await real(stage, "alone")
        async with asyncio.timeout(5):
            while not stage.shadows:
                await asyncio.sleep(0.001)
        await asyncio.sleep(2.5 * STEP_S)
        assert stage.service.admission.num_running == 0, "a shadow holds no place"
        await real(stage, "beside a shadow")
        (aborted,) = stage.shadows
        assert stage.backend.aborted == [aborted.request_id]
        place = [request.request_id for request in stage.backend.requests].index("beside a shadow0")
        assert stage.backend.requests[place - 1] == aborted
        await asyncio.sleep(100)

    stage = play(folder, story, backend=Crowded, max_running=num_at_once)
    alone_s, beside_s = took
    assert beside_s == pytest.approx(alone_s, abs=1e-9)
    tally = stage.service.shadows.tallies["code"]
    assert tally.num_same == 2 * num_at_once, "it was tried again"
    assert tally.num_timed == 2 * num_at_once - 1, "but not for its time"


def test_given_up_after_some_attempts(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        for number in range(8):
            await asyncio.sleep(QUIET_S + 0.2)  # a shadow has begun
            await stage.ask(f"b{number}", sampling={"max_tokens": 1})
        await asyncio.sleep(60)

    stage = play(folder, story)
    assert len(stage.shadows) == 3
    assert not stage.service.shadows.tallies


def test_only_in_quiet_moments(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        for number in range(20):  # somebody comes every 0.2 s
            await asyncio.sleep(0.8 * QUIET_S)
            await stage.ask(f"b{number}", sampling={"max_tokens": 1})
        assert not stage.shadows
        stage.backend.load = EngineLoad(num_running=1)
        await asyncio.sleep(10)
        stage.backend.load = EngineLoad(num_waiting=1)
        await asyncio.sleep(10)
        stage.backend.load = EngineLoad()
        stage.backend.state = BackendState("restarting")
        await asyncio.sleep(10)
        stage.backend.state = BackendState("ready")
        stage.service.admission.is_draining = True
        await asyncio.sleep(10)
        assert not stage.shadows
        stage.service.admission.is_draining = False
        await asyncio.sleep(10)
        assert len(stage.shadows) == 2

    play(folder, story)


def test_which_answers_are_left_out(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("health", endpoint="health")
        await stage.ask("short", sampling={"max_tokens": 1})
        leaving = asyncio.create_task(stage.ask("left"))
        await asyncio.sleep(3 * STEP_S)
        leaving.cancel()
        dying = asyncio.create_task(stage.ask("lost"))
        await asyncio.sleep(3 * STEP_S)
        stage.backend.die()
        await asyncio.gather(dying, return_exceptions=True)
        stage.backend.revive()
        await asyncio.sleep(10)
        assert not stage.shadows
        await stage.ask("of another model")
        stage.backend.info = replace(stage.backend.info, system_fingerprint="another")
        await asyncio.sleep(10)
        await stage.ask("switched off since")
        stage.service.switchboard.set("admin", Switches(classes_off=frozenset({"code"})), who="me", why="")
        await asyncio.sleep(10)
        assert not stage.shadows

    play(folder, story)


def test_choices_are_compared_each(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a", sampling={"n": 3})
        await asyncio.sleep(10)
        assert [request.sampling.n for request in stage.shadows] == [3, 3]

    assert play(folder, story).service.shadows.tallies["code"].num_same == 1


def test_only_a_share_is_kept(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        for number in range(400):
            await stage.ask(f"r{number}", sampling={"max_tokens": 3})
            await asyncio.sleep(1)

    num = play(folder, story, share=0.1).service.shadows.tallies["code"].num_same
    assert 20 <= num <= 65
    assert not play(folder, story, share=0.0).shadows


def test_no_more_wait_than_fit(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        for number in range(100):
            await stage.ask(f"r{number}", sampling={"max_tokens": 3})
        await asyncio.sleep(100)

    assert len(play(folder, story).shadows) == 64


def test_time_counts_only_if_nothing_was_switched_meanwhile(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        async with asyncio.timeout(5):
            while not stage.shadows:
                await asyncio.sleep(0.001)
        stage.service.switchboard.set("admin", OFF, who="me", why="")
        await asyncio.sleep(10)

    tally = play(folder, story).service.shadows.tallies["code"]
    assert (tally.num_same, tally.num_timed, tally.speedup) == (1, 0, None)


def test_engine_that_dies_under_a_shadow_costs_only_that(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        async with asyncio.timeout(5):
            while not stage.shadows:
                await asyncio.sleep(0.001)
        stage.backend.die()
        await asyncio.sleep(1)
        stage.backend.revive()
        await stage.ask("b")
        await asyncio.sleep(10)

    assert play(folder, story).service.shadows.tallies["code"].num_same == 1


def test_counts_are_taken_up(folder: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.ask("a")
        await asyncio.sleep(10)

    first = play(folder, story).service.shadows
    second = play(folder, lambda stage: asyncio.sleep(0)).service.shadows
    second.restore(first.export())
    assert second.tallies == first.tallies
    with pytest.raises(ValueError, match="Expected"):
        second.restore({"code": {"num_same": "many"}})

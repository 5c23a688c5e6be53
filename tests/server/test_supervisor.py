"""The real backend on a tiny model: one process that is started, asked, killed, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_models import write_tiny_model
from tests.trained_drafts import truncate, write_draft
from understudy.assembly import load_target
from understudy.config import EngineConfig
from understudy.core.events import Cycle, Ended, Event, Fallback
from understudy.core.request import Output, Request, SamplingParams, Speculation
from understudy.core.switches import OFF, Switches
from understudy.errors import EngineLost, InvalidRequest, ModelError
from understudy.llm import LLM
from understudy.server.processes import Process
from understudy.server.supervisor import EngineProcess, _backoff_s
from understudy.text.tokenizer import Tokenizer

CONFIG = EngineConfig(num_threads=1, kv_tokens=4096)
PROMPT = (1, 40, 41, 42, 40, 41, 42, 40, 41)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=5, tie_word_embeddings=False)


def asked(name: str, *, max_tokens: int = 40, seed: int = 3, forced: bool = False) -> Request:
    sampling = SamplingParams(temperature=0.7, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=PROMPT, sampling=sampling, speculation=Speculation(forced=forced))


async def outputs(backend: EngineProcess, request: Request) -> list[Output]:
    return [output async for output in backend.generate(request)]


def words(found: list[Output]) -> list[int]:
    return [token for output in found for token in output.token_ids]


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncGenerator[EngineProcess, None]:
    backend = EngineProcess(str(folder), CONFIG, **options)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def on_a_backend(folder: Path, test: Callable[[EngineProcess], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with running(folder, **options) as backend:
            await test(backend)

    asyncio.run(run())


def test_words_are_those_of_an_engine_in_this_process(folder: Path) -> None:
    events: list[Event] = []

    async def test(backend: EngineProcess) -> None:
        backend.listen(events.append)
        llm = LLM(folder, config=CONFIG)
        (expected,) = llm.run([asked("here")])
        found = await asyncio.gather(*(outputs(backend, asked(f"there-{i}", forced=i % 2 == 0)) for i in range(4)))
        assert [words(line) for line in found] == [expected.token_ids] * 4
        assert all(line[-1].facts is not None and line[-1].facts.num_tokens == 40 for line in found)
        ended = [event for event in events if isinstance(event, Ended)]
        assert {event.request_id for event in ended} == {f"there-{i}" for i in range(4)}
        backend.tell_cycles()
        assert any(isinstance(event, Cycle) for event in events)
        info = backend.info
        tokenizer = Tokenizer.from_folder(Path(info.tokenizer_folder), eos_ids=info.eos_ids)
        theirs, text = llm.target.tokenizer, "the <|im_end|> cat é"
        assert tokenizer.encode(text) == theirs.encode(text)
        assert (tokenizer.chat_template, tokenizer.eos_ids) == (theirs.chat_template, theirs.eos_ids)
        assert (await backend.check()).problem == ""

    on_a_backend(folder, test)


def test_what_cannot_be_served_is_refused_with_its_field(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        with pytest.raises(InvalidRequest, match="Token 99999 does not exist"):
            await outputs(backend, Request(request_id="a", prompt_ids=(99999,)))
        with pytest.raises(InvalidRequest) as found:
            await outputs(backend, Request(request_id="b", prompt_ids=PROMPT * 1000))
        assert found.value.parameter == "prompt"
        assert words(await outputs(backend, asked("c"))), "and it goes on"

    on_a_backend(folder, test)


def test_an_answer_that_nobody_reads_gives_its_blocks_back(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        for number in range(5):
            async with contextlib.aclosing(backend.generate(asked(f"a{number}", max_tokens=400))) as answer:
                await anext(answer)
        check = await backend.check()  # read before the next step
        await asyncio.sleep(0.2)
        check = await backend.check()
        assert (check.num_live_requests, check.load.num_running, check.problem) == (0, 0, "")
        assert check.load.num_free_blocks == check.load.num_blocks

    on_a_backend(folder, test)


def test_switches_reach_running_requests_and_survive_a_death(folder: Path) -> None:
    heard: list[Event] = []

    async def test(backend: EngineProcess) -> None:
        def since_last() -> list[Cycle]:
            backend.tell_cycles()
            cycles = [event for event in heard if isinstance(event, Cycle)]
            assert len(cycles) == len(heard), "it asked for nothing else"
            heard.clear()
            return cycles

        backend.listen(heard.append, Cycle)
        expected = words(await outputs(backend, asked("a", max_tokens=300, forced=True)))
        assert any(cycle.num_draft_rows for cycle in since_last()), "nothing was drafted at all"
        running = asyncio.create_task(outputs(backend, asked("b", max_tokens=300, forced=True)))
        await until(lambda: len(since_last()) > 0)
        backend.switch(OFF)
        answer = await running
        assert words(answer) == expected
        assert not since_last()[-1].num_draft_rows
        os.kill(backend.pid or 0, signal.SIGKILL)
        await until(lambda: backend.state.phase == "restarting")
        await backend.wait_ready()
        since_last()
        assert words(await outputs(backend, asked("c", max_tokens=300, forced=True))) == expected
        assert not any(cycle.num_draft_rows for cycle in since_last()), "it came back switched on"
        backend.switch(Switches(max_depth=2))
        assert words(await outputs(backend, asked("d", max_tokens=300, forced=True))) == expected
        assert any(cycle.num_draft_rows for cycle in since_last())

    on_a_backend(folder, test)


def test_death_costs_only_what_was_running_and_the_engine_is_back(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        heard: list[Event] = []
        backend.listen(heard.append)
        expected = words(await outputs(backend, asked("a")))
        lost = [asyncio.create_task(outputs(backend, asked(f"lost-{i}", max_tokens=450))) for i in range(3)]
        await until(lambda: backend.load.num_running == 3)
        os.kill(backend.pid or 0, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*lost, return_exceptions=True), timeout=10)
        assert all(isinstance(result, EngineLost) for result in results)
        with pytest.raises(EngineLost):
            await outputs(backend, asked("too soon"))
        await asyncio.wait_for(backend.wait_ready(), timeout=60)
        assert words(await outputs(backend, asked("b"))) == expected
        assert backend.num_restarts == 1
        assert [event for event in heard if isinstance(event, Fallback) and event.what == "the engine"]

    on_a_backend(folder, test)


def test_how_full_it_is_is_known_while_it_runs_and_after_its_death(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        empty = backend.load
        assert empty.num_free_blocks == empty.num_blocks > 0
        async with contextlib.aclosing(backend.generate(asked("a", max_tokens=2000))) as answer:
            await anext(answer)
            await until(lambda: backend.load.num_running == 1)
            assert backend.load.num_free_blocks < empty.num_blocks
            assert backend.pid is not None
            os.kill(backend.pid, signal.SIGKILL)
            with pytest.raises(EngineLost):
                [output async for output in answer]
        assert backend.load.num_running == 0
        await backend.wait_ready()
        assert backend.load == empty
        await outputs(backend, asked("b"))
        assert backend.load.num_running == 0
        assert backend.load.num_blocks == empty.num_blocks

    on_a_backend(folder, test)


def test_who_listens_at_once_is_told_by_the_loop_whoever_asks_for_numbers(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        threads: list[int] = []
        backend.listen(lambda event: threads.append(threading.get_ident()), Cycle, at_once=True)
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                backend.tell_cycles()

        asking = asyncio.create_task(asyncio.to_thread(ask))
        try:
            found = await outputs(backend, asked("a", max_tokens=200))
        finally:
            is_over.set()
            await asking
        assert len(words(found)) == 200
        assert len(threads) >= len(found) - 1
        assert set(threads) == {threading.get_ident()}

    on_a_backend(folder, test)


def test_a_dead_engine_is_not_ready_while_it_is_buried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bury, may_bury = Process.end, asyncio.Event()

    async def slowly(process: Process) -> int:
        await may_bury.wait()
        return await bury(process)

    async def test(backend: EngineProcess) -> None:
        monkeypatch.setattr(Process, "end", slowly)
        os.kill(backend.pid or 0, signal.SIGKILL)
        await until(lambda: backend.state.phase == "restarting")
        may_bury.set()
        await asyncio.wait_for(backend.wait_ready(), timeout=60)
        assert backend.state.phase == "ready"

    on_a_backend(folder, test)


def stems() -> set[int]:
    """Stems that this process has started; their engines are children of theirs."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return {child.pid for child in living if "understudy.stem" in child.cmdline()}


async def killed(pid: int | None, backend: EngineProcess) -> None:
    """Kill an engine, and wait until another serves."""
    os.kill(pid or 0, signal.SIGKILL)
    await until(lambda: backend.state.phase == "restarting")
    await asyncio.wait_for(backend.wait_ready(), timeout=60)


def test_an_engine_that_died_is_not_loaded_again(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", seed=5)
    others = stems()

    async def test(backend: EngineProcess) -> None:
        expected = words(await outputs(backend, asked("a")))
        (stem,) = stems() - others
        shutil.rmtree(folder)
        for number in range(3):
            before = backend.pid
            await killed(before, backend)
            assert backend.pid != before
            assert psutil.Process(backend.pid).ppid() == stem
            assert words(await outputs(backend, asked(f"b{number}", forced=True))) == expected
        assert "status -9" in "".join(told)
        assert stems() - others == {stem}

    told: list[str] = []

    async def run() -> None:
        async with running(folder) as backend:
            backend.listen(lambda event: told.append(getattr(event, "reason", "")), Fallback)
            await test(backend)

    asyncio.run(run())
    assert stems() == others, "the stem is ended, too"


def test_a_stem_that_died_costs_nothing_until_it_is_needed(folder: Path) -> None:
    others = stems()

    async def test(backend: EngineProcess) -> None:
        expected = words(await outputs(backend, asked("a")))
        (stem,) = stems() - others
        os.kill(stem, signal.SIGKILL)
        assert words(await outputs(backend, asked("b"))) == expected
        await killed(backend.pid, backend)
        assert words(await outputs(backend, asked("c"))) == expected
        assert stems() - others - {stem}

    on_a_backend(folder, test)
    assert stems() == others


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_start_that_is_given_up_leaves_nothing(folder: Path, is_forked: bool) -> None:
    others = stems()

    def has_come_far() -> bool:
        return any(psutil.Process(stem).children() or not is_forked for stem in stems() - others)

    async def run() -> None:
        backend = EngineProcess(str(folder), CONFIG)
        starting = asyncio.create_task(backend.start())
        await until(has_come_far)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await backend.close()

    asyncio.run(run())
    asyncio.run(until(lambda: stems() == others))  # one that nobody knows of yet ends by itself


def test_no_process_and_no_listener_ends_the_supervision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    popen, refusals, others = subprocess.Popen, [OSError(24, "Too many open files")], stems()

    def unwilling(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return popen(*args, **options)

    def closed_terminal(event: Event) -> None:
        raise BrokenPipeError

    async def test(backend: EngineProcess) -> None:
        monkeypatch.setattr(subprocess, "Popen", unwilling)
        backend.listen(closed_terminal)
        for stem in stems() - others:
            os.kill(stem, signal.SIGKILL)
        os.kill(backend.pid or 0, signal.SIGKILL)
        await until(lambda: "Too many open files" in backend.state.reason)
        await asyncio.wait_for(backend.wait_ready(), timeout=60)
        assert backend.num_restarts == 2
        assert len(words(await outputs(backend, asked("a")))) == 40

    on_a_backend(folder, test)


def test_no_number_of_failures_is_too_large() -> None:
    waits_s = [_backoff_s(num_failures) for num_failures in (1, 2, 5, 6, 10_000)]
    assert waits_s == [1.0, 2.0, 16.0, 30.0, 30.0]


def test_an_engine_that_hangs_is_started_again(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        first = backend.pid
        os.kill(first or 0, signal.SIGSTOP)
        with pytest.raises(EngineLost):
            await asyncio.wait_for(outputs(backend, asked("a")), timeout=30)
        await asyncio.wait_for(backend.wait_ready(), timeout=60)
        assert backend.pid != first
        assert len(words(await outputs(backend, asked("b")))) == 40

    on_a_backend(folder, test, step_timeout_s=2.0)


def test_an_answer_that_waits_for_its_reader_is_no_hang(folder: Path) -> None:
    async def test(backend: EngineProcess) -> None:
        first = backend.pid
        async with contextlib.aclosing(backend.generate(asked("a"))) as answer:
            found = [await anext(answer)]
            await asyncio.sleep(1.5)  # the engine is idle long before, and says nothing
            found += [output async for output in answer]
        assert len(words(found)) == 40
        assert (backend.pid, backend.num_restarts) == (first, 0)

    on_a_backend(folder, test, step_timeout_s=0.5)


def test_a_first_start_that_fails_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        backend = EngineProcess(str(tmp_path / "nothing"), CONFIG)
        with pytest.raises(ModelError) as found:
            await backend.start()
        assert "nothing" in found.value.message
        assert backend.pid is None

    asyncio.run(run())


def test_a_draft_that_fails_to_load_is_no_reason_not_to_serve(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        config = EngineConfig(num_threads=1, kv_tokens=4096, draft=str(tmp_path / "no draft"))
        backend = EngineProcess(str(folder), config)
        heard: list[Event] = []
        backend.listen(heard.append)
        try:
            await backend.start()
            assert "no draft" in backend.info.draft_problem
            assert "model" not in backend.info.drafters
            assert [event.what for event in heard if isinstance(event, Fallback)] == ["the draft"]
            assert len(words(await outputs(backend, asked("a")))) == 40
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["truncated", "mismatched"])
def test_a_trained_draft_that_is_wrong_is_no_reason_not_to_serve(folder: Path, tmp_path: Path, fault: str) -> None:
    target = load_target(folder, num_threads=1)
    other = {"target_hash": "sha256:other"} if fault == "mismatched" else {}
    draft = write_draft(tmp_path / "mine", "medusa", target, **other)
    if fault == "truncated":
        truncate(draft)

    async def run() -> None:
        backend = EngineProcess(str(folder), EngineConfig(num_threads=1, kv_tokens=4096, draft=str(draft)))
        heard: list[Event] = []
        backend.listen(heard.append)
        try:
            await backend.start()
            file = draft / ("weights.safetensors" if fault == "truncated" else "draft.json")
            assert str(file) in backend.info.draft_problem
            assert (backend.info.draft, backend.info.draft_bytes) == ("", 0)
            assert "suffix" in backend.info.drafters
            (told,) = [event for event in heard if isinstance(event, Fallback)]
            assert told.what == "the draft"
            assert told.reason.startswith("serving without it: ")
            assert len(words(await outputs(backend, asked("a")))) == 40
        finally:
            await backend.close()

    asyncio.run(run())


def test_nothing_is_left_when_it_is_closed(folder: Path) -> None:
    async def run() -> tuple[int, Path]:
        async with running(folder) as backend:
            lost = asyncio.create_task(outputs(backend, asked("a", max_tokens=450)))
            await until(lambda: backend.load.num_running == 1)
            pid, kept = backend.pid or 0, Path(backend.info.tokenizer_folder)
        with pytest.raises(EngineLost):
            await lost
        return pid, kept

    pid, kept = asyncio.run(run())
    assert not psutil.pid_exists(pid)
    assert not kept.exists()

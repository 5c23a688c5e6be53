"""While nobody asks for anything an engine makes passes ready, one at a time, and survives whatever comes of that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from understudy.core.events import Event, Fallback
from understudy.engine.preparing import Preparing


def passes(done: list[str], name: str, count: int, *, fails_at: int | None = None) -> Iterator[None]:
    for number in range(count):
        if number == fails_at:
            raise MemoryError("no room for a graph")
        done.append(f"{name} {number}")
        yield


def preparing(target: Iterator[None], heard: list[Event], *drafters: Any) -> Preparing:
    runner: Any = SimpleNamespace(prepare=lambda: target)
    return Preparing(runner, drafters, heard.append)


def drafter(name: str, its_passes: Iterator[None]) -> Any:
    return SimpleNamespace(name=name, prepare=lambda: its_passes)


def test_one_pass_at_a_time_the_target_s_first() -> None:
    done: list[str] = []
    heard: list[Event] = []
    ready = preparing(passes(done, "target", 2), heard, drafter("model", passes(done, "model", 1)), SimpleNamespace())
    seen = []
    while ready.one_more():
        seen.append(list(done))
    assert seen == [["target 0"], ["target 0", "target 1"], ["target 0", "target 1", "model 0"]]
    assert not ready.one_more()
    assert not heard


def test_a_failure_ends_it_and_is_told_once() -> None:
    """There may be no memory left: then nobody tries the next one."""
    done: list[str] = []
    heard: list[Event] = []
    bad, good = passes(done, "bad", 3, fails_at=1), passes(done, "good", 1)
    ready = preparing(passes(done, "target", 1), heard, drafter("bad", bad), drafter("good", good))
    assert [ready.one_more() for _ in range(4)] == [True, True, False, False]
    assert done == ["target 0", "bad 0"]
    (event,) = heard
    assert isinstance(event, Fallback)
    assert "no room for a graph" in event.reason


def test_a_drafter_that_cannot_even_begin_keeps_nobody_from_starting() -> None:
    heard: list[Event] = []
    ready = preparing(iter(()), heard, SimpleNamespace(name="odd", prepare="nothing that can be called"))
    assert not ready.one_more()
    assert len(heard) == 1

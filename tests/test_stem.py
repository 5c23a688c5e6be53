"""The process that engines are forked from, here in a thread: what it does where it must not fork, and at its ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_model
from understudy import stem as stem_module
from understudy.config import EngineConfig
from understudy.core.switches import Switches
from understudy.stem import Stem
from understudy.wire.frames import Frames, frame, reports
from understudy.wire.messages import Failed, Ready, Report, Start

CONFIG = EngineConfig(num_threads=1, kv_tokens=512, device="cpu")


class Running:
    """A stem in a thread, and our ends of its sockets."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.statuses: list[int] = []
        self._thread = threading.Thread(target=lambda: self.statuses.append(Stem(theirs).run()))
        self._thread.start()

    def engine(self, start: Start | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.connection, [b"."], [theirs.fileno()])
        if start is not None:
            ours.sendall(frame(start))
        return ours

    def ended(self) -> int:
        self._thread.join(timeout=60)
        (status,) = self.statuses
        return status


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr("understudy.worker.calm_process", lambda: None)
    running = Running()  # the tests have threads: it must not fork
    yield running
    running.connection.close()


def reported(channel: socket.socket) -> list[Report]:
    """All reports until the first that says whether there is an engine."""
    frames, found = Frames(), []
    while piece := channel.recv(1 << 20):
        found += [reports.decode(body) for body in frames.add(piece)]
        if isinstance(found[-1], Ready | Failed):
            break
    return found


def test_beside_other_threads_it_becomes_the_engine(running: Running, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    with running.engine(Start(str(folder), CONFIG, str(tmp_path), Switches())) as channel:
        assert not stem_module._can_fork()
        ready = reported(channel)[-1]
        assert isinstance(ready, Ready)
        assert ready.info.max_tokens == 512
    assert running.ended() == 0
    assert (tmp_path / "tokenizer.json").is_file()


def test_what_cannot_be_loaded_is_told_and_ends_it(running: Running, tmp_path: Path) -> None:
    with running.engine(Start(str(tmp_path / "nothing"), CONFIG, str(tmp_path), Switches())) as channel:
        (failed,) = reported(channel)
        assert isinstance(failed, Failed)
        assert "nothing" in failed.message
    assert running.ended() == 2


def test_a_server_that_is_gone_ends_it(running: Running) -> None:
    running.connection.close()
    assert running.ended() == 0


def test_a_channel_that_is_closed_before_a_word_ends_it(running: Running) -> None:
    running.engine(None).close()
    assert running.ended() == 0

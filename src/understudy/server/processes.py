"""Where engines' processes come from: a stem that has loaded the model, and forks one when it is asked (stem.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from understudy.wire.frames import receive_status

_ENDS_WITHIN_S = 1.0


@dataclass(slots=True)
class Stem:
    """The process that forks engines, and our end of the socket to it."""

    popen: subprocess.Popen[bytes]
    connection: socket.socket

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, buried or not."""
        if self.popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, engine: int | None = None) -> None:
        """Kill its engine, or itself and all that it has forked.

        A living stem keeps the number of a dead engine, and a dead one that of their group until it is buried: no
        signal reaches a stranger.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # they are gone
            if engine is not None and not self.is_dead:
                os.kill(engine, signal.SIGKILL)
            elif self.popen.returncode is None:
                os.killpg(self.popen.pid, signal.SIGKILL)

    async def engine_status(self) -> int:
        """Wait for its engine's end; the stem's own end is that, too."""
        status = await receive_status(self.connection)
        return await asyncio.to_thread(self.popen.wait) if status is None else status

    async def end(self) -> None:
        """Wait until it is gone. It ends by itself, once it has buried its dead, unless it is busy loading."""
        self.connection.close()
        try:
            await asyncio.to_thread(self.popen.wait, _ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self.popen.wait)


@dataclass(slots=True)
class Process:
    """One life of an engine, and our end of its channel. It ends by itself when that is closed."""

    stem: Stem
    connection: socket.socket
    transport: asyncio.Transport | None = None
    """Once somebody listens, it is what closes the connection."""
    pid: int | None = None
    """Its own number, once it has told it."""

    async def end(self) -> int:
        """Kill it, wait until it is gone, and return its status: below zero the signal that ended it."""
        if self.transport is not None:
            self.transport.abort()
        else:
            self.connection.close()
        if self.pid is None:  # it may be dead already, or the stem still loads
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self.stem.engine_status(), _ENDS_WITHIN_S)
        self.stem.kill(self.pid)
        return await self.stem.engine_status()


class Processes:
    """One engine at a time."""

    def __init__(self) -> None:
        self._stem: Stem | None = None
        # a process inherits its priority from the thread that starts it, and the web's thread gives way (run.py)
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")

    async def take(self) -> Process:
        """An engine that waits for its first command. The one before has ended."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            stem = await self._send(theirs)
            on_failure.pop_all()
        return Process(stem, ours)

    async def close(self) -> None:
        """End the stem. Whoever took an engine has ended that."""
        stem, self._stem = self._stem, None
        if stem is not None:
            await stem.end()
        self._starter.shutdown(wait=False)

    async def _send(self, channel: socket.socket) -> Stem:
        """Give a channel to the stem, to a new one if there is none that takes it."""
        if self._stem is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._stem.connection, [b"."], [channel.fileno()])
                return self._stem
            stem, self._stem = self._stem, None
            await stem.end()
        self._stem = await self._start()
        socket.send_fds(self._stem.connection, [b"."], [channel.fileno()])
        return self._stem

    async def _start(self) -> Stem:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            popen = await asyncio.get_running_loop().run_in_executor(self._starter, _started, theirs.fileno())
            on_failure.pop_all()  # it lives
        return Stem(popen, ours)


def _started(descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "understudy.stem", str(descriptor)]
    # a group of its own, so that it and its engine can be ended together
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, process_group=0)

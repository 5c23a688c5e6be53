"""Processes for an engine: one that computes and, if it is wanted, one ahead.

A third of a start is importing what an engine is made of. A spare has done that and waits for the word what to load:
when the engine dies, only the model is left to be loaded. It takes memory, some 280 MB, and no time but for the
seconds in which it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

log = logging.getLogger("understudy.server")


@dataclass(slots=True)
class Process:
    """One life of an engine, and our end of the socket to it. It ends by itself when that is closed."""

    popen: subprocess.Popen[bytes]
    connection: socket.socket
    transport: asyncio.Transport | None = None
    """Once somebody listens, it is what closes the connection."""

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        if self.transport is not None:
            self.transport.abort()
        else:
            self.connection.close()
        self.popen.kill()
        await asyncio.to_thread(self.popen.wait)


class Processes:
    """Where engine processes come from."""

    def __init__(self, *, has_spare: bool) -> None:
        self._has_spare = has_spare
        self._spare: Process | None = None
        # a process inherits its priority from the thread that starts it, and the web's thread gives way (run.py)
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")

    async def take(self) -> Process:
        """A process that waits for its first command: the spare if it lives, or a new one."""
        spare, self._spare = self._spare, None
        if spare is None:
            return await self._start()
        if spare.popen.poll() is not None:
            await spare.end()
            return await self._start()
        return spare

    async def keep_spare(self) -> None:
        """Have a spare from here on, if one is wanted."""
        if not self._has_spare or self._spare is not None:
            return
        try:
            self._spare = await self._start()
        except OSError as error:  # an engine can be started without one
            log.warning("no spare process could be started: %s", error)

    async def close(self) -> None:
        """End the spare. Whoever took a process ends that."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await spare.end()
        self._starter.shutdown(wait=False)

    async def _start(self) -> Process:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            popen = await asyncio.get_running_loop().run_in_executor(self._starter, _started, theirs.fileno())
            on_failure.pop_all()  # it lives
        return Process(popen, ours)


def _started(descriptor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "understudy.worker", str(descriptor)]
    return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)

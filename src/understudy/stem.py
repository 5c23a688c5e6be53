"""The process that engines are forked from: it loads a model once, and computes nothing.

When an engine dies, the next one has been loaded before it was born; and what was loaded is in memory once, since no
engine writes to it. The stem is started with the number of a socket that it inherits:

    it is sent     the end of a channel (wire/frames.py) for each engine, one engine at a time
    it sends       how that engine's process ended

It ends when the other end of its socket does, and leaves nothing running.

A fork has only the thread that forked. Whoever then waits for another, as OpenMP does once it has computed with
several, waits for ever: so nothing is computed here, and a model is loaded with one thread of torch's. Nothing is
loaded here for a GPU, which nobody can use who was forked after it was first used. Where there is no safe forking, or
loading has left a thread (of a download, perhaps), the stem becomes the engine itself, and dies with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from understudy.assembly import Target, is_for_cpu
from understudy.upkeep import calm_process
from understudy.wire.frames import Channel, send_status
from understudy.wire.messages import Start
from understudy.worker import Worker


class Stem:
    """A loaded model, and the socket to whoever wants engines of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._is_for_cpu: bool | None = None  # not asked yet
        self._shared: Target | None = None
        self._engine: int | None = None

    def run(self) -> int:
        """Make an engine for every channel that comes, until the other end is gone; return the exit status."""
        status = None
        with self._connection, contextlib.suppress(EOFError, ConnectionError):
            while status is None and (channel := self._next_channel()) is not None:
                with contextlib.closing(channel):
                    status = self._live(channel)
        self._bury()
        return status or 0

    def _live(self, channel: Channel) -> int | None:
        """One life of an engine. Its status is ours if the stem cannot go on."""
        worker = Worker(channel)
        start = worker.wait_for_start()
        if self._is_for_cpu is None and _can_fork():
            self._is_for_cpu = _in_a_fork(lambda: is_for_cpu(start.config))
        if self._shared is None and self._is_for_cpu:
            self._shared = worker.load_to_share(start)
            if self._shared is None:  # whoever asked was told why
                return 2
            calm_process()  # what is left of loading must not be copied
        if not _can_fork():
            return worker.serve(start, self._shared)
        self._bury()
        self._engine = pid = self._fork(worker, start)
        channel.close()
        send_status(self._connection, self._status(pid))
        return None

    def _status(self, pid: int) -> int:
        """Wait for an engine's end, and leave it to be buried. If whoever wanted it is gone first, it is ended."""
        with contextlib.suppress(AttributeError, OSError):  # on an old system it ends by itself, unless it hangs
            descriptor = os.pidfd_open(pid)
            try:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.register(self._connection, select.POLLIN)  # nothing but its end comes while there is an engine
                if descriptor not in dict(waiting.poll()):
                    os.kill(pid, signal.SIGKILL)
            finally:
                os.close(descriptor)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _bury(self) -> None:
        """Let the last engine's number go. It was kept until nobody would send it a signal any more."""
        if self._engine is not None:
            os.waitpid(self._engine, 0)
            self._engine = None

    def _next_channel(self) -> Channel | None:
        message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        if not message:
            return None
        os.set_inheritable(descriptors[0], False)
        return Channel(socket.socket(fileno=descriptors[0]))

    def _fork(self, worker: Worker, start: Start) -> int:
        pid = _forked()
        if pid == 0:
            self._connection.close()
            _become(worker, start, self._shared)
        return pid


def _forked() -> int:
    with warnings.catch_warnings():
        # of threads that numpy's linear algebra keeps; it sees to forks by itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(worker: Worker, start: Start, shared: Target | None) -> NoReturn:
    """Be an engine until it ends, and end without what the stem would do at its own end."""
    status = 1
    try:
        status = worker.serve(start, shared)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _in_a_fork(question: Callable[[], bool]) -> bool:
    """The answer to a question that whoever asks it cannot be forked any more: to look for a GPU is to use one."""
    pid = _forked()
    if pid == 0:
        answer = False
        try:
            answer = question()
        finally:
            os._exit(0 if answer else 1)
    return os.waitpid(pid, 0)[1] == 0


def _can_fork() -> bool:
    return sys.platform == "linux" and threading.active_count() == 1


def main() -> int:
    """Make engines for whoever holds the other end of the socket whose number is the only argument."""
    # whoever sends signals to all processes of a service: the server decides when this one ends
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    return Stem(connection).run()


if __name__ == "__main__":
    sys.exit(main())

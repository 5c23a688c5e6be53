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
import signal
import socket
import sys
import threading
import traceback
import warnings
from typing import NoReturn

from understudy.assembly import Target, is_for_cpu
from understudy.collector import calm_collector
from understudy.wire.frames import Channel, send_status
from understudy.wire.messages import Start
from understudy.worker import Worker


class Stem:
    """A loaded model, and the socket to whoever wants engines of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._target: Target | None = None
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
        if self._target is None and _can_fork() and is_for_cpu(start.config):
            self._target = worker.load(start, to_fork=True)
            if self._target is None:  # whoever asked was told why
                return 2
            calm_collector()  # what is left of loading must not be copied
        if not _can_fork():
            return worker.serve(start, self._target)
        self._bury()
        self._engine = pid = self._fork(worker, start)
        channel.close()
        send_status(self._connection, _status(pid))
        return None

    def _bury(self) -> None:
        """Let the last engine's number go. It was kept until nobody would send it a signal any more."""
        if self._engine is not None:
            os.waitpid(self._engine, 0)
            self._engine = None

    def _next_channel(self) -> Channel | None:
        message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
        return Channel(socket.socket(fileno=descriptors[0])) if message else None

    def _fork(self, worker: Worker, start: Start) -> int:
        with warnings.catch_warnings():
            # of threads that numpy's linear algebra keeps; it sees to forks by itself
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._connection.close()
            _become(worker, start, self._target)
        return pid


def _become(worker: Worker, start: Start, target: Target | None) -> NoReturn:
    """Be an engine until it ends, and end without what the stem would do at its own end."""
    status = 1
    try:
        status = worker.serve(start, target)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(pid: int) -> int:
    """Wait for a process's end, and leave it to be buried."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _can_fork() -> bool:
    return sys.platform == "linux" and threading.active_count() == 1


def main() -> int:
    """Make engines for whoever holds the other end of the socket whose number is the only argument."""
    # a terminal or a service manager sends signals to the whole group: the server decides when this process ends
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a GPU is not to begin to use it
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    return Stem(connection).run()


if __name__ == "__main__":
    sys.exit(main())

"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass
class Server:
    """A running `understudy serve`."""

    process: subprocess.Popen[str]
    port: int

    @property
    def engine_pid(self) -> int:
        """The engine's process, forked by a child of the server."""
        (engine,) = (
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if child.is_running() and child.ppid() != self.process.pid and "understudy.stem" in child.cmdline()
        )
        return int(engine.pid)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as response:
            data = response.read()
        return json.loads(data) if "json" in response.headers.get("content-type", "") else data.decode()

    def post(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps({} if body is None else body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    def delete(self, path: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="DELETE")
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())


@contextlib.contextmanager
def serve(*arguments: str, drain_exit: bool = True) -> Iterator[Server]:
    """Start a server on a free port, and end it with SIGTERM: it must exit with 0 and leave nothing behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.cli", "serve", "--port", "0", "--state", "none", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        port = None
        for line in process.stdout:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                port = int(found[1])
                break
        assert port is not None, "the server ended before it was ready"
        yield Server(process, port)
        assert process.poll() is None, f"it ended by itself with {process.poll()}"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
        if drain_exit:
            assert status == 0, f"it exited with {status}"
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

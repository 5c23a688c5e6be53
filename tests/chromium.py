"""A real browser for tests: Debian's chromium without a window, spoken to over its DevTools pipe.

Chromium started with --remote-debugging-pipe reads commands from file descriptor 3 and writes replies and events to 4,
each a JSON text ended by a zero byte. That needs no package and no open port. Nothing outside the machine can be
reached: every name and address is mapped to nowhere.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--remote-debugging-pipe",
)
LIMIT_S = 300


class Tab:
    """One page of the browser, and all that it said and asked for since it was opened."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._last_id = 0
        self._buffer = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its reply; the events that come before it are kept."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        self._process.stdin.flush()
        while (message := self._receive()).get("id") != self._last_id:
            self.events.append(message)
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, and wait until it has loaded."""
        self.events.clear()
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        while "Page.loadEventFired" not in [event["method"] for event in self.events]:
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Give the value of a JavaScript expression, a promise's once it is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path, *, height: int | None = None) -> None:
        """Write the page as a PNG: all of it, or its first `height` pixels."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or size["height"], size["height"])}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip={**clip, "scale": 1})
        file.write_bytes(base64.b64decode(shot["data"]))

    def requested(self) -> list[str]:
        """The address of every request since the page was opened."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Every error and warning on the console, and every exception that nobody caught."""
        found = []
        for event in self.events:
            method, parameters = event["method"], event.get("params", {})
            said = method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert")
            logged = method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning")
            if said or logged or method == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters)[:600])
        return found

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\0" not in self._buffer:
            piece = self._process.stdout.read1(1 << 16)
            assert piece, "chromium has ended; run it by hand with --headless=new --no-sandbox to see why"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """Start a browser with a profile folder of its own, and end it. Without chromium this is an error, never a skip."""
    program = shutil.which("chromium")
    assert program, "chromium was not found; `make test-browser` installs it, or: apt-get install chromium"
    # The shell hands the pipes on as the two descriptors that chromium expects.
    start = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
    arguments = ["sh", "-c", start, "sh", program, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    too_long = threading.Timer(LIMIT_S, process.kill)  # then the pipe ends, and whoever waits for it fails
    too_long.start()
    try:
        tab = Tab(process)
        yield tab
        tab.send("Browser.close")
    finally:
        too_long.cancel()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()

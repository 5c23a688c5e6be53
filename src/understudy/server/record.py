"""Requests and answers as token ids, kept on disk so that they can be replayed.

One thread writes; a request only ever puts its record into a bounded queue. When that is full, or the disk is, the
record is dropped and counted. Files are begun anew by size and by time, and the oldest are deleted beyond the limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from understudy.core.request import Request, SpeculationCounts
from understudy.errors import ConfigError
from understudy.server.exchange import Exchange, Outcome

log = logging.getLogger("understudy.server")

FILE_BYTES = 64 << 20
FILE_AGE_S = 3600.0
_MOST_WAITING = 256
_PREFIX, _SUFFIX = "requests-", ".jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request as it came, and what it came to. Times are in seconds after its own arrival, but for `arrived_s`."""

    run: str
    """Names the server's life that it belongs to."""
    arrived_s: float
    """After that life began."""
    endpoint: str
    request: Request
    outcome: Outcome
    seed: int | None
    """Repeats the answer; None if there was none."""
    answers: tuple[tuple[int, ...], ...]
    """Token ids of each choice, as far as they were read."""
    admitted_s: float | None
    first_s: float | None
    ended_s: float | None
    speculation: SpeculationCounts | None = None
    """What drafts did for it, all choices together; None if no choice came to its end."""


class Recorder:
    """An observer that writes down every request that was computed."""

    def __init__(self, directory: Path, *, max_bytes: int, max_age_s: float) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._file_bytes = min(FILE_BYTES, max(1, max_bytes // 4))
        self._run = datetime.now(UTC).strftime("%Y%m%dT%H%M%S") + f"-{os.getpid()}"
        self._started_s = time.monotonic()
        self._waiting: queue.Queue[RecordedRequest | None] = queue.Queue(_MOST_WAITING)
        self._file: BinaryIO | None = None
        self._file_began_s = 0.0
        self._num_files = 0
        self.num_dropped = 0
        """Records that were lost: the queue or the disk was full."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise OSError(0, "it cannot be written to")
        except OSError as error:
            raise ConfigError(f"Nothing can be recorded in {directory}: {error.strerror}.") from None
        if directory.stat().st_mode & 0o077:
            log.warning("other users can look into %s, where requests are recorded; chmod 700 mends that", directory)
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def ended(self, exchange: Exchange) -> None:
        """Take a request that came to an end. One that was never computed is not kept."""
        if exchange.admitted_s is None:
            return
        answers = exchange.answers or {}
        since = exchange.arrived_s
        record = RecordedRequest(
            run=self._run,
            arrived_s=round(since - self._started_s, 6),
            endpoint=exchange.endpoint,
            request=exchange.request,
            outcome=exchange.outcome,
            seed=exchange.facts[0].seed if exchange.facts else exchange.request.sampling.seed,
            answers=tuple(tuple(answers.get(choice, ())) for choice in range(exchange.request.sampling.n)),
            admitted_s=_after(exchange.admitted_s, since),
            first_s=_after(exchange.first_s, since),
            ended_s=_after(exchange.ended_s, since),
            speculation=_counts(exchange),
        )
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=2.0)
        self._thread.join(timeout=5.0)

    # in the thread

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self._write(msgspec.json.encode(record) + b"\n")
            except Exception as error:  # nothing may end this thread
                self.num_dropped += 1
                if self.num_dropped & (self.num_dropped - 1) == 0:  # the first, second, fourth, ...
                    log.warning("a request could not be recorded (%d so far): %s", self.num_dropped, error)
                self._close_file()
        self._close_file()

    def _write(self, line: bytes) -> None:
        if self._file is not None and self._is_full(len(line)):
            self._close_file()
        if self._file is None:
            self._delete_old(len(line))
            self._file = self._open()
        self._file.write(line)
        self._file.flush()

    def _is_full(self, num_more: int) -> bool:
        assert self._file is not None
        return self._file.tell() + num_more > self._file_bytes or time.monotonic() - self._file_began_s > FILE_AGE_S

    def _open(self) -> BinaryIO:
        self._num_files += 1
        path = self._directory / f"{_PREFIX}{self._run}-{self._num_files:06d}{_SUFFIX}"
        self._file_began_s = time.monotonic()
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "ab")

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _delete_old(self, num_more: int) -> None:
        """Make room for another file: what is too old goes, then the oldest until the total fits."""
        files = [(path, path.stat()) for path in record_files(self._directory)]
        num_bytes = sum(status.st_size for _, status in files) + max(self._file_bytes, num_more)
        now_s = time.time()
        for path, status in files:
            if now_s - status.st_mtime > self._max_age_s or num_bytes > self._max_bytes:
                path.unlink()
                num_bytes -= status.st_size


def record_files(directory: Path) -> list[Path]:
    """The files of a recorder, the oldest first."""
    files = directory.glob(f"{_PREFIX}*{_SUFFIX}")
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def read_records(directory: Path, *, tell: Callable[[str], None] = log.warning) -> Iterator[RecordedRequest]:
    """Every record, in the order of writing. A line that was cut off is passed over, and told."""
    decoder = msgspec.json.Decoder(RecordedRequest)
    for path in record_files(directory):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    tell(f"{path}, line {number} is no record: {error}")


def _counts(exchange: Exchange) -> SpeculationCounts | None:
    if not exchange.facts:
        return None
    total = SpeculationCounts()
    for facts in exchange.facts:
        total.add(facts.counts)
    return total


def _after(moment_s: float | None, since_s: float) -> float | None:
    return None if moment_s is None else round(moment_s - since_s, 6)

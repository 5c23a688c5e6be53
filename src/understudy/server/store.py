"""What the control plane keeps over a restart: one SQLite file, and one thread that reads and writes it.

Nothing here may fail a request. A file that is locked or a disk that is full costs what would have been written, a
line in the log and a count; the file is opened anew for what comes next. A file that is damaged or that another version
wrote is moved aside, never deleted, and an empty one is begun.

    documents   name -> JSON: what was learned under each model, the state of experiments, ...
    decisions   the last of them, with time, author and reason
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from understudy.server.journal import MOST_DECISIONS, Decision

log = logging.getLogger("understudy.server")

VERSION = 1
LEARNED = "learned "
"""Begins the names of documents that hold what was learned; the rest says under which model."""
_APPLICATION = 0x756E6473
"""Marks a file as ours."""
_HEADER_BYTES = 100
_MOST_LEARNED = 16
"""Models of which something is kept; those used least lately are forgotten."""
_MOST_WAITING = 1024
_BUSY_S = 2.0
_READ_S = 10.0
_CLOSE_S = 5.0
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, value BLOB NOT NULL, saved_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, time_s REAL NOT NULL, what TEXT NOT NULL, subject TEXT NOT NULL, outcome TEXT NOT NULL,
    reason TEXT NOT NULL, who TEXT NOT NULL
);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")

Found = TypeVar("Found")
Job = Callable[[sqlite3.Connection], Found]


@dataclass(frozen=True, slots=True)
class Stored:
    """What an earlier life left."""

    documents: dict[str, bytes] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    """The oldest first."""


class ControlStore:
    """A file that is written behind everybody's back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: queue.Queue[Job[None] | None] = queue.Queue(_MOST_WAITING)
        self._stored: Future[Stored] = Future()
        self._connection: sqlite3.Connection | None = None
        self._thread = threading.Thread(target=self._work, name="control-store", daemon=True)
        self.num_failures = 0
        """How often something could not be read or written."""

    async def read(self) -> Stored:
        """Start the thread, and wait for what the file holds; nothing if that takes too long."""
        self._thread.start()
        try:
            async with asyncio.timeout(_READ_S):
                return await asyncio.wrap_future(self._stored)
        except TimeoutError:
            self._failed(f"nothing could be read within {_READ_S:g} s")
            return Stored()

    def put(self, name: str, value: bytes) -> None:
        """Keep a document in place of the one of that name."""
        self._enqueue(lambda connection: _put(connection, name, value))

    def add(self, decision: Decision) -> None:
        """Keep a decision."""
        self._enqueue(lambda connection: _add(connection, decision))

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
        self._thread.join(timeout=_CLOSE_S)

    def _enqueue(self, job: Job[None]) -> None:
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            self._failed("too much waits to be written")

    def _failed(self, problem: object) -> None:
        self.num_failures += 1
        if self.num_failures & (self.num_failures - 1) == 0:  # the first, second, fourth, ...
            log.warning("the state file %s: serving without it (%d times): %s", self._path, self.num_failures, problem)

    # in the thread

    def _work(self) -> None:
        if self._stored.set_running_or_notify_cancel():
            self._stored.set_result(self._attempt(_read) or Stored())
        while (job := self._waiting.get()) is not None:
            self._attempt(job)
        self._disconnect()

    def _attempt(self, job: Job[Found]) -> Found | None:
        """Do it within a transaction. After a failure the file is opened anew, and looked at as at the first time."""
        try:
            if self._connection is None:
                self._connection = _open(self._path)
            with self._connection:
                return job(self._connection)
        except Exception as error:  # nothing may end this thread
            self._failed(error)
            self._disconnect()
            return None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def default_state_file(model_name: str, environment: Mapping[str, str]) -> Path:
    """Where a server keeps its state if nobody says otherwise: by the name that its model is called by."""
    given = environment.get("XDG_STATE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    name = _NOT_IN_A_NAME.sub("-", model_name).strip("-.")[-100:] or "model"
    return folder / "understudy" / f"{name}.sqlite"


def _open(path: Path) -> sqlite3.Connection:
    """A connection to a file of ours, made if there is none. Only its owner can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no file")
    problem = _problem_of(path)
    if problem:
        _move_aside(path, problem)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.chmod(path, 0o600)
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S)


def _problem_of(path: Path) -> str:
    """Why a file cannot be gone on with; empty if it can. One that is only locked, or cannot be read now, raises."""
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes < _HEADER_BYTES:  # SQLite would take the few bytes for nothing, and write over them
        return "it is no database" if num_bytes else ""
    try:
        with contextlib.closing(_connect(path)) as connection:
            if not _number(connection, "SELECT count(*) FROM sqlite_master"):
                return ""
            if _number(connection, "PRAGMA application_id") != _APPLICATION:
                return "it is no state file of this program"
            version = _number(connection, "PRAGMA user_version")
            if version != VERSION:
                return f"it is of version {version}, and this program writes version {VERSION}"
            (checked,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            return "" if checked == "ok" else f"it is damaged: {checked}"
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        return f"it is damaged: {error}"


def _number(connection: sqlite3.Connection, query: str) -> int:
    (number,) = connection.execute(query).fetchone()
    return int(number)


def _move_aside(path: Path, problem: str) -> None:
    aside = path.with_name(f"{path.name}.{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09d}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):  # they belong to it
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    log.warning("the state file %s was moved to %s, and a new one is begun: %s", path, aside.name, problem)


def _read(connection: sqlite3.Connection) -> Stored:
    documents = {
        name: value
        for name, value in connection.execute("SELECT name, value FROM documents")
        if isinstance(name, str) and isinstance(value, bytes)
    }
    rows = connection.execute("SELECT time_s, what, subject, outcome, reason, who FROM decisions ORDER BY id")
    fields = ("time_s", "what", "subject", "outcome", "reason", "who")
    decisions = [msgspec.convert(dict(zip(fields, row, strict=True)), Decision) for row in rows]
    return Stored(documents, tuple(decisions[-MOST_DECISIONS:]))


def _put(connection: sqlite3.Connection, name: str, value: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (name, value, time.time()))
    connection.execute(
        "DELETE FROM documents WHERE substr(name, 1, ?) = ? AND name NOT IN"
        " (SELECT name FROM documents WHERE substr(name, 1, ?) = ? ORDER BY saved_s DESC LIMIT ?)",
        (len(LEARNED), LEARNED, len(LEARNED), LEARNED, _MOST_LEARNED),
    )


def _add(connection: sqlite3.Connection, decision: Decision) -> None:
    row = (decision.time_s, decision.what, decision.subject, decision.outcome, decision.reason, decision.who)
    connection.execute(
        "INSERT INTO decisions (time_s, what, subject, outcome, reason, who) VALUES (?, ?, ?, ?, ?, ?)", row
    )
    connection.execute("DELETE FROM decisions WHERE id <= (SELECT max(id) FROM decisions) - ?", (MOST_DECISIONS,))

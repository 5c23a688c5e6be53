"""The audit log: who switched what, when and why. Lines are only ever added, and a full disk fails no request."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from understudy.errors import ConfigError

log = logging.getLogger("understudy.audit")

NUM_KEPT = 200
"""Entries that stay in memory."""


class AuditLog:
    """Entries as JSON lines in a file, which is opened anew for each, so that it may be moved away; and in the log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: deque[dict[str, object]] = deque(maxlen=NUM_KEPT)
        self.num_failures = 0
        """Entries that could not be written to the file."""
        if path is not None:
            try:
                self._append(path, b"")
            except OSError as error:
                raise ConfigError(f"The audit log {path} cannot be written: {error.strerror}.") from None

    @property
    def entries(self) -> list[dict[str, object]]:
        """The last entries, the oldest first."""
        return list(self._kept)

    def write(self, entry: Mapping[str, object]) -> None:
        """Add an entry, with the time. Never raises."""
        dated = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry}
        self._kept.append(dated)
        line = json.dumps(dated)
        log.warning("%s", line)
        if self._path is None:
            return
        try:
            self._append(self._path, line.encode() + b"\n")
        except OSError as error:
            self.num_failures += 1
            log.warning("the audit log %s cannot be written: %s", self._path, error.strerror)

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if line and os.write(descriptor, line) != len(line):
                raise OSError(0, "only a part of a line could be written")
        finally:
            os.close(descriptor)

"""What commands have in common at their end: exit codes, and where a result is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

DIFFERENT = 1
FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def make_console(*, stderr: bool) -> Console:
    """Make a console that colours nothing by guessing, and leaves it to us what a reader who has left means."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would leave with the code that says that words differ

    return Plain(stderr=stderr, highlight=False)


def check_writable(place: str | None) -> None:
    """Find out before the work whether its result can be kept."""
    if place is None or place == "-":
        return
    path = Path(place)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written.", "Give a file in a folder that exists and can be written.")


def write_json(value: dict[str, Any], place: str | None) -> None:
    """Write to a file, to the standard output for `-`, or nowhere."""
    if place is None:
        return
    written = json.dumps(value, indent=2) + "\n"
    if place == "-":
        sys.stdout.write(written)
    else:
        Path(place).write_text(written, encoding="utf-8")

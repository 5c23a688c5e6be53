"""Options that hold several values with commas between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.errors import ConfigError

MOST_AT_ONCE = 4096


def read_concurrencies(written: str) -> tuple[int, ...]:
    """Numbers of requests at once."""
    found = tuple(read_numbers(written, int, "concurrency"))
    wrong = [number for number in found if not 1 <= number <= MOST_AT_ONCE]
    if wrong:
        raise ConfigError(f"--concurrency is {wrong[0]}.", f"Give whole numbers from 1 to {MOST_AT_ONCE}.")
    return found


def read_numbers(written: str, kind: Callable[[str], Any], name: str) -> list[Any]:
    """One number or several, each once."""
    try:
        found = [kind(word) for word in read_words(written)]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"--{name} is {written!r}.", "Give a number, or several with commas between.")
    return list(dict.fromkeys(found))


def read_words(written: str | None) -> list[str]:
    """Words, each once."""
    words = [word.strip() for word in (written or "").split(",")]
    return list(dict.fromkeys(word for word in words if word))

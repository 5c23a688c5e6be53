"""A server's key: it comes from the environment, never from a command line, which others can read."""

from __future__ import annotations

import os

from understudy.errors import ConfigError


def key_from(variable: str | None) -> str | None:
    """The key that an environment variable holds; None if none is named."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"The environment variable {variable} is not set.", "Set it to the key.")
    if not (key.isascii() and key.isprintable()):  # it could not be sent, and the error would show it
        raise ConfigError(
            f"The environment variable {variable} holds a character that no key has.",
            "Set it to the key alone, without a line feed.",
        )
    return key

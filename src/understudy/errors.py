"""What can go wrong, and what to do about it.

    UnderstudyError
    ├── InvalidRequest      the caller asked for something that cannot be served
    ├── ModelError          a model file is missing, damaged or of a kind that is not supported
    ├── ConfigError         a setting is unknown or contradicts another
    ├── CapacityError       what was asked for cannot fit, ever, whatever else is running
    ├── EngineLost          the engine died while it computed an answer; another one is being started
    └── SlowReader          an answer was read more slowly than it came, for too long

Each error says what is wrong and, in `remedy`, what to do. An assert is for our own bugs; these are for theirs.
"""

from __future__ import annotations


class UnderstudyError(Exception):
    """The root of every error that is meant for a user."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy


class InvalidRequest(UnderstudyError):
    """A parameter or a prompt that cannot be served; `parameter` names the field at fault."""

    def __init__(self, message: str, remedy: str = "", *, parameter: str | None = None) -> None:
        super().__init__(message, remedy)
        self.parameter = parameter


class ModelError(UnderstudyError):
    """A model that cannot be loaded."""


class ConfigError(UnderstudyError):
    """A setting that is unknown or makes no sense."""


class CapacityError(UnderstudyError):
    """A request that could not fit even if it ran alone."""


class EngineLost(UnderstudyError):
    """An answer that was being computed when the engine died. Asking again may succeed."""


class SlowReader(UnderstudyError):
    """An answer whose reader fell so far behind that it was given up."""

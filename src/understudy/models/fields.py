"""One field of a model's declaration, taken as what it must be, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from understudy.errors import ModelError

AGAIN = "The declaration of this model is damaged or is of another kind of model: download it again."


def whole(source: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Take a count of at least one, or the default where the key is absent or null."""
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"The model's declaration has no {key}.", AGAIN)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ModelError(f"The model's declaration has {key} = {value!r}, which is not a count.", AGAIN)
    return value


def real(source: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Take a positive finite number, or the default where the key is absent or null."""
    value = source.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"The model's declaration has no {key}.", AGAIN)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ModelError(f"The model's declaration has {key} = {value!r}, which is not a positive number.", AGAIN)
    return float(value)


def shortest_real(value: float) -> float:
    """Give the decimal number that was meant: GGUF rounds 1e-5 to fp32, and the twin in config.json says 1e-5."""
    return float(f"{value:.7g}")


def switch(source: Mapping[str, Any], key: str, default: bool) -> bool:
    """Take true or false, or the default where the key is absent or null."""
    value = source.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"The model's declaration has {key} = {value!r}, which is neither true nor false.", AGAIN)
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a tuple; -1 is how some files say nothing."""
    if value is None:
        return ()
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token < 2**31 for token in values):
        raise ModelError(f"The model's declaration has {value!r} for token ids.", AGAIN)
    return tuple(dict.fromkeys(token for token in values if token >= 0))


def first_id(value: object) -> int | None:
    """The first of `token_ids`, if there is one."""
    return next(iter(token_ids(value)), None)

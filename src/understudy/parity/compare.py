"""Two answers side by side, field by field and bit for bit: no tolerance anywhere, log probabilities included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from understudy.parity.cases import Case
from understudy.parity.run import Answer

FIELDS = tuple(field.name for field in fields(Answer))
_BEFORE, _AFTER = 2, 4
_MOST_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of one answer that is not what plain decoding gives."""

    setting: str
    prompt: int
    prompt_class: str
    field: str
    position: int | None
    """The first token of the answer that differs; None where all tokens are the same."""
    expected: str
    found: str


def differences(expected: Answer, found: Answer, case: Case, setting: str) -> list[Difference]:
    """Compare every field; none differs if and only if the list is empty."""
    position = first_difference(expected.token_ids, found.token_ids)
    found_differences = []
    for name in FIELDS:
        left, right = getattr(expected, name), getattr(found, name)
        if left != right:
            # logprobs can differ where the tokens do not
            where = first_difference(left, right) if isinstance(left, tuple) else position
            found_differences.append(
                Difference(setting, case.index, case.prompt_class, name, where, *_shortened(left, right))
            )
    return found_differences


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Return the first place at which two sequences differ; where one merely goes on, that is its first extra item."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def _shortened(left: object, right: object) -> tuple[str, str]:
    """Show both values around the place where they part."""
    if isinstance(left, str) and isinstance(right, str):
        place = first_difference(left, right) or 0
        start = max(0, place - 8 * _BEFORE)
        return _cut(left[start : place + 8 * _AFTER]), _cut(right[start : place + 8 * _AFTER])
    if isinstance(left, tuple) and isinstance(right, tuple):
        place = first_difference(left, right) or 0
        is_ids = all(isinstance(item, int) for item in (*left, *right))
        start, stop = (max(0, place - _BEFORE), place + _AFTER) if is_ids else (place, place + 1)
        return _cut(left[start:stop]), _cut(right[start:stop])
    return _cut(left), _cut(right)


def _cut(value: object) -> str:
    written = repr(value)
    return written if len(written) <= _MOST_CHARACTERS else f"{written[: _MOST_CHARACTERS - 3]}..."

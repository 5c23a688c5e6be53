"""A policy in a file: what to begin with for each class of traffic, and what that rests on.

    {
      "version": 1,
      "model": "SmolLM2-135M-Instruct",
      "system_fingerprint": "fp_…",
      "date": "2026-11-15T12:00:00+00:00",
      "classes": {
        "code": {
          "enabled": true, "max_depth": 4, "drafters": ["suffix"], "reason": "…",
          "evidence": {"speedup": 1.41, "low": 1.32, "high": 1.5, "acceptance": 0.62}
        }
      }
    }

`understudy advise --policy FILE` writes one, `understudy serve --policy FILE` begins with it. Of a class everything but
`evidence` is obeyed; the evidence is there to be read. A file is written by people too, so whatever is wrong with it is
told by name, and nothing in it is passed over in silence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from understudy.control.classes import MOST_CLASSES, label_of
from understudy.core.control import ClassPolicy, Policy
from understudy.errors import ConfigError

VERSION = 1
_MOST_BYTES = 1 << 20
_MOST_CHARACTERS = 2000
"""Of a single text."""
_MOST_DRAFTERS = 16
_REMEDY = "Write one with `understudy advise --policy FILE`, or mend this one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a class's policy rests on: shown, not obeyed."""

    speedup: float | None = None
    """Expected, of the settings that were chosen."""
    low: float | None = None
    high: float | None = None
    """Its interval."""
    acceptance: float | None = None
    """Of drafted words, measured."""
    break_even: float | None = None
    """The acceptance at which it would be as fast as plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """All that a file says."""

    model: str
    system_fingerprint: str
    date: str
    """When it was written: ISO 8601."""
    classes: Mapping[str, ClassPolicy] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    """By class, where there is some."""

    @property
    def policy(self) -> Policy:
        """What an engine is given of it."""
        return Policy(classes=dict(self.classes), model=self.model, system_fingerprint=self.system_fingerprint)


def read_policy(path: Path) -> PolicyFile:
    """Read a file; whatever is wrong with it is an error that names the file and the place."""
    try:
        with path.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            _refuse(f"{path} is larger than {_MOST_BYTES >> 20} MiB and no policy.")
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", "Give a policy file.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", _REMEDY) from None
    return _file(values, str(path))


def write_policy(path: Path, file: PolicyFile) -> None:
    """Write a file as a whole: a reader finds the old one or the new one, and never half of either."""
    classes = {}
    for name, policy in file.classes.items():
        classes[name] = asdict(policy)
        if name in file.evidence:
            known = asdict(file.evidence[name])
            classes[name]["evidence"] = {key: value for key, value in known.items() if value is not None}
    values = {
        "version": VERSION,
        "model": file.model,
        "system_fingerprint": file.system_fingerprint,
        "date": file.date,
        "classes": classes,
    }
    _file(json.loads(json.dumps(values)), str(path))  # what cannot be read back is not written
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as opened:
            opened.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _file(values: object, where: str) -> PolicyFile:
    content = _object(values, where, ("version", "model", "system_fingerprint", "date", "classes"))
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        _refuse(f"{where}: version is {_short(version)}, and this program reads version {VERSION}.")
    texts = {name: _text(content.get(name), f"{where}: {name}") for name in ("model", "system_fingerprint", "date")}
    try:
        datetime.fromisoformat(texts["date"])
    except ValueError:
        _refuse(f"{where}: date is {_short(texts['date'])} and no date in ISO 8601.")
    named = content.get("classes")
    if not isinstance(named, dict):
        _refuse(f"{where}: classes is {_short(named)}.")
    if len(named) > MOST_CLASSES:
        _refuse(f"{where} names {len(named)} classes, and no more than {MOST_CLASSES} are told apart.")
    classes: dict[str, ClassPolicy] = {}
    evidence: dict[str, Evidence] = {}
    for name, entry in named.items():
        if not name or label_of(name) != name:
            _refuse(f"{where}: {_short(name)} is no class: at most 32 lower case letters, digits, _ and -.")
        place = f"{where}: class {name}"
        known = tuple(item.name for item in fields(ClassPolicy))
        values_of_class = dict(_object(entry, place, (*known, "evidence")))
        found = values_of_class.pop("evidence", None)
        if found is not None:
            evidence[name] = _evidence(found, f"{place}, evidence")
        classes[name] = _class_policy(values_of_class, place)
    return PolicyFile(classes=classes, evidence=evidence, **texts)


def _class_policy(values: dict[str, Any], where: str) -> ClassPolicy:
    drafters = values.get("drafters")
    if drafters is not None:
        if not isinstance(drafters, list) or not drafters or len(drafters) > _MOST_DRAFTERS:
            _refuse(f"{where}: drafters is {_short(drafters)}.", "Give a list of names, or null for all there are.")
        values["drafters"] = tuple(_text(name, f"{where}: drafters") for name in drafters)
    if "reason" in values:
        _text(values["reason"], f"{where}: reason", may_be_empty=True)
    try:
        return ClassPolicy(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.remedy) from None


def _evidence(values: object, where: str) -> Evidence:
    content = _object(values, where, tuple(item.name for item in fields(Evidence)))
    for name, value in content.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0.0 <= value <= 1e9):
            _refuse(f"{where}: {name} is {_short(value)}.", "Give a number of at least 0, or leave it out.")
    return Evidence(**{name: None if value is None else float(value) for name, value in content.items()})


def _object(value: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(f"{where} is {_short(value)} and no object.")
    unknown = [name for name in value if name not in known]
    if unknown:
        _refuse(f"{where}: there is nothing named {_short(unknown[0])}.", f"Choose from {', '.join(known)}.")
    return value


def _text(value: object, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty) or len(value) > _MOST_CHARACTERS:
        _refuse(f"{where} is {_short(value)}.", f"Give a text of at most {_MOST_CHARACTERS} characters.")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(f"{where} has a lone surrogate.", "Write text that can be stored as UTF-8.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two the one that is dropped might be the one that was meant."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**40:
        return "a huge number"
    if isinstance(value, float) and not math.isfinite(value):
        return "no number"
    written = json.dumps(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _refuse(what: str, remedy: str = _REMEDY) -> NoReturn:
    raise ConfigError(what, remedy)

"""The record of a bench as the page reads it: checked at the door, so that what draws can trust it.

A record is a manifest and rows, one row per class, drafter and setting. A setting is what the page lets its reader
choose: weights, numerics, temperature and concurrency. Drafter `plain` is decoding without drafts, `default` is what a
user gets; class `all` is the sum over the classes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from understudy.errors import ConfigError

PLAIN = "plain"
DEFAULT = "default"
ALL = "all"
LATENCIES = ("ttft_ms", "tpot_ms", "request_ms")
QUANTILES = ("p50", "p95", "p99")
STAGES = {"draft_s": "draft", "forward_s": "verify", "sample_s": "sample and host", "other_s": "between cycles"}
"""Where a cycle's time goes, and in words: a GPU draws words while it verifies, and only the rest is the host's."""
HIDDEN = "hidden_s"
"""Of `sample_s`, what the host did while the next cycle was under way already: nobody waited for it."""
MEMORY = ("target", "draft", "kv")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """What was held fixed while classes and drafters were compared."""

    weights: str
    numerics: str
    temperature: float
    concurrency: int | None
    """None in an open loop."""


@dataclass(frozen=True, slots=True)
class Row:
    """One class with one drafter at one setting. What was not measured is None, or empty."""

    name: str
    """The workload class, as the user wrote it."""
    drafter: str
    setting: Setting
    tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    tokens_per_cycle: float | None
    rows_per_cycle: float | None
    bandwidth_gb_s: float | None
    latency: Mapping[str, Mapping[str, float]]
    """Of LATENCIES, then of QUANTILES: milliseconds."""
    memory_bytes: Mapping[str, float]
    identical: bool | None


@dataclass(frozen=True, slots=True)
class Detail:
    """What the manifest holds about one row: times of STAGES and HIDDEN, or single latencies of each of LATENCIES."""

    name: str
    drafter: str
    temperature: float
    concurrency: int | None
    weights: str
    """Empty where the manifest does not say; then it stands for all weights."""
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Measured:
    """A whole record."""

    manifest: Mapping[str, Any]
    rows: tuple[Row, ...]
    cycle_time: tuple[Detail, ...]
    samples: tuple[Detail, ...]

    @cached_property
    def settings(self) -> list[Setting]:
        """Every setting, those of one kind of arithmetic together, the coldest and least busy first."""
        kinds = _in_order((row.setting.weights, row.setting.numerics) for row in self.rows)
        found = _in_order(row.setting for row in self.rows)
        return sorted(found, key=lambda s: (kinds.index((s.weights, s.numerics)), s.temperature, s.concurrency or 0))

    @cached_property
    def classes(self) -> list[str]:
        """Every class in the order of the record, the sum last."""
        return sorted(_in_order(row.name for row in self.rows), key=lambda name: name == ALL)

    @cached_property
    def drafters(self) -> list[str]:
        """Every drafter: plain, the default, and then the others in the order of the record."""
        first = {PLAIN: 0, DEFAULT: 1}
        return sorted(_in_order(row.drafter for row in self.rows), key=lambda drafter: first.get(drafter, 2))

    @property
    def speculative(self) -> list[str]:
        """Every drafter but plain."""
        return [drafter for drafter in self.drafters if drafter != PLAIN]

    @cached_property
    def overall(self) -> str | None:
        """The class that stands for all: the sum, or the only class there is."""
        names = self.classes
        return names[-1] if ALL in names or len(names) == 1 else None

    def row(self, setting: Setting, drafter: str, name: str | None) -> Row | None:
        """Find the row of a class with a drafter at a setting, if it was measured."""
        return self._by_key.get((setting, drafter, name))

    @cached_property
    def _by_key(self) -> dict[tuple[Setting, str, str | None], Row]:
        return {(row.setting, row.drafter, row.name): row for row in self.rows}

    def along_concurrency(self, setting: Setting, drafter: str) -> dict[int, float]:
        """Give tokens/s over all classes by concurrency, everything else as in this setting; an open loop has none."""
        kind = (setting.weights, setting.numerics, setting.temperature)
        rows = [row for row in self.rows if (row.drafter, row.name) == (drafter, self.overall)]
        same = [row for row in rows if (row.setting.weights, row.setting.numerics, row.setting.temperature) == kind]
        speeds = {row.setting.concurrency: row.tokens_per_s for row in same}
        found = {num: speed for num, speed in speeds.items() if num is not None and speed is not None}
        return dict(sorted(found.items()))


def details_at(details: Iterable[Detail], setting: Setting) -> list[Detail]:
    """Choose the details that were measured at a setting."""
    here = (setting.temperature, setting.concurrency)
    same = [detail for detail in details if (detail.temperature, detail.concurrency) == here]
    return [detail for detail in same if detail.weights in ("", setting.weights)]


def read_record(record: Mapping[str, Any]) -> Measured:
    """Check a record's shape, and give it as plain data; whatever is wrong with it is a ConfigError that says where."""
    if not isinstance(record, Mapping):
        _refuse(f"The record is {_short(record)} and no object.")
    try:
        json.dumps(record, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(f"The record is not plain JSON: {error}.")
    found = _Object(record, "the record")
    manifest = found.object("manifest")
    rows = tuple(_row(row) for row in found.objects("rows"))
    if not rows:
        _refuse("The record has no rows.")
    keys = Counter((row.name, row.drafter, row.setting) for row in rows)
    (key, num), *_ = keys.most_common(1)
    if num > 1:
        _refuse(f"The record has {num} rows for class {_short(key[0])} with drafter {_short(key[1])} at {key[2]}.")
    return Measured(
        manifest.values,
        rows,
        tuple(_detail(detail, (*STAGES, HIDDEN)) for detail in manifest.objects("cycle_time")),
        tuple(_detail(detail, LATENCIES) for detail in manifest.objects("samples")),
    )


@dataclass(frozen=True)
class _Object:
    """A JSON object and the words for where it stands. A key that is absent is the same as null."""

    values: Mapping[str, Any]
    where: str

    def object(self, key: str) -> _Object:
        value = self.values.get(key)
        if not isinstance(value, Mapping | None):
            self.wrong(key, "no object")
        return _Object(value or {}, f"{self.where}, {key}")

    def objects(self, key: str) -> list[_Object]:
        values = self.values.get(key) or []
        if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
            self.wrong(key, "no list of objects")
        return [_Object(value, f"{self.where}, {key}[{place}]") for place, value in enumerate(values)]

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            self.wrong(key, "no text")
        return value

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is not None and not _is_number(value):
            self.wrong(key, "no number")
        return value

    def needed_number(self, key: str) -> float:
        value = self.number(key)
        return self.wrong(key, "no number") if value is None else value

    def count(self, key: str) -> int | None:
        value = self.number(key)
        if value is not None and (value < 1 or value != int(value)):
            self.wrong(key, "no count from 1 up")
        return None if value is None else int(value)

    def numbers(self, key: str) -> tuple[float | None, ...]:
        values = self.values.get(key) or ()
        if not isinstance(values, list | tuple) or not all(value is None or _is_number(value) for value in values):
            self.wrong(key, "no list of numbers")
        return tuple(values)

    def given(self, keys: Sequence[str]) -> dict[str, float]:
        found = {key: self.number(key) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def wrong(self, key: str, what: str) -> NoReturn:
        _refuse(f"In {self.where}, {key} is {_short(self.values.get(key))}, {what}.")


def _row(row: _Object) -> Row:
    identical = row.values.get("identical")
    if not isinstance(identical, bool | None):
        row.wrong("identical", "neither true nor false nor null")
    return Row(
        row.text("class"),
        row.text("drafter"),
        Setting(
            row.text("weights", ""),
            row.text("numerics", ""),
            row.needed_number("temperature"),
            row.count("concurrency"),
        ),
        tokens_per_s=row.number("tokens_per_s"),
        speedup=row.number("speedup"),
        speedup_low=row.number("speedup_low"),
        speedup_high=row.number("speedup_high"),
        acceptance_rate=row.number("acceptance_rate"),
        acceptance_by_position=row.numbers("acceptance_by_position"),
        tokens_per_cycle=row.number("tokens_per_cycle"),
        rows_per_cycle=row.number("rows_per_cycle"),
        bandwidth_gb_s=row.number("bandwidth_gb_s"),
        latency={key: row.object(key).given(QUANTILES) for key in LATENCIES},
        memory_bytes=row.object("memory_bytes").given(MEMORY),
        identical=identical,
    )


def _detail(detail: _Object, keys: Sequence[str]) -> Detail:
    """Read one entry about a row; a stage is one number and a latency a list of them."""
    lists = {key: detail.numbers(key) if keys is LATENCIES else (detail.number(key),) for key in keys}
    return Detail(
        detail.text("class"),
        detail.text("drafter"),
        detail.needed_number("temperature"),
        detail.count("concurrency"),
        detail.text("weights", ""),
        {key: tuple(value for value in values if value is not None) for key, values in lists.items()},
    )


def _is_number(value: object) -> bool:
    """Say whether this is a number that can still be multiplied and added without leaving what JSON can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _in_order(values: Iterable[T]) -> list[T]:
    """Each value once, in the order of its first coming."""
    return list(dict.fromkeys(values))


def _short(value: object) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _refuse(what: str) -> NoReturn:
    raise ConfigError(what, "Give a record that `understudy bench --json` wrote.")

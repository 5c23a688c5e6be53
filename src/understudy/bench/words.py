"""What the bench's page says in words: the result, where speculation stops paying, whether the output is identical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.bench.charts import crossover, interval
from understudy.bench.measured import ALL, DEFAULT, PLAIN, Measured, Row, Setting

GIB = 1 << 30
MIB = 1 << 20
MODEL_KEYS = ("name", "id", "repo", "path", "source")
MACHINE_KEYS = ("gpu", "cpu", "processor", "machine", "name")
CORE_KEYS = ("num_cores", "cores", "num_cpus", "cpus", "cpu_count", "threads")


@dataclass(frozen=True, slots=True)
class Tile:
    """One number at the top of the page."""

    title: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The result, before any chart."""

    title: str
    sentences: Sequence[str]
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Over how many comparisons with plain decoding a class came out the same."""

    name: str
    num_same: int
    num_different: int
    num_unchecked: int

    @property
    def words(self) -> str:
        """The verdict itself."""
        if self.num_different:
            return "differs"
        if not self.num_same:
            return "not checked"
        return "identical where checked" if self.num_unchecked else "identical"


def headline(measured: Measured) -> Headline:
    """State the result at the first setting, and the range over all of them."""
    setting = measured.settings[0]
    drafter = _main_drafter(measured)
    row = measured.row(setting, drafter, measured.overall)
    total = _total(verdicts(measured))
    sentences = [_where(measured, setting, drafter, row), *_range(measured, drafter)]
    title = f"{_speed(row)}, {_same(total)}"
    return Headline(title, sentences, _tiles(measured, setting, row, total))


def _main_drafter(measured: Measured) -> str:
    """What a user gets, or else the first drafter there is."""
    drafters = measured.speculative
    return DEFAULT if DEFAULT in drafters or not drafters else drafters[0]


def _speed(row: Row | None) -> str:
    if row is None or row.speedup is None:
        return "Overall speed-up not measured"
    low = row.speedup if row.speedup_low is None else row.speedup_low
    high = row.speedup if row.speedup_high is None else row.speedup_high
    if low > 1:
        return f"{row.speedup:.2f} times as fast"
    if high < 1:
        return f"Slower: {row.speedup:.2f} times as fast"
    return f"No clear difference: {row.speedup:.2f} times as fast"


def _same(total: Verdict) -> str:
    num = total.num_same + total.num_different
    return {
        "identical": "with identical output",
        "identical where checked": f"with identical output in the {total.num_same} comparisons that were checked",
        "not checked": "identity of the output not checked",
        "differs": f"but the output differs in {total.num_different} of {num} comparisons",
    }[total.words]


def _where(measured: Measured, setting: Setting, drafter: str, row: Row | None) -> str:
    manifest = measured.manifest
    model = _first(manifest.get("model"), MODEL_KEYS) or "An unnamed model"
    machine = _first(manifest.get("hardware"), MACHINE_KEYS) or "an unnamed machine"
    cores = "" if _first(manifest.get("hardware"), ("gpu",)) else _first(manifest.get("hardware"), CORE_KEYS)
    on = f"{model} on {machine}" + (f" ({cores} cores)" if cores else "")
    who = "" if drafter == DEFAULT else f" with drafter {drafter}"
    under = f"at temperature {setting.temperature:g}, {at_once(setting.concurrency)}"
    return f"{on}: speculation{who} against plain decoding {under}{interval(row) if row else ''}."


def _range(measured: Measured, drafter: str) -> list[str]:
    """Say how far the speed-up goes over all settings, so that the first one is not taken for all."""
    rows = [measured.row(setting, drafter, measured.overall) for setting in measured.settings]
    found = [row for row in rows if row is not None and row.speedup is not None]
    if len(found) < 2:
        return []
    found.sort(key=lambda row: row.speedup or 0.0)
    ends = " to ".join(
        f"{row.speedup:.2f} (temperature {row.setting.temperature:g}, {at_once(row.setting.concurrency)})"
        for row in (found[0], found[-1])
    )
    return [f"Over all {len(found)} settings measured, the speed-up goes from {ends}."]


def _tiles(measured: Measured, setting: Setting, row: Row | None, total: Verdict) -> list[Tile]:
    plain = measured.row(setting, PLAIN, measured.overall)
    before, after = (figure(r.tokens_per_s if r else None) for r in (plain, row))
    memory = row.memory_bytes if row else {}
    parts = ", ".join(f"{name} {as_bytes(memory[name])}" for name in memory)
    accepted = f"{row.acceptance_rate:.0%}" if row and row.acceptance_rate is not None else "–"
    checked = total.num_same + total.num_different
    return [
        Tile("Speed-up", f"{row.speedup:.2f}×" if row and row.speedup else "–", interval(row)[2:] if row else ""),
        Tile("Tokens per second", after, f"plain decoding: {before}"),
        Tile(
            "Identical output", f"{total.num_same} of {checked}" if checked else "–", "comparisons with plain decoding"
        ),
        Tile("Drafts accepted", accepted, f"{figure(row.tokens_per_cycle if row else None)} tokens per cycle"),
        Tile("Memory", as_bytes(sum(memory.values())) if memory else "–", parts),
    ]


def verdicts(measured: Measured) -> list[Verdict]:
    """Count, for each class, the comparisons with plain decoding that came out the same; without it there were none."""
    found = []
    compared = PLAIN in measured.drafters
    for name in measured.classes:
        rows = [row for row in measured.rows if row.name == name and row.drafter != PLAIN]
        said = [row.identical if compared else None for row in rows]
        found.append(Verdict(name, said.count(True), said.count(False), said.count(None)))
    return found


def _total(found: Sequence[Verdict]) -> Verdict:
    """Add the classes up; the sum's own rows count only where they stand alone, or where they alone say no."""
    single = [verdict for verdict in found if verdict.name != ALL]
    counted = single if any(v.num_same or v.num_different for v in single) else found
    total = Verdict(ALL, *(sum(getattr(v, field) for v in counted) for field in Verdict.__slots__[1:]))
    summed = [verdict for verdict in found if verdict.name == ALL and verdict.num_different]
    return summed[0] if summed and not total.num_different else total


def crossovers(measured: Measured, setting: Setting) -> list[str]:
    """Say for each drafter at which concurrency speculation stops paying, or that it does not in what was measured."""
    if setting.concurrency is None:
        return []
    plain = measured.along_concurrency(setting, PLAIN)
    return [
        _crossover(drafter, plain, measured.along_concurrency(setting, drafter)) for drafter in measured.speculative
    ]


def _crossover(drafter: str, plain: dict[int, float], drafted: dict[int, float]) -> str:
    both = [num for num in drafted if num in plain]
    if not both:
        return f"{drafter}: not measured against plain decoding."
    found = crossover(plain, drafted)
    if found:
        return f"{drafter}: speculation stops paying at about {found.concurrency:.3g} requests at once."
    where = (
        f"in the measured range ({both[0]} to {both[-1]} at once)" if len(both) > 1 else f"at {both[0]}, the only one"
    )
    faster = [str(num) for num in both if drafted[num] >= plain[num]]
    slower = [str(num) for num in both if drafted[num] < plain[num]]
    if not slower:
        how = "faster than plain decoding throughout"
    elif not faster:
        how = "slower than plain decoding throughout"
    else:
        how = f"slower at {', '.join(slower)}, faster at {', '.join(faster)}"
    return f"{drafter}: no crossover {where}; {how}."


def at_once(concurrency: int | None) -> str:
    """Say a concurrency."""
    if concurrency is None:
        return "in an open loop"
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def figure(value: float | None, unit: str = "") -> str:
    """Write a number with about three digits and its unit; a dash where there is none."""
    if value is None:
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def plain_number(value: Any) -> str:
    """Write a value of a setting; only a concurrency can be None."""
    if value is None:
        return "open loop"
    return f"{value:g}" if isinstance(value, int | float) else str(value) or "not said"


def as_bytes(num_bytes: float) -> str:
    """Write a size."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def _first(values: Any, keys: Sequence[str]) -> str:
    """Find the first of some keys that holds a text or a number; a text in place of the mapping is taken as it is."""
    if not isinstance(values, Mapping):
        return values if isinstance(values, str) else ""
    return next((str(values[key]) for key in keys if isinstance(values.get(key), str | int) and values[key]), "")

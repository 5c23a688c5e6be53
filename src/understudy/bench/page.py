"""The page of a bench: one HTML file that holds its charts, its data and all it needs, and asks nothing of any network.

`write_page` makes it from the record that `understudy bench --json` writes. From a shell:

    python -m understudy.bench.page RECORD.json OUT.html

Every view (one setting of weights, numerics, temperature and concurrency) is drawn here, in Python; the page's own
script only swaps views and colours. All text of the record is escaped by the template, in the embedded JSON too.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.bench import charts, time_charts, words
from understudy.bench.chart_style import Figure
from understudy.bench.measured import LATENCIES, PLAIN, QUANTILES, Measured, Row, Setting, read_record
from understudy.errors import ConfigError, UnderstudyError

TEMPLATE = Path(__file__).parents[1] / "data" / "bench_page.html"
SELECTORS = {"weights": "Weights", "numerics": "Numerics", "temperature": "Temperature", "concurrency": "Concurrency"}
"""Fields of a setting that a reader may choose, and what they are called."""
QUANTITIES = {"ttft_ms": "To the first token", "tpot_ms": "Per output token", "request_ms": "Per request"}
DRAWN = ("cycle_time", "samples")
"""Parts of the manifest that the charts show; they are left out of its table, not of its JSON."""


@dataclass(frozen=True)
class View:
    """All of the page that depends on the setting."""

    setting: Setting
    figures: Mapping[str, Figure | None]
    crossovers: Sequence[str]
    latencies: Sequence[Mapping[str, Any]]
    """The table under the latency charts, a mapping per line."""


def page_html(record: Mapping[str, Any]) -> str:
    """Make the page of a record, or say with a ConfigError what is wrong with the record."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    measured = read_record(record)
    views = [_view(measured, setting) for setting in measured.settings]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"figure": words.figure, "as_bytes": words.as_bytes}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        headline=words.headline(measured),
        selectors=_selectors(measured),
        views=views,
        figures=[{"setting": _choices(view.setting), "figures": view.figures} for view in views],
        verdicts=words.verdicts(measured),
        rows=_sorted_rows(measured),
        several_kinds=len({(setting.weights, setting.numerics) for setting in measured.settings}) > 1,
        quantities=QUANTITIES,
        manifest=_flat({key: value for key, value in measured.manifest.items() if key not in DRAWN}),
        manifest_json=_readable_json(measured.manifest),
        command=_command(measured.manifest),
        notes=_notes(measured.manifest),
        record=record,
        plotly_js=get_plotlyjs(),
    )


def write_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record to a file."""
    html = page_html(record)
    try:
        path.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}.", "Give a path in a folder that exists."
        ) from None


def _view(measured: Measured, setting: Setting) -> View:
    figures = {
        "speedup": charts.speedup(measured, setting),
        "acceptance": charts.acceptance(measured, setting),
        "throughput": charts.throughput(measured, setting),
        **{quantity: time_charts.latency(measured, setting, quantity) for quantity in LATENCIES},
        "cycle_time": time_charts.cycle_time(measured, setting),
    }
    return View(setting, figures, words.crossovers(measured, setting), _latencies(measured, setting))


def _choices(setting: Setting) -> dict[str, str]:
    """Give the fields of a setting as the texts that the selectors offer."""
    return {field: words.plain_number(getattr(setting, field)) for field in SELECTORS}


def _selectors(measured: Measured) -> list[dict[str, Any]]:
    """Give a selector for each field of the settings that has several values."""
    found = []
    for field, title in SELECTORS.items():
        values = list(dict.fromkeys(getattr(setting, field) for setting in measured.settings))
        if len(values) > 1:
            ordered = values if isinstance(values[0], str) else sorted(values, key=lambda value: value or 0)
            found.append({"field": field, "title": title, "options": [words.plain_number(value) for value in ordered]})
    return found


def _latencies(measured: Measured, setting: Setting) -> list[dict[str, Any]]:
    """Give a line per quantity and drafter over all classes: quantiles, and each as a ratio to plain decoding's."""
    lines = []
    plain = measured.row(setting, PLAIN, measured.overall)
    for quantity in LATENCIES:
        for drafter in measured.drafters:
            row = measured.row(setting, drafter, measured.overall)
            if row is None or not row.latency[quantity]:
                continue
            cells = [_latency_cell(row, plain, quantity, quantile) for quantile in QUANTILES]
            lines.append({"quantity": QUANTITIES[quantity], "drafter": drafter, "cells": cells})
    return lines


def _latency_cell(row: Row, plain: Row | None, quantity: str, quantile: str) -> tuple[str, str]:
    """Give a latency and its ratio to plain decoding's, both as text."""
    value = row.latency[quantity].get(quantile)
    base = plain.latency[quantity].get(quantile) if plain is not None and row.drafter != PLAIN else None
    return words.figure(value, "ms"), f"{value / base:.2f}×" if value is not None and base else ""


def _sorted_rows(measured: Measured) -> list[Row]:
    settings, classes, drafters = measured.settings, measured.classes, measured.drafters

    def place(row: Row) -> tuple[int, int, int]:
        return settings.index(row.setting), classes.index(row.name), drafters.index(row.drafter)

    return sorted(measured.rows, key=place)


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Spread a tree of settings into lines of dotted name and value."""
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _flat(inner, f"{path}.{key}" if path else str(key))]
    if isinstance(value, str):
        return [(path, value)]
    return [(path, json.dumps(value, ensure_ascii=False))] if path else []


def _readable_json(manifest: Mapping[str, Any]) -> str:
    """Write JSON a line per value, and long lists of numbers on one line."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    return re.sub(r"\[[\s\d.,eE+-]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def _command(manifest: Mapping[str, Any]) -> str:
    """Find the command line in the settings: a text, or a list of arguments. Empty where there is none."""
    settings = manifest.get("settings")
    command = settings.get("command") if isinstance(settings, Mapping) else None
    if isinstance(command, list | tuple):
        return shlex.join(str(argument) for argument in command)
    return command if isinstance(command, str) else ""


def _notes(manifest: Mapping[str, Any]) -> list[str]:
    """Give the record's notes, and one of our own where the commit does not say all."""
    notes = manifest.get("notes") or []
    own = ["The code had changes that its commit does not hold."] if manifest.get("dirty") is True else []
    return [str(note) for note in (notes if isinstance(notes, list | tuple) else [notes])] + own


def main(arguments: Sequence[str]) -> int:
    """Make the page of a record file."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m understudy.bench.page RECORD.json OUT.html\n")
        return 2
    source, out = map(Path, arguments)
    try:
        write_page(_load(source), out)
    except UnderstudyError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _load(source: Path) -> Any:
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error}.", "Give a record of `understudy bench --json`.") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

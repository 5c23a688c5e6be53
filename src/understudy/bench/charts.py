"""The charts of speed on the bench's page, as plotly figures in plain JSON: data and layout.

Every text that comes from a record passes `label`, since plotly reads a little HTML in texts. Classes stand at numbered
places and are named by tick labels, so that a class called "2024" or named like another one is still itself. What was
not measured has no figure: None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from understudy.bench.chart_style import (
    CLASS_COLORS,
    CLASS_SYMBOLS,
    DASHES,
    SLOWER,
    Figure,
    drafter_color,
    label,
    layout,
    line,
    named_axis,
    title,
)
from understudy.bench.measured import ALL, PLAIN, Measured, Row, Setting


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where a drafter's line falls below the plain one."""

    concurrency: float
    tokens_per_s: float


def speedup(measured: Measured, setting: Setting) -> Figure | None:
    """Draw a bar per class from 1, to the right where speculation is faster, with its interval."""
    groups = [
        [row for row in _rows(measured, setting, drafter) if row.speedup is not None]
        for drafter in measured.speculative
    ]
    groups = [rows for rows in groups if rows]
    if not groups:
        return None
    present = {row.name for rows in groups for row in rows}
    names = [name for name in reversed(measured.classes) if name in present]
    thickness = 0.72 / len(groups)
    traces = []
    for place, rows in enumerate(groups):
        middles = [names.index(row.name) + 0.36 - (place + 0.5) * thickness for row in rows]
        color = drafter_color(measured, rows[0].drafter)
        outline = color if len(groups) > 1 else SLOWER  # of a slower bar: it still says whose it is
        traces.append(_bars_from_one(rows, middles, width=0.9 * thickness, color=color, outline=outline))
        traces.append(_values_beside(rows, middles))
    low = min(1.0, *(_bounds(row)[0] for rows in groups for row in rows))
    high = max(1.0, *(_bounds(row)[1] for rows in groups for row in rows))
    span = max(high - low, 0.1)
    return {
        "data": traces,
        "layout": layout(
            height=90 + len(names) * max(34, 22 * len(groups)),
            xaxis={
                "title": title("times as fast as plain decoding"),
                "range": [low - 0.06 * span, high + 0.25 * span],
                "zeroline": False,
            },
            yaxis=named_axis("<b>all</b>" if name == ALL else label(name) for name in names),
            shapes=[{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": line("@ink", 1.5)}],
            barmode="overlay",
            showlegend=len(groups) > 1,
        ),
    }


def _bars_from_one(rows: Sequence[Row], middles: Sequence[float], *, width: float, color: str, outline: str) -> Figure:
    values = [row.speedup or 0.0 for row in rows]
    slower = [value < 1 for value in values]
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(rows[0].drafter),
        "base": 1,
        "x": [value - 1 for value in values],
        "y": list(middles),
        "width": width,
        "customdata": values,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_bounds(row)[1] - value for row, value in zip(rows, values, strict=True)],
            "arrayminus": [value - _bounds(row)[0] for row, value in zip(rows, values, strict=True)],
            "color": "@ink",
            "thickness": 1.5,
            "width": 4,
        },
        "marker": {
            "color": [SLOWER if slow else color for slow in slower],
            "line": {"color": outline, "width": [1.5 if slow else 0 for slow in slower]},
            "pattern": {"shape": ["/" if slow else "" for slow in slower], "fgcolor": "@ground", "size": 6},
        },
        "hoverinfo": "text",
        "hovertext": [
            f"{label(row.name, 60)}, {label(row.drafter)}: {value:.2f} times as fast{interval(row)}"
            for row, value in zip(rows, values, strict=True)
        ],
    }


def _values_beside(rows: Sequence[Row], middles: Sequence[float]) -> Figure:
    """Write each value to the right of its bar, its interval and the line at 1."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": [max(1.0, _bounds(row)[1]) for row in rows],
        "y": list(middles),
        "text": [f" {row.speedup:.2f}×" for row in rows],
        "textposition": "middle right",
        "cliponaxis": False,
        "textfont": {"color": "@ink", "size": 13},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _bounds(row: Row) -> tuple[float, float]:
    """The ends of a speed-up's interval, which is the speed-up itself where there is none."""
    value = row.speedup or 0.0
    low = value if row.speedup_low is None else row.speedup_low
    high = value if row.speedup_high is None else row.speedup_high
    return min(low, value), max(high, value)


def interval(row: Row) -> str:
    """Say a speed-up's interval, with a comma before it; nothing where there is none."""
    if row.speedup_low is None or row.speedup_high is None:
        return ""
    return f", interval {row.speedup_low:.2f} to {row.speedup_high:.2f}"


def acceptance(measured: Measured, setting: Setting) -> Figure | None:
    """Draw a line per class and drafter: how often the word drafted at each place was the target's own."""
    rows = [row for drafter in measured.speculative for row in _rows(measured, setting, drafter)]
    rows = [row for row in rows if any(share is not None for share in row.acceptance_by_position)]
    if not rows:
        return None
    depth = max(len(row.acceptance_by_position) for row in rows)
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    lines = [_acceptance_line(measured, row) for row in rows]
    named: set[str] = set()
    for trace in lines:  # a class is in the legend once, whatever its number of drafters
        trace["showlegend"] = trace["legendgroup"] not in named
        named.add(trace["legendgroup"])
    if len(drafters) > 1:
        lines += [_dash_named(measured, drafter) for drafter in drafters]
    return {
        "data": lines,
        "layout": layout(
            height=430,
            xaxis={"title": title("place in the draft"), "dtick": 1 if depth <= 16 else 4, "zeroline": False},
            yaxis={"title": title("accepted"), "tickformat": ".0%", "range": [0, 1.04]},
        ),
    }


def _acceptance_line(measured: Measured, row: Row) -> Figure:
    place = measured.classes.index(row.name)
    color = "@ink" if row.name == ALL else CLASS_COLORS[place % len(CLASS_COLORS)]
    shares = row.acceptance_by_position
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(row.name),
        "legendgroup": f"class {place}",
        "x": list(range(1, len(shares) + 1)),
        "y": list(shares),
        "line": {**line(color, 3 if row.name == ALL else 1.75), "dash": _dash(measured, row.drafter)},
        "marker": {"symbol": CLASS_SYMBOLS[place % len(CLASS_SYMBOLS)], "size": 7, "color": color},
        "hoverinfo": "text",
        "hovertext": [
            "" if share is None else f"{label(row.name, 60)}, {label(row.drafter)}, place {at}: {share:.0%} accepted"
            for at, share in enumerate(shares, 1)
        ],
    }


def _dash_named(measured: Measured, drafter: str) -> Figure:
    """An entry of the legend that says whose dash this is."""
    dashed = {**line("@muted", 1.75), "dash": _dash(measured, drafter)}
    return {"type": "scatter", "mode": "lines", "name": label(drafter), "x": [None], "y": [None], "line": dashed}


def _dash(measured: Measured, drafter: str) -> str:
    return DASHES[measured.speculative.index(drafter) % len(DASHES)]


def throughput(measured: Measured, setting: Setting) -> Figure | None:
    """Draw tokens/s against concurrency, a line per drafter, and mark where speculation stops paying."""
    lines = {drafter: measured.along_concurrency(setting, drafter) for drafter in measured.drafters}
    lines = {drafter: speeds for drafter, speeds in lines.items() if speeds}
    if not lines:
        return None
    ticks = sorted({num for speeds in lines.values() for num in speeds})
    traces = [_throughput_line(measured, drafter, speeds) for drafter, speeds in lines.items()]
    for drafter, speeds in lines.items():
        found = crossover(lines.get(PLAIN, {}), speeds) if drafter != PLAIN else None
        if found:
            traces.append(_crossover_mark(drafter, found))
    return {
        "data": traces,
        "layout": layout(
            height=400,
            xaxis={
                "type": "log",
                "title": title("requests at once"),
                "tickvals": ticks,
                "ticktext": [str(num) for num in ticks],
                "range": [math.log10(ticks[0] / 1.2), math.log10(ticks[-1] * 1.2)],
            },
            yaxis={"title": title("tokens per second"), "rangemode": "tozero"},
        ),
    }


def _throughput_line(measured: Measured, drafter: str, speeds: dict[int, float]) -> Figure:
    color = drafter_color(measured, drafter)
    dash = "dash" if drafter == PLAIN else "solid"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(drafter),
        "x": list(speeds),
        "y": list(speeds.values()),
        "line": {**line(color, 2.5), "dash": dash},
        "marker": {"size": 8, "color": color, "symbol": "square" if drafter == PLAIN else "circle"},
        "hoverinfo": "text",
        "hovertext": [f"{label(drafter)}, {num} at once: {speed:.1f} tokens/s" for num, speed in speeds.items()],
    }


def _crossover_mark(drafter: str, found: Crossover) -> Figure:
    name = f"{label(drafter)} stops paying at {found.concurrency:.3g}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [found.concurrency, found.concurrency],
        "y": [0, found.tokens_per_s],
        "line": {**line(SLOWER, 1.5), "dash": "dot"},
        "marker": {"size": [0, 14], "symbol": "diamond-open", "color": SLOWER, "line": {"width": 2}},
        "hoverinfo": "text",
        "hovertext": ["", name],
    }


def crossover(plain: dict[int, float], drafted: dict[int, float]) -> Crossover | None:
    """Find where the drafter's line, as drawn over the logarithm of concurrency, first falls below the plain one."""
    both = [num for num in drafted if num in plain]
    for low, high in pairwise(both):
        before, after = drafted[low] - plain[low], drafted[high] - plain[high]
        if before >= 0 > after:
            part = before / (before - after)
            return Crossover(low * (high / low) ** part, plain[low] + part * (plain[high] - plain[low]))
    return None


def _rows(measured: Measured, setting: Setting, drafter: str) -> list[Row]:
    found = (measured.row(setting, drafter, name) for name in measured.classes)
    return [row for row in found if row is not None]

"""The charts of time on the bench's page: how long requests took, and where a cycle's time went.

Like those of `charts`: plotly figures in plain JSON, None where nothing was measured, every text through `label`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from understudy.bench.chart_style import STAGE_COLORS, Figure, drafter_color, label, layout, line, named_axis, title
from understudy.bench.measured import ALL, HIDDEN, PLAIN, STAGES, Detail, Measured, Setting, details_at

NUM_CURVE_POINTS = 400
"""A distribution is drawn with at most so many points."""


def latency(measured: Measured, setting: Setting, quantity: str) -> Figure | None:
    """Draw a rising curve per drafter: the share of requests that took at most so long."""
    found = details_at(measured.samples, setting)
    traces = []
    for drafter in measured.drafters:
        values = _pooled([detail for detail in found if detail.drafter == drafter], quantity)
        if values:
            traces.append(_curve(measured, drafter, values))
    if not traces:
        return None
    return {
        "data": traces,
        "layout": layout(
            height=320,
            xaxis={"title": title("milliseconds"), "rangemode": "tozero", "nticks": 6},
            yaxis={"tickformat": ".0%", "range": [0, 1.04]},
        ),
    }


def _pooled(details: Sequence[Detail], quantity: str) -> list[float]:
    """Give every single latency over all classes, from the entry of the sum where there is one."""
    summed = [detail for detail in details if detail.name == ALL]
    return sorted(value for detail in summed or details for value in detail.values[quantity])


def _curve(measured: Measured, drafter: str, values: Sequence[float]) -> Figure:
    num = len(values)
    step = max(1, math.ceil(num / NUM_CURVE_POINTS))
    ranks = sorted({*range(step, num + 1, step), num})
    color = drafter_color(measured, drafter)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(drafter),
        "x": [values[0], *(values[rank - 1] for rank in ranks)],
        "y": [0.0, *(rank / num for rank in ranks)],
        "line": {**line(color, 2.25), "shape": "hv", "dash": "dash" if drafter == PLAIN else "solid"},
        "hoverinfo": "text",
        "hovertext": ["", *(f"{label(drafter)}: {rank / num:.0%} within {values[rank - 1]:.1f} ms" for rank in ranks)],
    }


def cycle_time(measured: Measured, setting: Setting) -> Figure | None:
    """Draw a bar per class and drafter, stacked of the stages of one cycle."""
    found = [detail for detail in details_at(measured.cycle_time, setting) if any(detail.values.values())]
    if not found:
        return None
    order = [*measured.classes, *measured.drafters]
    found = [detail for detail in found if detail.name in order and detail.drafter in order]
    found.sort(key=lambda detail: (order.index(detail.name), order.index(detail.drafter)), reverse=True)
    totals = [sum(_milliseconds(detail, stage) for stage in STAGES) for detail in found]
    return {
        "data": [_stage_bars(stage, found, totals) for stage in STAGES],
        "layout": layout(
            height=110 + 25 * len(found),
            xaxis={"title": title("milliseconds per cycle"), "rangemode": "tozero"},
            yaxis=named_axis([f"{label(detail.name, 18)}, {label(detail.drafter, 10)}" for detail in found]),
            barmode="stack",
            bargap=0.3,
        ),
    }


def _stage_bars(stage: str, details: Sequence[Detail], totals: Sequence[float]) -> Figure:
    times = [_milliseconds(detail, stage) for detail in details]
    word = STAGES[stage]
    return {
        "type": "bar",
        "orientation": "h",
        "name": word,
        "x": times,
        "y": list(range(len(details))),
        "marker": {"color": STAGE_COLORS[stage]},
        "hoverinfo": "text",
        "hovertext": [
            f"{label(detail.name, 60)}, {label(detail.drafter)}: {word} {time:.2f} ms"
            + (f", {time / total:.0%} of the cycle" if total else "")
            for detail, time, total in zip(details, times, totals, strict=True)
        ],
    }


def _milliseconds(detail: Detail, stage: str) -> float:
    hidden_s = sum(detail.values[HIDDEN]) if stage == "sample_s" else 0.0
    return 1000 * max(0.0, sum(detail.values[stage]) - hidden_s)

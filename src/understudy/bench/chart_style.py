"""How the charts of the bench's page look: colours, letters, axes.

A colour that begins with @ is a colour of the page, which knows whether it is light or dark. The palette keeps apart
for readers who do not see all colours, and on light and on dark ground; where it matters, a hatch, a dash or a symbol
says the same again.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from understudy.bench.measured import DEFAULT, PLAIN, Measured

Figure = dict[str, Any]
"""A plotly figure or a part of one, as plain JSON."""

SLOWER = "#d1571b"
DRAFTER_COLORS = ("#2b7bba", "#8e6bb8", "#16958a", "#b58900", "#4aa3df")
PLAIN_COLOR = "#868e99"
CLASS_COLORS = ("#2b7bba", "#d1571b", "#16958a", "#a865a6", "#b58900", "#4aa3df", "#8c6d5a", "#6b8e23")
CLASS_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
STAGE_COLORS = {"draft_s": "#b58900", "forward_s": "#2b7bba", "sample_s": "#16958a", "other_s": PLAIN_COLOR}


def label(text: str, limit: int = 26) -> str:
    """Make a text of the record safe for plotly, and short enough for an axis."""
    return escape(text if len(text) <= limit else f"{text[: limit - 1]}…", quote=False)


def drafter_color(measured: Measured, drafter: str) -> str:
    """Give a drafter its colour: grey for plain, the first for the default."""
    if drafter == PLAIN:
        return PLAIN_COLOR
    others = [other for other in measured.speculative if other != DEFAULT]
    return DRAFTER_COLORS[0 if drafter == DEFAULT else (others.index(drafter) + 1) % len(DRAFTER_COLORS)]


def line(color: str, width: float) -> dict[str, Any]:
    """A line of this width in pixels."""
    return {"color": color, "width": width}


def title(text: str) -> dict[str, Any]:
    """An axis title."""
    return {"text": text, "font": {"size": 13, "color": "@muted"}}


def named_axis(names: Iterable[str]) -> dict[str, Any]:
    """An axis of numbered places with names, upwards."""
    texts = list(names)
    places = list(range(len(texts)))
    return {
        "tickmode": "array",
        "tickvals": places,
        "ticktext": texts,
        "range": [-0.6, len(texts) - 0.4],
        "showgrid": False,
        "zeroline": False,
        "automargin": True,
    }


def layout(*, height: int, xaxis: dict[str, Any], yaxis: dict[str, Any], **others: Any) -> dict[str, Any]:
    """What all charts share: no ground of their own, the page's letters, the legend above."""
    letters = {"family": "system-ui, sans-serif", "size": 13, "color": "@ink"}
    lines = dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor"), "@line")
    axis = {**lines, "fixedrange": True, "automargin": True}
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 8, "r": 8, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": letters,
        "hoverlabel": {"bgcolor": "@ground", "bordercolor": "@line", "font": letters, "align": "left"},
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": {**axis, **xaxis},
        "yaxis": {**axis, **yaxis},
        **others,
    }

"""Tails of several benches as one: how long first words, words and whole requests take beside plain, by class.

    understudy bench --drafter default --drafter none --concurrency 1,4,8 --max-tokens 48 --budget 600 --json A
    python benchmarks/tails.py A [B ...]

The 99th percentile of a few hundred answers is the third longest of them, and moves by a tenth from run to run. So
the latencies of all records are put together, and each ratio comes with an interval that holds it with 95 % (answers
drawn anew, again and again). `none` is plain under another name: what it shows is what these records cannot tell apart.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from understudy.bench.record import DEFAULT, NONE, PLAIN
from understudy.bench.statistics import BOOTSTRAP_SEED, CONFIDENCE, Estimate

BARS = {"ttft_ms": (50, 1.03), "tpot_ms": (99, 1.05), "request_ms": (99, 1.05)}
"""By what is timed: which percentile, and how many times plain it may be."""
NUM_RESAMPLES = 1000

Floats = NDArray[np.float64]
Key = tuple[int | None, str]
"""Requests at once, and a class."""


def pooled(paths: Sequence[Path]) -> dict[Key, dict[str, dict[str, Floats]]]:
    """Milliseconds of all records, by key, arm, and what is timed; all temperatures of a record together."""
    found: dict[Key, dict[str, dict[str, list[float]]]] = {}
    for path in paths:
        for one in json.loads(path.read_text(encoding="utf-8"))["manifest"]["samples"]:
            arms = found.setdefault((one["concurrency"], one["class"]), {})
            timed = arms.setdefault(one["drafter"], {name: [] for name in BARS})
            for name in BARS:
                timed[name] += one[name]
    return {
        key: {arm: {name: np.array(values) for name, values in timed.items()} for arm, timed in arms.items()}
        for key, arms in found.items()
    }


def ratio_of(arm: Floats, plain: Floats, share: int) -> Estimate:
    """The ratio of two percentiles, and its interval; nothing where nothing was timed, as for answers of one word."""
    if not (len(arm) and len(plain)):
        return Estimate(math.nan, math.nan, math.nan)
    draw = np.random.default_rng(BOOTSTRAP_SEED)

    def anew(values: Floats) -> Floats:
        percentiles: Floats = np.percentile(draw.choice(values, (NUM_RESAMPLES, len(values))), share, axis=1)
        return percentiles

    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(anew(arm) / anew(plain), (tail, 100 - tail))
    return Estimate(float(np.percentile(arm, share) / np.percentile(plain, share)), float(low), float(high))


def main() -> None:
    """Print the table, and which bars are missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("records", type=Path, nargs="+")
    found = pooled(parser.parse_args().records)
    for at_once, name in [key for key, arms in found.items() if not arms.keys() >= {PLAIN, DEFAULT}]:
        parser.error(f"{name} with {at_once} at once was not answered both plainly and by default")
    titles = [f"{name.removesuffix('_ms')} p{share}" for name, (share, _) in BARS.items()]
    table = Table(title="shares of plain; in brackets the interval, behind it two equal arms", pad_edge=False, box=None)
    for title in ("at once", "class", "answers", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    num_over = num_ratios = 0
    for (at_once, name), arms in found.items():
        cells = []
        for timed, (share, most) in BARS.items():
            plain = arms[PLAIN][timed]
            ratio = ratio_of(arms[DEFAULT][timed], plain, share)
            equal = f" {ratio_of(arms[NONE][timed], plain, share).value:.3f}" if NONE in arms else ""
            mark = "!" if ratio.value > most else " "
            num_over, num_ratios = num_over + (ratio.value > most), num_ratios + 1
            cells.append(f"{mark}{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}){equal}")
        table.add_row("open" if at_once is None else str(at_once), name, str(len(arms[DEFAULT]["request_ms"])), *cells)
    console = Console(width=150)
    console.print(table)
    bars = ", ".join(f"{title} {most}" for title, (_, most) in zip(titles, BARS.values(), strict=True))
    console.print(f"{num_over} of {num_ratios} are over their bar (!): {bars}")


if __name__ == "__main__":
    main()

"""How a run is told: a bar with the time left while it runs, and a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from understudy.bench.alternate import Measured
from understudy.bench.measured import HIDDEN, STAGES
from understudy.bench.record import ArmFacts, Group, Row, groups
from understudy.bench.served import ALL
from understudy.bench.statistics import speedup

_MOST_SHOWN = 5
_BETWEEN_LINES_S = 10.0
_LEAST_WIDTH = 120
"""Where the output is no terminal: nothing need be cut off there."""
_LEGEND = (
    "plain, speed: tokens per second of the baseline and of the drafter; interval: 95% of the speed-up; accepted: of "
    "the drafted tokens; per cycle: tokens per pass; GB/s: what the drafter's passes read, by their time; ttft, p99: "
    "median time to the first token and 99th percentile of whole requests, as shares of the baseline's; same: text, "
    "token ids and finish reason"
)


class ProgressBar:
    """Shows a run: a bar that is full when the time is up, and a line for each round."""

    def __init__(self, progress: Progress, arms: Sequence[ArmFacts]) -> None:
        self._progress = progress
        self._arms = arms
        self._said_s = time.monotonic()
        self._task = progress.add_task("starting", total=None)

    def at(self, what: str, *, elapsed_s: float, expected_s: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, description=escape(what), completed=elapsed_s, total=expected_s)

    def finished(self, round_number: int, measured: Measured) -> None:
        """Say how it stands, now and then."""
        if time.monotonic() - self._said_s < _BETWEEN_LINES_S:
            return
        self._said_s = time.monotonic()
        sums = [group for group in groups(measured, self._arms) if group.prompt_class == ALL]
        ratios = [(group, speedup(group.pairs)) for group in sums if group.arm != group.baseline]
        told = [f"{escape(_words(group))} {ratio:.2f}x" for group, ratio in ratios if ratio is not None]
        self._progress.console.print(f"[dim]round {round_number}[/dim]  {', '.join(told)}", soft_wrap=True)


def _words(group: Group) -> str:
    at_once = "" if group.concurrency is None else f" x{group.concurrency}"
    return f"{group.arm.name} t{group.temperature:g}{at_once}"


@contextmanager
def progress_bar(console: Console, arms: Sequence[ArmFacts]) -> Iterator[ProgressBar]:
    """Show a bar with the time that is left, for as long as the block runs."""
    columns = (
        BarColumn(bar_width=16),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress, arms)


def show(
    rows: Sequence[Row],
    measured: Measured,
    notes: Sequence[str],
    console: Console,
    *,
    cycle_times: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Print a table for each temperature and concurrency, with where cycles' time went, then what went wrong."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    for temperature, concurrency in dict.fromkeys((row.temperature, row.concurrency) for row in rows):
        here = [row for row in rows if (row.temperature, row.concurrency) == (temperature, concurrency)]
        at_once = "open loop" if concurrency is None else f"{concurrency} at once"
        drafters = list(dict.fromkeys(escape(row.drafter) for row in here))
        versus = f" against {drafters[0]}" if len(drafters) > 1 else ""
        say(f"[bold]{', '.join(drafters[1:] or drafters)}{versus}[/bold], temperature {temperature:g}, {at_once}")
        console.print(_table(here))
        read = {row.drafter: _number(row.bandwidth_gb_s, 1) for row in here if row.prompt_class == ALL}
        for cycle in cycle_times:
            if (cycle["class"], cycle["temperature"], cycle["concurrency"]) == (ALL, temperature, concurrency):
                name = cycle["drafter"]
                say(f"[dim]a cycle of {escape(name)}: {_stages(cycle)}, {read[name]} GB/s[/dim]")
    say(f"[dim]{_LEGEND}[/dim]")
    for note in notes:
        say(f"[yellow]note[/yellow]    {escape(note)}")
    for error in measured.errors[:_MOST_SHOWN]:
        say(f"[red]failed[/red]  {escape(error)}")
    if measured.errors:
        say(f"[bold red]{len(measured.errors)} of {measured.num_requests} requests failed.[/bold red]")
    if not all(row.identical for row in rows):
        say("[bold red]NOT the same words[/bold red] where the last column says no.")


def _table(rows: Sequence[Row]) -> Table:
    """One line for each class and arm, with the baseline's speed beside it."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("class", no_wrap=True)
    several = len({row.drafter for row in rows}) > 2
    if several:
        table.add_column("drafter", no_wrap=True)
    for name in ("plain", "speed", "speed-up", "interval", "accepted", "per cycle", "GB/s", "ttft", "p99", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    baselines = {row.prompt_class: row for row in rows if row.drafter == rows[0].drafter}
    has_others = len(baselines) < len(rows)
    for row in rows:
        base = baselines[row.prompt_class]
        if row is base and has_others:
            continue
        table.add_row(
            escape(row.prompt_class),
            *([escape(row.drafter)] if several else []),
            _number(base.tokens_per_s, 1) if has_others else "-",
            _number(row.tokens_per_s, 1),
            *_speedup(row),
            "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
            _number(row.tokens_per_cycle, 2),
            _number(row.bandwidth_gb_s, 1),
            _ratio(row.ttft_ms.p50, base.ttft_ms.p50),
            _ratio(row.request_ms.p99, base.request_ms.p99),
            "yes" if row.identical and base.identical else "[red]no[/red]",
        )
    return table


def _stages(cycle: Mapping[str, Any]) -> str:
    """Where the time of a cycle goes; what the host does while a device computes takes none."""
    parts = {stage: 1000 * cycle[stage] for stage in STAGES}
    hidden_ms = 1000 * cycle[HIDDEN]
    parts["sample_s"] = max(0.0, parts["sample_s"] - hidden_ms)
    told = ", ".join(f"{STAGES[stage]} {milliseconds:.2f}" for stage, milliseconds in parts.items())
    hidden = f"; {hidden_ms:.2f} ms of the host's work behind it" if hidden_ms else ""
    return f"{sum(parts.values()):.2f} ms ({told}){hidden}"


def _speedup(row: Row) -> tuple[str, str]:
    if row.speedup is None:
        return "-", "-"
    return f"{row.speedup.value:.2f}x", f"{row.speedup.low:.2f}-{row.speedup.high:.2f}"


def _ratio(found: float | None, base: float | None) -> str:
    return f"{found / base:.2f}" if found is not None and base else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

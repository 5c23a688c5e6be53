"""How a replay is told: a bar while it runs, a table by class when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from understudy.advise.what_if import EXACT_AND_MODELLED, LEAST_TRANSCRIPTS, Found, Row, Told

if TYPE_CHECKING:
    from understudy.commands.recorded import Summary

_LEAST_WIDTH = 100


@contextmanager
def progress_bar(console: Console, num_settings: int) -> Iterator[Told]:
    """Show a bar over all settings, for as long as the block runs."""
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=num_settings)
        seen: list[str] = []

        def told(name: str, done: int, total: int) -> None:
            if name not in seen:
                seen.append(name)
            progress.update(task, description=escape(name), completed=len(seen) - 1 + done / total)

        yield told


def show(
    found: Found, summaries: Sequence[Summary], concurrencies: Sequence[int], notes: Sequence[str], console: Console
) -> None:
    """Print a table for each class and number of texts at once, with what was recorded above it."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    for summary in summaries:
        for concurrency in concurrencies:
            rows = found.rows_of(summary.workload_class, concurrency)
            if not rows:
                continue
            at_once = "" if len(concurrencies) == 1 and concurrency == 1 else f", {concurrency} at once"
            say(f"[bold]{escape(summary.workload_class)}[/bold]{at_once}: {summary.describe()}")
            best = found.best(summary.workload_class, concurrency)
            console.print(_table(rows, best))
            say(_verdict(rows, best))
    say(f"[dim]{EXACT_AND_MODELLED}[/dim]")
    for note in notes:
        say(f"[yellow]note[/yellow]    {escape(note)}")


def _table(rows: Sequence[Row], best: Row | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("drafter", no_wrap=True)
    for name in ("depth", "accepted", "per cycle", "rows", "speed-up", "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        estimate = row.speedup
        table.add_row(
            escape(row.drafter),
            "auto" if row.depth is None else str(row.depth),
            "-" if row.acceptance is None else f"{row.acceptance:.0%}",
            f"{row.tokens_per_cycle:.2f}",
            f"{row.rows_per_cycle:.1f}",
            "-" if estimate is None else f"{estimate.value:.2f}x",
            "-" if estimate is None else f"{estimate.low:.2f}-{estimate.high:.2f}",
            "[green]best[/green]" if row is best else "",
        )
    return table


def _verdict(rows: Sequence[Row], best: Row | None) -> str:
    if best is None and max(row.num_texts for row in rows) < LEAST_TRANSCRIPTS:
        return f"[yellow]too few texts to advise on; {LEAST_TRANSCRIPTS} are the least[/yellow]\n"
    if best is None:
        return "[yellow]do not speculate[/yellow]: no setting is faster than plain at the lower end of its interval\n"
    depth = "with depth left to the engine" if best.depth is None else f"at depth {best.depth}"
    return f"[green]{escape(best.drafter)} {depth}[/green]\n"

"""How advice is told: tables, and what follows from them in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from understudy.advise.estimate import Estimate
from understudy.advise.recommend import Advice

_LEAST_WIDTH = 120
"""Where the output is no terminal: nothing need be cut off there."""
_LEGEND = (
    "speed-up: expected speed of decoding by that of plain decoding, with its 95% interval over the answers; accepted: "
    "of the drafted words; break-even: what would have to be accepted for the same drafts to cost nothing; per cycle: "
    "words per pass of the target; depth own: the engine's own rule decides"
)


def show_estimate(found: Estimate, console: Console) -> None:
    """Print what follows from somebody's numbers."""
    _show_points(found, console)
    changes = _table("acceptance", "best depth", "speed-up", "at the same depth")
    for change in found.changes:
        rates = ", ".join(f"{rate:.2f}" for rate in change.acceptance)
        at = f"{rates}  ({change.change:+.1f})" if change.change else rates
        changes.add_row(at, str(change.best.depth), f"{change.best.speedup:.2f}x", f"{change.kept:.2f}x")
    console.print(changes)
    console.print()
    if len(found.batches) > 1:
        batches = _table("batch", "best depth", "speed-up", "break-even")
        for at_batch in found.batches:
            point = at_batch.best
            batches.add_row(str(at_batch.batch), str(point.depth), f"{point.speedup:.2f}x", rate(at_batch.break_even))
        console.print(batches)
        console.print()
    for line in found.advice:
        console.print(line, soft_wrap=True)


def rate(value: float | None) -> str:
    """An acceptance; "never" where none is enough."""
    return "never" if value is None else f"{value:.2f}"


def _show_points(found: Estimate, console: Console) -> None:
    points = _table("depth", "words per cycle", "speed-up", "")
    for point in found.points:
        mark = "best" if point.depth == found.best.depth else "slower than plain" if point.speedup < 1.0 else ""
        points.add_row(str(point.depth), f"{point.words_per_cycle:.2f}", f"{point.speedup:.2f}x", mark)
    console.print(points)
    said = f"break-even acceptance {rate(found.break_even)}"
    if found.stationary_depth is not None:
        said += f"; the speed-up is highest at a depth of {found.stationary_depth:.1f}"
    console.print(said, style="dim", soft_wrap=True)
    console.print()


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right" if name else "left")
    return table


def show_advice(advice: Sequence[Advice], notes: Sequence[str], console: Console) -> None:
    """Print a table for each temperature and concurrency, then what a reader must know."""
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    for temperature, concurrency in dict.fromkeys((found.temperature, found.concurrency) for found in advice):
        console.print(f"temperature {temperature:g}, {concurrency} at once", style="bold")
        table = _table("class", "advice", "depth", "speed-up", "interval", "accepted", "break-even", "per cycle")
        table.columns[1].justify = "left"
        for found in advice:
            if (found.temperature, found.concurrency) == (temperature, concurrency):
                table.add_row(escape(found.workload_class), *_cells(found))
        console.print(table)
        console.print()
    console.print(_LEGEND, style="dim", soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _cells(found: Advice) -> list[str]:
    best = found.best
    if best is None:
        return ["do not speculate: answers too short", "", "", "", "", "", ""]
    return [
        escape(best.drafter) if found.pays else f"do not speculate (best: {escape(best.drafter)})",
        "own" if best.depth is None else str(best.depth),
        f"{best.speedup.value:.2f}x",
        f"{best.speedup.low:.2f}-{best.speedup.high:.2f}",
        "" if best.acceptance is None else f"{best.acceptance:.0%}",
        "never" if best.break_even is None else f"{best.break_even:.0%}",
        f"{best.words_per_cycle:.2f}",
    ]


class ProgressBar:
    """Shows what is being done and how far it is; where there is no terminal, a line for each kind of work."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None)
        self._said = ""

    def at(self, what: str, *, done: int = 0, total: int | None = None) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=escape(what), completed=done, total=total)
        if what != self._said and not self._bar.console.is_terminal:
            self._bar.console.print(what, style="dim")
        self._said = what


@contextmanager
def progress(console: Console) -> Iterator[ProgressBar]:
    """Show a bar for as long as the block runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ProgressBar(bar)

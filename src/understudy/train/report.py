"""What a person sees of training: each part with its time left, and what the draft was measured at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from understudy.train.run import Watcher

_EVERY_S = 20.0
"""How often a line is printed where nothing can move."""
_DOING = {"collect": "collecting answers", "train": "training", "evaluate": "measuring"}


@contextmanager
def progress(console: Console) -> Iterator[Watcher]:
    """Show how far each part is; a line now and then where the console is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    tasks: dict[str, TaskID] = {}
    told_s = -_EVERY_S
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def watch(part: str, done: int, total: int, note: str) -> None:
            nonlocal told_s
            if part not in tasks:
                tasks[part] = bars.add_task(_DOING[part], total=total, completed=done, note=note)
            bars.update(tasks[part], completed=done, total=total, note=note)
            if not console.is_terminal and (done == total or time.monotonic() - told_s >= _EVERY_S):
                told_s = time.monotonic()
                console.print(f"{_DOING[part]}: {done} of {total} {note}".rstrip())

        yield watch


def show_measured(measured: dict[str, Any], console: Console) -> None:
    """Print what the draft was measured at, by class."""
    for arm in measured.get("arms", ()):
        show_arm(arm, console)
    console.print(f"draft vocabulary: {measured['coverage']:.1%} of held-out words; loss {measured['loss']:.3f}")


def show_arm(arm: dict[str, Any], console: Console, *, name: str = "") -> None:
    """Print one arm (`evaluate.describe`) as a table. Words that a draft changed are told of."""
    title = f"{name}{arm['shape']}, temperature {arm['temperature']:g}"
    if not arm["classes"]:
        console.print(f"{title}: nothing was answered")
        return
    table = Table(box=None, title=f"{title}: mean {arm['mean_tokens_per_cycle']:.2f}", title_justify="left")
    for heading in ("class", "tokens per cycle", "rows per cycle", "same words", "acceptance by position"):
        table.add_column(heading)
    for name_of_class, told in arm["classes"].items():
        table.add_row(
            name_of_class,
            f"{told['tokens_per_cycle']:.2f}",
            f"{told['rows_per_cycle']:.1f}",
            f"{told['num_same']} of {told['num_answers']}",
            " ".join(f"{rate:.2f}" for rate in told["acceptance_by_position"]),
        )
    console.print(table)
    num_other = sum(told["num_answers"] - told["num_same"] for told in arm["classes"].values())
    if num_other:
        console.print(f"{num_other} answers have other words than without a draft: this is a fault of the engine.")

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
    table = Table(box=None)
    for heading in ("class", "tokens per cycle", "acceptance by position"):
        table.add_column(heading)
    chain = measured["greedy_chain"]
    for name, told in chain["classes"].items():
        rates = " ".join(f"{rate:.2f}" for rate in told["acceptance_by_position"])
        table.add_row(name, f"{told['tokens_per_cycle']:.2f}", rates)
    if chain["classes"]:
        console.print(table)
        console.print(f"mean over classes: {chain['mean_tokens_per_cycle']:.2f} tokens per cycle, greedy chain")
    else:
        console.print("No held-out answer was given at temperature 0: nothing was measured.")
    console.print(f"draft vocabulary: {measured['coverage']:.1%} of held-out words; loss {measured['loss']:.3f}")

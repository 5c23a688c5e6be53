"""What a person sees of a command: while they wait, on the error stream, and when it is done."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from understudy.core.request import Result, SpeculationCounts

if TYPE_CHECKING:
    from understudy.parity.side_by_side import Comparison


@contextmanager
def loading(
    console: Console, model: str | None = None, *, widen: str | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show that a model is being loaded; the callback takes (tensors done, tensors in all) of what takes long.

    Nothing moves for a model from the hub: its download draws bars of its own.
    """
    is_still = not console.is_terminal or (model is not None and model.startswith("hub:"))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn())
    doing = "unpacking the model's weights" if widen is None else f"widening the model to {widen}"
    said = False
    with Progress(*columns, console=console, transient=True, disable=is_still) as progress:
        task = progress.add_task("loading the model", total=None)

        def unpacking(done: int, total: int) -> None:
            nonlocal said
            if not said and is_still:
                console.print(f"{doing[0].upper()}{doing[1:]}.")
            said = True
            progress.update(task, description=doing, completed=done, total=total)

        yield unpacking


class _Shown(dict[int, str]):
    """What is shown for a character, by its code point: itself, unless it would move the cursor or the layout."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Cf" or 0xFE00 <= code <= 0xFE0F:  # joiners, directions, variants: width would be anyone's guess
            shown = ""
        elif category in ("Cc", "Cs", "Co", "Cn", "Zl", "Zp"):
            shown = "\N{REPLACEMENT CHARACTER}"
        else:
            shown = character
        self[code] = shown
        return shown


_SHOWN = _Shown({ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""})


def sanitised(text: str, encoding: str = "utf-8") -> str:
    """The text without what a terminal could obey or could not write; line feeds stay."""
    return text.translate(_SHOWN).encode(encoding, "replace").decode(encoding)


class Waiting:
    """A line that says what is being done, until `stop` or for as long as the block runs."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._status = Status(text, console=console)
        self._shown = False

    def say(self, text: str) -> None:
        """Say something else."""
        self._status.update(text)

    def stop(self) -> None:
        """Take the line away; a second call does nothing."""
        if self._shown:
            self._status.stop()
            self._shown = False

    def __enter__(self) -> Waiting:
        self._shown = self._console.is_terminal
        if self._shown:
            self._status.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.stop()


def result_json(result: Result, model: str, seconds: float) -> dict[str, Any]:
    """Put an answer into plain values."""
    num_tokens = sum(len(completion.token_ids) for completion in result.completions)
    return {
        "model": model,
        "seed": result.seed,
        "system_fingerprint": result.system_fingerprint,
        "choices": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "error": completion.error,
                "speculation": asdict(completion.speculation),
            }
            for completion in result.completions
        ],
        "usage": {
            "prompt_tokens": len(result.prompt_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": result.cached_tokens,
        },
        "seconds": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds, 3),
    }


def summary(result: Result, seconds: float, *, tell_seed: bool) -> str:
    """Say in one line how fast an answer came and what speculation did for it."""
    num_tokens = sum(len(completion.token_ids) for completion in result.completions)
    counts = SpeculationCounts()
    for completion in result.completions:
        counts.add(completion.speculation)
    parts = [
        f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s",
        f"{num_tokens / max(1, counts.cycles):.2f} tokens per cycle",
        f"{counts.accepted} of {counts.drafted} drafted tokens accepted",
        *([f"seed {result.seed}"] if tell_seed else []),
    ]
    return "; ".join(parts)


def show_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print a line for each prompt: how fast off and on were, and whether the text is the same."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompt", no_wrap=True)
    for name in ("tokens", "off", "on", "speed-up", "accepted", "same text"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        counts = comparison.on.counts
        table.add_row(
            escape(comparison.question.name),
            str(len(comparison.off.answers[0].token_ids)),
            f"{comparison.off.tokens_per_s:.1f}",
            f"{comparison.on.tokens_per_s:.1f}",
            f"{comparison.speed_up:.2f}x",
            f"{counts.accepted} of {counts.drafted}",
            "yes" if comparison.same else "[red]no[/red]",
        )
    console.print(table)
    legend = "off, on: tokens per second without and with speculation; accepted: of the drafted tokens"
    console.print(legend, style="dim", soft_wrap=True)

"""How a proof is told: a bar while it runs, a table when it is done, and JSON for machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from understudy import __version__
from understudy.parity.cases import CaseSet
from understudy.parity.verify import Report, SettingReport

_MOST_SHOWN = 10
_LEAST_WIDTH = 120
"""Where the output is no terminal: nothing need be cut off there."""
_LEAST_DRAFTERS = 16
"""Characters of the column that may take several lines: two of its words."""


def to_json(report: Report, case_set: CaseSet, *, notices: Sequence[str] = ()) -> dict[str, Any]:
    """Put everything that was found into plain values."""
    return {
        "compared": report.compared,
        "identical": report.identical,
        "vacuous": [line.setting.name for line in report.vacuous],
        "differences": [asdict(difference) for difference in report.differences],
        "settings": {line.setting.name: _line_json(line) for line in report.settings},
        "cut": [setting.name for setting in report.cut],
        "interrupted": report.interrupted,
        "model": report.model,
        "model_hash": report.model_hash,
        "draft": report.drafts.get("model"),
        "drafts": report.drafts,
        "weights": list(report.system_fingerprints),
        "system_fingerprints": report.system_fingerprints,
        "prompts": [case.describe() for case in case_set.cases],
        "prompts_left_out": case_set.num_left_out,
        "notices": list(notices),
        "seconds": round(report.seconds, 3),
        "version": __version__,
    }


def show(report: Report, case_set: CaseSet, console: Console) -> None:
    """Print the table, what differs or is missing, and the verdict. Lines are left whole, so that they can be found."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    if case_set.num_left_out:
        say(f"{case_set.num_left_out} prompts are longer than the model's context and were left out.")
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    console.print(_table(report))
    for kind, name in report.drafts.items():
        say(f"[dim]{kind} drafts with {escape(name)}.[/dim]")
    variants = dict.fromkeys(_sampling_words(case.variant) for case in case_set.cases)
    say(f"[dim]Sampling varies over the prompts: {escape('; '.join(variants))}.[/dim]")
    for line in report.vacuous:
        say(f"[yellow]vacuous[/yellow]  {line.setting.name}: {escape('; '.join(line.vacuous))}")
    for difference in report.differences[:_MOST_SHOWN]:
        place = "" if difference.position is None else f" at token {difference.position}"
        say(
            f"[red]differs[/red]  {difference.setting}: prompt {difference.prompt} "
            f"({escape(difference.prompt_class)}), {difference.field}{place}\n"
            f"    plain        {escape(difference.expected)}\n    speculative  {escape(difference.found)}"
        )
    if len(report.differences) > _MOST_SHOWN:
        say(f"and {len(report.differences) - _MOST_SHOWN} more differences")
    for setting in report.cut:
        why = "it was interrupted, or not begun" if report.interrupted else "the budget left no time for it"
        say(f"[yellow]cut[/yellow]      {setting.name}: {why}")
    say(_verdict(report))


def _verdict(report: Report) -> str:
    said = (
        f"{report.identical} of {report.compared} answers are identical, bit for bit, "
        f"under {_settings(len(report.settings))} in {report.seconds:.0f} s"
    )
    unseen = {setting.weights for setting in report.cut} - {line.setting.weights for line in report.settings}
    if unseen:
        said += f", and nothing with {' or '.join(sorted(unseen))} weights"
    if report.proven:
        return f"[bold green]Same words:[/bold green] {said}."
    if report.differences:
        return f"[bold red]NOT the same words:[/bold red] {said}."
    if not report.settings:
        return f"[bold red]Not proven:[/bold red] {said}."
    return f"[bold red]Not proven:[/bold red] {said}, but {_settings(len(report.vacuous))} tested nothing."


def _settings(count: int) -> str:
    return f"{count} setting{'' if count == 1 else 's'}"


def _sampling_words(variant: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in variant.items()) or "nothing but the temperature"


def _line_json(line: SettingReport) -> dict[str, Any]:
    happenings = line.happenings
    return {
        "weights": line.setting.weights,
        "compared": line.compared,
        "identical": line.identical,
        "drafted": happenings.counts.drafted,
        "accepted": happenings.counts.accepted,
        "rejected": happenings.counts.rejected,
        "accepted_by_drafter": dict(happenings.accepted_by_drafter),
        "scout_rows": happenings.num_scout_rows,
        "cycles": happenings.counts.cycles,
        "cache_hits": happenings.num_cache_hits,
        "cached_tokens": happenings.cached_tokens,
        "preemptions": happenings.preemptions,
        "most_sequences": happenings.most_sequences,
        "vacuous": line.vacuous,
        "fallbacks": happenings.fallbacks,
        "seconds": round(line.seconds, 3),
    }


def _table(report: Report) -> Table:
    """One line for each setting; a dash where it is not there to test something."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("drafters", min_width=_LEAST_DRAFTERS)
    table.add_column("weights", no_wrap=True)
    for name in ("temp.", "at once", "cached", "preempted", "accepted", "rejected", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in report.settings:
        happenings = line.happenings
        counts = happenings.counts
        same = f"{line.identical}/{line.compared}"
        table.add_row(
            ", ".join(line.setting.drafters) + (", trees" if line.setting.draft_tree > 1 else ""),
            line.setting.weights,
            f"{line.setting.temperature:g}",
            str(happenings.most_sequences),
            str(happenings.cached_tokens) if line.setting.prefix_cache else "-",
            str(happenings.preemptions) if line.setting.preemption else "-",
            f"{counts.accepted}/{counts.drafted}",
            str(counts.rejected),
            same if line.identical == line.compared else f"[red]{same}[/red]",
        )
    return table


class ProgressBar:
    """Shows a proof while it runs: a bar, and a line for each setting that is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def at(self, what: str, done: int, total: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, description=what, completed=done, total=total)

    def finished(self, report: SettingReport) -> None:
        """Print one line."""
        same = report.identical == report.compared
        verdict = "vacuous  " if report.vacuous and same else "identical" if same else "DIFFERS  "
        line = f"{verdict} {report.identical:>3} of {report.compared:<3} {report.setting.name}"
        self._progress.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console) -> Iterator[ProgressBar]:
    """Show a bar with the time that is left, for as long as the block runs."""
    columns = (
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        yield ProgressBar(progress)

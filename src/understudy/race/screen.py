"""What is shown of a race: two lanes while it runs, and a table by workload class when it is over.

A word of the speculative lane wears the colour of the drafter that had foreseen it; the target's own words wear none.
Every frame is made for the size that the terminal has at that moment. Text of models and of prompt files is shown
as text, never obeyed: neither as markup nor as control characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from understudy.race.lanes import SLICE_S, Heat, Lane, Piece
from understudy.race.tally import Tally, by_class
from understudy.terminal import sanitised

FAIRNESS = f"In turns of {SLICE_S * 1000:.0f} ms; each clock counts its own lane alone."
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue")
_SIDE_BY_SIDE_COLUMNS = 100
"""From this width on the two texts stand beside each other, else one above the other."""
_LEAST_PANEL_LINES = 3
"""A frame around one line of text; with less room than that the text is left out."""


def drafter_styles(names: Iterable[str]) -> dict[str, str]:
    """Give every drafter a colour of its own, and bold for terminals that have none."""
    return {name: f"bold {_COLOURS[place % len(_COLOURS)]}" for place, name in enumerate(names)}


def marked_text(pieces: Iterable[Piece], styles: Mapping[str, str], encoding: str = "utf-8") -> Text:
    """The text with each word in the style of the drafter that had foreseen it."""
    text = Text()
    for piece in pieces:
        text.append(sanitised(piece.text, encoding), styles.get(piece.source, ""))
    return text


class Scoreboard:
    """Shows a race: a live screen on a terminal, a line for each finished prompt elsewhere."""

    def __init__(self, console: Console, *, drafters: Sequence[str], num_heats: int) -> None:
        self._console = console
        self._styles = drafter_styles(drafters)
        self._num_heats = num_heats
        self._finished: list[Heat] = []
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            # No refreshing in the background: nothing may compute beside a lane.
            self._live = Live(console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> Scoreboard:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._live is not None:
            self._live.stop()

    def at(self, heat: Heat) -> None:
        """Show how far both lanes are."""
        if self._live is not None:
            self._live.update(self.frame(heat), refresh=True)

    def finished(self, heat: Heat) -> None:
        """Note that a prompt is through."""
        self._finished.append(heat)
        if self._live is None:
            self._console.print(Text(_heat_line(heat, self._console)), soft_wrap=True)

    def frame(self, heat: Heat) -> RenderableType:
        """Draw the screen for the terminal's size of now."""
        width, height = self._console.size
        name, excerpt = (_in_line(text, self._console) for text in (heat.question.prompt_class, heat.question.excerpt))
        lines: list[RenderableType] = [
            _line(f"race, prompt {heat.number} of {self._num_heats}: {name}", "bold"),
            _line(excerpt, "italic"),
            _line(FAIRNESS, "dim"),
            _progress(heat),
            self._legend(heat.speculative),
            _line(self._so_far() if self._finished else "", "dim"),
        ]
        num_free = height - len(lines) - 1  # the progress has two lines
        return Group(*lines[:4], *self._texts(heat, width, num_free), *lines[4:])

    def _texts(self, heat: Heat, width: int, num_lines: int) -> list[RenderableType]:
        """Both texts in as many lines as there are; only the speculative one where two do not fit."""
        if width >= _SIDE_BY_SIDE_COLUMNS and num_lines >= _LEAST_PANEL_LINES:
            beside = Table.grid(padding=0)
            beside.add_row(
                self._panel("plain", heat.plain, width // 2, num_lines),
                self._panel("speculative", heat.speculative, width - width // 2, num_lines),
            )
            return [beside]
        if num_lines >= 2 * _LEAST_PANEL_LINES:
            upper = num_lines // 2
            return [
                self._panel("plain", heat.plain, width, upper),
                self._panel("speculative", heat.speculative, width, num_lines - upper),
            ]
        if num_lines >= _LEAST_PANEL_LINES:
            return [self._panel("speculative", heat.speculative, width, num_lines)]
        return []

    def _panel(self, name: str, lane: Lane, width: int, height: int) -> Panel:
        """The last lines of a lane's text that fit."""
        text = marked_text(lane.pieces, self._styles, self._console.encoding)
        wrapped = text.wrap(self._console, max(1, width - 4))
        last = Text("\n", no_wrap=True, overflow="crop").join(wrapped[-(height - 2) :])
        return Panel(last, title=name, title_align="left", width=width, height=height)

    def _legend(self, lane: Lane) -> Text:
        """Every drafter in its colour, with its count."""
        accepted = lane.accepted_by_drafter
        legend = Text("foreseen by ", no_wrap=True, overflow="ellipsis")
        for name, style in self._styles.items():
            legend.append(f"{name} {accepted[name]}", style).append(", ")
        return legend.append(f"the target's own {len(lane.token_ids) - accepted.total()}")

    def _so_far(self) -> str:
        tallies = by_class(self._finished)
        return "so far " + ", ".join(
            f"{_in_line(name, self._console)} {tally.speed_up:.2f}x" for name, tally in tallies.items()
        )


def show_table(heats: Sequence[Heat], console: Console) -> None:
    """Print a line for each class, and the verdict over all of them."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("class", no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "plain", "speculative", "speed\nup", "accepted", "per\ncycle", "same\ntext"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, tally in by_class(heats).items():
        table.add_row(
            Text(_in_line(name, console)),
            str(tally.plain.tokens),
            f"{tally.plain.tokens_per_s:.1f}",
            f"{tally.speculative.tokens_per_s:.1f}",
            f"{tally.speed_up:.2f}x",
            f"{tally.counts.accepted}/{tally.counts.drafted}",
            f"{tally.tokens_per_cycle:.2f}",
            Text("no", style="red") if tally.num_different else "yes",
        )
    console.print(table)
    legend = (
        "plain, speculative: tokens per second on each lane's own clock, prompts included; "
        "accepted: of the drafted tokens; per cycle: tokens that one pass of the target came to"
    )
    console.print(legend, style="dim", soft_wrap=True)
    console.print(_verdict(Tally.of(heats)), soft_wrap=True)


def _verdict(total: Tally) -> str:
    said = (
        f"{total.speed_up:.2f}x over {total.num_prompts} prompt{'' if total.num_prompts == 1 else 's'}: "
        f"{total.plain.tokens_per_s:.1f} tokens/s plain, {total.speculative.tokens_per_s:.1f} speculative"
    )
    if total.num_different:
        return f"[bold red]NOT the same text[/bold red] in {total.num_different} of them, {said}."
    return f"[bold green]Same text[/bold green], {said}."


def _heat_line(heat: Heat, console: Console) -> str:
    tally = Tally.of([heat])
    return (
        f"{_in_line(heat.question.prompt_class, console)}: {tally.plain.tokens} tokens, "
        f"plain {tally.plain.tokens_per_s:.1f} tokens/s, speculative {tally.speculative.tokens_per_s:.1f} tokens/s, "
        f"{tally.speed_up:.2f}x, {'same text' if heat.is_same else 'NOT the same text'}"
    )


def _progress(heat: Heat) -> Table:
    """A bar for each lane. Once one lane is through, the other's way is known too."""
    ends = [len(lane.token_ids) for lane in heat.lanes if lane.is_finished]
    total = min(ends, default=heat.plain.max_tokens)
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for _ in range(3):
        grid.add_column(no_wrap=True, justify="right")
    for name, lane in zip(("plain", "speculative"), heat.lanes, strict=True):
        num_tokens = len(lane.token_ids)
        bar = ProgressBar(
            total=max(1, total), completed=min(num_tokens, total), complete_style="white", finished_style="bold white"
        )
        grid.add_row(name, bar, f"{num_tokens}/{total}", f"{lane.tokens_per_s:.1f} tokens/s", f"{lane.clock_s:.1f} s")
    return grid


def _in_line(text: str, console: Console) -> str:
    return sanitised(text, console.encoding).replace("\n", " ")


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")

import io
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment

from tests.race.fakes import Clock, Step, finished_heat, heat_of, lane_of
from understudy.race.lanes import Heat
from understudy.race.screen import FAIRNESS, Scoreboard, drafter_styles, marked_text, show_table
from understudy.terminal import sanitised

DRAFTERS = ("suffix", "ngram")
SIZES = ((120, 40), (100, 10), (99, 30), (60, 20), (60, 12), (60, 8), (40, 24))
HOSTILE = (
    "[bold red]markup[/bold red] [/] [link=x] :smile: \\[",
    "\x1b[2J\x1b[H\x1b]0;title\x07\x9b31m\x00\x08\x7f\r\n\x0b\x0c\x85",
    "漢字かな交じり文" * 30,
    "\u202eright to left\u202c \u2066\u2069 \u200b\u200d\ufe0f\u2028\u2029\ufeff",
    "a" + "\u0301" * 500 + "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈" * 20,
    "x" * 3000,
    "\n" * 100,
    "\t" * 60,
    "\ue000\U000e0001\U0010ffff",
)


def new_console(width: int, height: int, **settings: object) -> Console:
    return Console(
        record=True,
        width=width,
        height=height,
        force_terminal=True,
        color_system="truecolor",
        file=io.StringIO(),
        highlight=False,
        **settings,  # type: ignore[arg-type]
    )


def drawn(console: Console, heat: Heat) -> list[list[Segment]]:
    """The lines of a frame as they are, before a screen would cut them to its size."""
    board = Scoreboard(console, drafters=DRAFTERS, num_heats=3)
    board.finished(heat)
    return console.render_lines(board.frame(heat), console.options, pad=False)


def text_of(lines: list[list[Segment]]) -> str:
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def colours(lines: list[list[Segment]], word: str) -> set[str | None]:
    """The colours in which a word is drawn."""
    return {
        segment.style.color.name if segment.style and segment.style.color else None
        for line in lines
        for segment in line
        if word in segment.text
    }


def test_words_wear_the_colour_of_the_drafter_that_had_foreseen_them() -> None:
    heat = finished_heat([("alpha ", "suffix"), ("beta ", "ngram"), ("gamma ", "suffix"), ("delta", "")])
    styles = drafter_styles(DRAFTERS)
    assert styles == {"suffix": "bold green", "ngram": "bold cyan"}
    text = marked_text(heat.speculative.pieces, styles)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("alpha ", "bold green"),
        ("beta ", "bold cyan"),
        ("gamma ", "bold green"),
    ]
    lines = drawn(new_console(120, 30), heat)
    assert colours(lines, "alpha") == colours(lines, "gamma") == {"green", None}, "coloured in one lane only"
    assert colours(lines, "beta") == {"cyan", None}
    assert colours(lines, "delta") == {None}
    assert colours(lines, "suffix 2") == {"green"}
    assert colours(lines, "ngram 1") == {"cyan"}
    assert "the target's own 1" in text_of(lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_shows_everything_in_the_room_there_is(width: int, height: int) -> None:
    heat = finished_heat([(f"word{number} ", "suffix" if number % 2 else "") for number in range(300)])
    lines = drawn(new_console(width, height), heat)
    shown = text_of(lines)
    assert len(lines) <= height
    assert all(Segment.get_line_length(line) <= width for line in lines)
    for expected in ("prompt 1 of 3: code", "plain", "speculative", "foreseen by suffix 150", "so far code"):
        assert expected in shown
    if width >= 60:
        assert "300/300 30000.0 tokens/s 0.0 s" in shown
    assert FAIRNESS[: width - 2] in shown
    if height >= 10:
        assert "word299" in shown, "the last words are seen"
    if width * height < 2000:
        assert "word0 " not in shown, "the first ones have made room"


@pytest.mark.parametrize("size", [(10, 3), (1, 1), (60, 2), (200, 7)])
def test_no_size_is_too_small(size: tuple[int, int]) -> None:
    heat = finished_heat([("漢字 ", "suffix"), ("word", "")])
    console = new_console(*size)
    with Scoreboard(console, drafters=DRAFTERS, num_heats=1) as board:
        board.at(heat)
    assert console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: ascii(text[:6]))
def test_hostile_text_is_shown_and_not_obeyed(hostile: str, width: int, height: int) -> None:
    heat = finished_heat([(hostile, "suffix"), ("end", "")], prompt_class=hostile, excerpt=hostile)
    console = new_console(width, height)
    lines = drawn(console, heat)
    assert len(lines) <= height
    assert all(Segment.get_line_length(line) <= width for line in lines)
    show_table([heat], console)
    whole = text_of(lines) + console.export_text()
    assert {c for c in whole if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} <= {"\n"}


def test_markup_is_text() -> None:
    lines = drawn(new_console(120, 30), finished_heat([(HOSTILE[0], "suffix"), ("end", "")]))
    assert "[bold red]markup[/bold red] [/] [link=x] :smile:" in text_of(lines)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=40), st.sampled_from(["", *DRAFTERS])), min_size=1, max_size=20))
def test_any_text_fits(words: list[tuple[str, str]]) -> None:
    lines = drawn(new_console(60, 20), finished_heat(words))
    assert len(lines) == 20
    assert all(Segment.get_line_length(line) <= 60 for line in lines)


def test_sanitising() -> None:
    assert sanitised("é漢\n\tx\r\x1b[0m") == "é漢\n    x\ufffd[0m"
    assert sanitised("e\u200d\ufe0f\u202eh") == "eh"
    assert sanitised("naïve 漢", "ascii") == "na?ve ?"
    assert sanitised("\ud800") == "\ufffd"


def test_the_way_is_known_when_one_lane_is_through() -> None:
    clock = Clock()
    plain = lane_of([Step()] * 40, clock)
    speculative = lane_of([Step([("a ", "suffix")] * 9 + [("b", "")])], clock)
    speculative.run_until(1.0)
    plain.run_until(0.035)
    shown = text_of(drawn(new_console(80, 24), heat_of(plain, speculative)))
    assert "4/10  100.0 tokens/s" in shown
    assert "10/10 1000.0 tokens/s" in shown


def test_a_live_screen_is_taken_and_given_back() -> None:
    console = new_console(60, 20)
    with Scoreboard(console, drafters=DRAFTERS, num_heats=1) as board:
        board.at(finished_heat([("word", "")]))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.startswith("\x1b[?1049h")
    assert "\x1b[?1049l" in written
    assert "1/1" in written


def test_elsewhere_a_line_for_each_prompt() -> None:
    console = Console(file=io.StringIO(), width=40)
    heat = finished_heat([("word", "suffix"), ("end", "")], prompt_class="[b]odd[/b]")
    with Scoreboard(console, drafters=DRAFTERS, num_heats=1) as board:
        board.at(heat)
        board.finished(heat)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "[b]odd[/b]: 2 tokens, plain 100.0 tokens/s, speculative 200.0 tokens/s, 2.00x, same text\n"
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_keeps_its_numbers_whole(width: int) -> None:
    console = new_console(width, 20)
    heats = [finished_heat([("word", "suffix"), ("end", "")] * 50, prompt_class="summarization")]
    clock = Clock()
    one, other = lane_of([Step([("a", "")])], clock), lane_of([Step([("b", "")])], clock)
    for lane in (one, other):
        lane.run_until(1.0)
    show_table([*heats, heat_of(one, other, prompt_class="math")], console)
    shown = console.export_text()
    assert "100.0" in shown
    assert "50/100" in shown
    assert "100.00" in shown
    assert "NOT the same text in 1 of them" in shown
    lines = {line.split()[0][:4]: line.split()[-1] for line in shown.splitlines() if line.startswith(("summ", "math"))}
    assert lines == {"summ": "yes", "math": "no"}

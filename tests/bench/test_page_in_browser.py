"""The page of a bench in a real browser: it asks for nothing, complains of nothing, and draws what the record says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.sample_record import sample_record
from tests.bench.screenshot import HEIGHT, WIDTH, take_screenshot
from tests.chromium import Tab, chromium
from understudy.bench.page import write_page

pytestmark = pytest.mark.browser

CHARTS = ("speedup", "acceptance", "throughput", "ttft_ms", "tpot_ms", "request_ms", "cycle_time")
HOSTILE = (
    """</script><script>window.harmed=1</script>"'&""",
    """<img src=x onerror="window.harmed=2">""",
    """<a href="javascript:window.harmed=3">x</a>""",
    "%{x} $1+1$ <b>bold</b>",
    "2024",
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return sample_record()


@pytest.fixture(scope="module")
def page(record: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "bench.html"
    write_page(record, file)
    return file


def rows_of(record: dict[str, Any], temperature: float, concurrency: int, drafter: str) -> list[dict[str, Any]]:
    wanted = (temperature, concurrency, drafter)
    return [row for row in record["rows"] if (row["temperature"], row["concurrency"], row["drafter"]) == wanted]


def select(tab: Tab, field: str, value: str) -> None:
    """Choose as a reader does, through the select element."""
    tab.evaluate(
        f"""(() => {{
            const select = document.querySelector('select[data-field="{field}"]');
            select.value = {json.dumps(value)};
            select.dispatchEvent(new Event("change"));
        }})()"""
    )


def drawn_bars(tab: Tab, chart: str) -> list[dict[str, float]]:
    """Every bar as it stands on the screen, translated back into the units of its axis."""
    bars: list[dict[str, float]] = tab.evaluate(
        f"""(() => {{
            const chart = document.getElementById("{chart}");
            const axis = chart._fullLayout.xaxis;
            const origin = chart.getBoundingClientRect().left + axis._offset;
            const value = pixel => axis.range[0] + (pixel - origin) / axis._length * (axis.range[1] - axis.range[0]);
            return [...chart.querySelectorAll(".bars .point path")].map(path => {{
                const box = path.getBoundingClientRect();
                return {{left: value(box.left), right: value(box.right), pixel: value(origin + 1) - value(origin)}};
            }});
        }})()"""
    )
    return bars


def check_speedup_bars(tab: Tab, rows: list[dict[str, Any]]) -> None:
    bars = drawn_bars(tab, "speedup")
    assert len(bars) == len(rows)
    for bar, row in zip(bars, rows, strict=True):
        near = 2.5 * bar["pixel"]  # an outline is drawn around a slower bar
        assert bar["left"] == pytest.approx(min(1, row["speedup"]), abs=near)
        assert bar["right"] == pytest.approx(max(1, row["speedup"]), abs=near)


def test_the_browser_does_see_requests_and_complaints(tab: Tab, tmp_path: Path) -> None:
    """Were it blind, the tests below would prove nothing."""
    page = tmp_path / "loud.html"
    page.write_text('<!doctype html><img src="http://192.0.2.1/a.png"><script>console.error("loud"); lost()</script>')
    tab.open(page)
    assert tab.requested() == [page.as_uri(), "http://192.0.2.1/a.png"]
    assert len(tab.complaints()) >= 3  # the picture, the console, the exception


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_page_loads_alone_and_fits(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.open(page, width=width, dark=dark)
    select(tab, "concurrency", "8")
    assert tab.requested() == [page.as_uri()]
    assert tab.complaints() == []
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    drawn = tab.evaluate("[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().right)")
    assert len(drawn) >= len(CHARTS)
    assert max(drawn) <= width


def test_every_chart_is_drawn(tab: Tab, page: Path, record: dict[str, Any]) -> None:
    tab.open(page)
    num_classes = len({row["class"] for row in record["rows"]})
    count = "document.querySelectorAll('#{} {}').length"
    assert tab.evaluate(count.format("speedup", ".bars .point")) == num_classes
    assert tab.evaluate(count.format("speedup", ".errorbar")) == num_classes
    assert tab.evaluate(count.format("speedup", ".textpoint")) == num_classes
    assert tab.evaluate(count.format("acceptance", ".scatterlayer .trace")) == num_classes
    assert tab.evaluate(count.format("throughput", ".scatterlayer .trace")) == 3  # plain, default, the crossover
    for latency in ("ttft_ms", "tpot_ms", "request_ms"):
        assert tab.evaluate(count.format(latency, ".scatterlayer .trace path.js-line")) == 2
    assert tab.evaluate(count.format("cycle_time", ".bars .point")) == 4 * 2 * num_classes
    assert tab.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.id)") == list(CHARTS)
    assert tab.evaluate("[...document.querySelectorAll('.missing')].every(note => note.offsetHeight === 0)")


def test_bars_on_the_screen_are_the_rows_of_the_record(tab: Tab, page: Path, record: dict[str, Any]) -> None:
    tab.open(page)
    assert tab.evaluate("JSON.parse(document.getElementById('record').textContent)") == record
    check_speedup_bars(tab, rows_of(record, 0.0, 1, "default"))
    shares = tab.evaluate("document.getElementById('acceptance').data.map(trace => trace.y)")
    assert shares == [row["acceptance_by_position"] for row in rows_of(record, 0.0, 1, "default")]
    plain = tab.evaluate("document.getElementById('throughput').data[0].y")
    expected = [row["tokens_per_s"] for row in record["rows"] if (row["class"], row["drafter"]) == ("all", "plain")]
    assert plain == expected[:4]
    forward = tab.evaluate("document.getElementById('cycle_time').data[1].x")
    times = [e["forward_s"] for e in record["manifest"]["cycle_time"] if (e["temperature"], e["concurrency"]) == (0, 1)]
    assert forward == pytest.approx([1000 * time for time in reversed(times)])


def test_selector_changes_charts_words_and_table(tab: Tab, page: Path, record: dict[str, Any]) -> None:
    tab.open(page)
    table = "document.querySelector('[data-view]:not([hidden]) table.latency').innerText"
    before = tab.evaluate(table)
    select(tab, "concurrency", "16")
    check_speedup_bars(tab, rows_of(record, 0.0, 16, "default"))
    assert tab.evaluate(table) != before
    hatched = tab.evaluate("document.getElementById('speedup').data[0].marker.pattern.shape.filter(Boolean).length")
    assert hatched == sum(row["speedup"] < 1 for row in rows_of(record, 0.0, 16, "default")) > 0
    select(tab, "temperature", "0.8")
    check_speedup_bars(tab, rows_of(record, 0.8, 16, "default"))
    assert tab.evaluate("[...document.querySelectorAll('select')].map(select => select.value)") == ["0.8", "16"]
    assert tab.evaluate("document.querySelectorAll('table.latency').length") == 8
    visible = "[...document.querySelectorAll('table.latency')].filter(table => table.offsetHeight > 0).length"
    assert tab.evaluate(visible) == 1
    assert tab.complaints() == []


def test_selector_goes_to_a_setting_that_was_measured(tab: Tab, record: dict[str, Any], tmp_path: Path) -> None:
    partial = {**record, "rows": [r for r in record["rows"] if r["temperature"] == 0 or r["concurrency"] == 1]}
    write_page(partial, tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    select(tab, "concurrency", "8")
    select(tab, "temperature", "0.8")
    assert tab.evaluate("[...document.querySelectorAll('select')].map(select => select.value)") == ["0.8", "1"]
    check_speedup_bars(tab, rows_of(record, 0.8, 1, "default"))


def test_text_of_the_record_stays_text(tab: Tab, tmp_path: Path) -> None:
    classes = {name: 1.2 + 0.1 * place for place, name in enumerate(HOSTILE)}
    hostile = sample_record(classes=classes, drafters=("default", HOSTILE[0]), notes=HOSTILE)
    hostile["manifest"]["model"]["name"] = HOSTILE[1]
    hostile["manifest"]["settings"]["command"] = ["understudy", *HOSTILE]
    write_page(hostile, tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert tab.evaluate("JSON.parse(document.getElementById('record').textContent)") == hostile
    assert tab.evaluate("[...document.querySelectorAll('#notes p')].map(note => note.textContent)") == list(HOSTILE)
    ticks = tab.evaluate("[...document.querySelectorAll('#speedup .ytick text')].map(tick => tick.textContent)")
    shortened = [name if len(name) <= 26 else f"{name[:25]}…" for name in HOSTILE]
    assert sorted(ticks) == sorted([*shortened, "all"])
    tab.evaluate("Plotly.Fx.hover('speedup', [{curveNumber: 0, pointNumber: 0}])")
    assert HOSTILE[0] in tab.evaluate("document.querySelector('#speedup .hovertext').textContent")
    assert tab.evaluate("document.querySelectorAll('main img, main a, main script, main b').length") == 0
    assert tab.evaluate("typeof window.harmed") == "undefined"
    assert tab.requested() == [(tmp_path / "page.html").as_uri()]
    assert tab.complaints() == []


def test_what_was_not_measured_is_said(tab: Tab, record: dict[str, Any], tmp_path: Path) -> None:
    manifest = {key: value for key, value in record["manifest"].items() if key not in ("cycle_time", "samples")}
    write_page({**record, "manifest": manifest}, tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    said = "[...document.querySelectorAll('.missing')].filter(note => note.offsetHeight > 0).map(note => note.id)"
    assert tab.evaluate(said) == [f"{name}-missing" for name in CHARTS[3:]]
    assert tab.evaluate("document.querySelectorAll('.chart .main-svg').length") > 0
    assert tab.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_charts_can_be_read_on_light_and_on_dark(tab: Tab, page: Path, dark: bool) -> None:
    """Axis labels stand out from the ground by at least 7 to 1, as the guidelines for contrast measure it."""
    tab.open(page, dark=dark)
    brightness = """(text => {
        const part = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const [red, green, blue] = text.match(/[0-9.]+/g).map(Number);
        return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
    })"""
    ground = tab.evaluate(f"{brightness}(getComputedStyle(document.body).backgroundColor)")
    assert (ground < 0.1) == dark
    for chart in CHARTS:
        ink = tab.evaluate(f"{brightness}(getComputedStyle(document.querySelector('#{chart} .xtick text')).fill)")
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 7


def test_screenshot_is_of_a_size_to_show(tab: Tab, record: dict[str, Any], tmp_path: Path) -> None:
    take_screenshot(tab, record, tmp_path / "bench.png", tmp_path)
    picture = (tmp_path / "bench.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) == (WIDTH, HEIGHT)
    assert 20_000 < len(picture) < 400_000

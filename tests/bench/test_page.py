"""The page of a bench, as text: what it says, that it escapes, and what it refuses. See test_page_in_browser.py too."""

import copy
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.sample_record import sample_record
from understudy.bench.chart_style import label
from understudy.bench.charts import Crossover, crossover
from understudy.bench.measured import read_record
from understudy.bench.page import main, page_html, write_page
from understudy.bench.words import as_bytes, crossovers, figure, headline, verdicts
from understudy.errors import ConfigError

HOSTILE = """</script><script>alert(1)</script>"'&<b>"""


def small_record() -> dict[str, Any]:
    return sample_record(classes={"code": 1.8, "chat": 0.9}, temperatures=(0.0,), concurrencies=(1,))


def embedded(page: str, name: str) -> Any:
    """What the page holds as JSON under a name."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def without_plotly(page: str) -> str:
    from plotly.offline import get_plotlyjs

    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def overall(record: dict[str, Any], drafter: str = "default") -> dict[str, Any]:
    return next(row for row in record["rows"] if (row["class"], row["drafter"]) == ("all", drafter))


def test_page_holds_the_record_and_loads_nothing() -> None:
    record = sample_record()
    page = page_html(record)
    assert embedded(page, "record") == record
    own = without_plotly(page)
    assert "://" not in own
    assert not re.search(r"\b(src|href|action|poster)\s*=", own)
    assert not re.search(r"@import|url\(", own)


def test_text_of_the_record_is_escaped_everywhere() -> None:
    record = sample_record(classes={HOSTILE: 1.5, "code": 1.2}, drafters=("default", HOSTILE), notes=(HOSTILE,))
    record["manifest"]["model"]["name"] = HOSTILE
    record["manifest"]["settings"]["command"] = HOSTILE
    record["manifest"][HOSTILE] = {HOSTILE: [HOSTILE]}
    page = page_html(record)
    own = without_plotly(page)
    assert "alert(1)</script>" not in own
    assert own.count("<script") == 4
    assert html.escape(HOSTILE, quote=False).replace('"', "&#34;").replace("'", "&#39;") in own
    assert embedded(page, "record") == record
    axis = embedded(page, "figures")[0]["figures"]["speedup"]["layout"]["yaxis"]
    assert label(HOSTILE) in axis["ticktext"]
    assert "<" not in label(HOSTILE)


def test_every_figure_is_one_that_plotly_takes() -> None:
    from plotly.graph_objects import Figure

    views = embedded(page_html(sample_record(drafters=("default", "ngram"))), "figures")
    assert len(views) == 8
    drawn = [figure for view in views for figure in view["figures"].values()]
    assert len(drawn) == 56
    for one in drawn:
        Figure(json.loads(re.sub('"@[a-z]+"', '"red"', json.dumps(one))))  # refuses what it does not know


def test_bars_stand_for_the_rows() -> None:
    record = small_record()
    bars, texts = embedded(page_html(record), "figures")[0]["figures"]["speedup"]["data"]
    row = overall(record)
    assert [1 + x for x in bars["x"]] == pytest.approx([1.8, 0.9, 1.35])
    assert bars["marker"]["pattern"]["shape"] == ["", "/", ""]
    assert bars["marker"]["color"][0] != bars["marker"]["color"][1]
    assert bars["customdata"][2] + bars["error_x"]["array"][2] == pytest.approx(row["speedup_high"])
    assert bars["customdata"][2] - bars["error_x"]["arrayminus"][2] == pytest.approx(row["speedup_low"])
    assert texts["text"] == [" 1.80×", " 0.90×", " 1.35×"]


def test_latency_curve_rises_to_one_and_is_thinned() -> None:
    record = small_record()
    many = [float(value) for value in range(5000, 0, -1)]
    for entry in record["manifest"]["samples"]:
        entry["ttft_ms"] = many
    plain, drafted = embedded(page_html(record), "figures")[0]["figures"]["ttft_ms"]["data"]
    assert (plain["name"], drafted["name"]) == ("plain", "default")
    assert len(plain["x"]) <= 402
    assert (plain["x"][0], plain["y"][0]) == (1.0, 0.0)
    assert (plain["x"][-1], plain["y"][-1]) == (5000.0, 1.0)
    assert all(y == pytest.approx(x / 5000) for x, y in zip(plain["x"][1:], plain["y"][1:], strict=True))


def test_samples_of_classes_are_pooled_where_the_sum_has_none() -> None:
    record = small_record()
    [plain, _] = record["manifest"]["samples"]
    record["manifest"]["samples"] = [
        {**plain, "class": "code", "ttft_ms": [1.0, 3.0]},
        {**plain, "class": "chat", "ttft_ms": [2.0, 4.0]},
    ]
    [curve] = embedded(page_html(record), "figures")[0]["figures"]["ttft_ms"]["data"]
    assert curve["x"] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert curve["y"] == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("hidden", "host_ms"), [({}, 3.0), ({"hidden_s": 0.002}, 1.0), ({"hidden_s": 0.005}, 0.0)])
def test_cycle_time_is_in_milliseconds_for_each_class_and_drafter(hidden: dict[str, float], host_ms: float) -> None:
    """A record of old has no hidden time; what is hidden took nobody's time, and is not drawn."""
    record = small_record()
    for entry in record["manifest"]["cycle_time"]:
        entry |= {"draft_s": 0.001, "forward_s": 0.02, "sample_s": 0.003, "other_s": 0.004, **hidden}
    drawn = embedded(page_html(record), "figures")[0]["figures"]["cycle_time"]
    assert {trace["name"]: {round(time, 6) for time in trace["x"]} for trace in drawn["data"]} == {
        "draft": {1.0}, "verify": {20.0}, "sample and host": {host_ms}, "between cycles": {4.0},
    }  # fmt: skip
    names = ["code, plain", "code, default", "chat, plain", "chat, default", "all, plain", "all, default"]
    assert drawn["layout"]["yaxis"]["ticktext"] == names[::-1]


def test_a_gpu_is_named_and_its_bandwidth_shown() -> None:
    record = small_record()
    assert "on Sample CPU 9000 (2 cores):" in headline(read_record(record)).sentences[0]
    record["manifest"]["hardware"]["gpu"] = "Sample GPU"
    assert "on Sample GPU:" in headline(read_record(record)).sentences[0]
    assert "3,456" not in page_html(record)
    overall(record)["bandwidth_gb_s"] = 3456.0
    assert '<td class="number">3,456</td>' in page_html(record)


def test_what_was_not_measured_has_no_chart_and_is_said() -> None:
    record = small_record()
    del record["manifest"]["cycle_time"]
    record["manifest"]["samples"] = []
    page = page_html(record)
    figures = embedded(page, "figures")[0]["figures"]
    absent = {name for name, one in figures.items() if one is None}
    assert absent == {"ttft_ms", "tpot_ms", "request_ms", "cycle_time"}
    for name in figures:
        said = re.search(rf'id="{name}-missing" (hidden)?>Not measured', page)
        assert said
        assert (said[1] is None) == (name in absent)


def test_bare_rows_make_a_page() -> None:
    bare = {"class": "x", "drafter": "plain", "temperature": 0, "concurrency": 1}
    page = page_html({"manifest": {}, "rows": [bare]})
    assert "Overall speed-up not measured, identity of the output not checked" in page
    assert "holds no command line" in page
    assert not any(embedded(page, "figures")[0]["figures"].values())


def test_an_open_loop_has_no_concurrency() -> None:
    record = small_record()
    for row in (*record["rows"], *record["manifest"]["samples"], *record["manifest"]["cycle_time"]):
        row["concurrency"] = None
    page = page_html(record)
    (view,) = embedded(page, "figures")
    assert {name for name, figure in view["figures"].items() if figure is None} == {"throughput"}
    assert "at temperature 0, in an open loop" in page
    assert '<td class="number">open loop</td>' in page


def test_without_plain_decoding_nothing_was_compared_with_it() -> None:
    record = small_record()
    record["rows"] = [row for row in record["rows"] if row["drafter"] != "plain"]
    assert all(row["identical"] for row in record["rows"])
    assert headline(read_record(record)).title.endswith("identity of the output not checked")


def test_changes_that_the_commit_does_not_hold_are_said() -> None:
    record = small_record()
    assert "changes that its commit does not hold" not in page_html(record)
    record["manifest"]["dirty"] = True
    assert "changes that its commit does not hold" in page_html(record)


def test_selectors_are_there_only_for_what_differs() -> None:
    offered = re.compile(r'data-field="(\w+)">(.*?)</select>')
    assert offered.findall(page_html(small_record())) == []
    found = dict(offered.findall(page_html(sample_record())))
    assert set(found) == {"temperature", "concurrency"}
    assert found["concurrency"] == "".join(f"<option>{num}</option>" for num in (1, 4, 8, 16))
    record = small_record()
    record["rows"] += [{**row, "weights": "float32"} for row in record["rows"]]
    assert set(dict(offered.findall(page_html(record)))) == {"weights"}


def test_only_measured_settings_become_views() -> None:
    record = sample_record()
    record["rows"] = [row for row in record["rows"] if row["temperature"] == 0 or row["concurrency"] == 1]
    views = embedded(page_html(record), "figures")
    assert [(view["setting"]["temperature"], view["setting"]["concurrency"]) for view in views] == [
        ("0", "1"), ("0", "4"), ("0", "8"), ("0", "16"), ("0.8", "1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "drafted", "expected"),
    [
        ({1: 10.0, 4: 20.0}, {1: 12.0, 4: 18.0}, Crossover(2.0, 15.0)),
        ({1: 10.0, 2: 15.0, 8: 30.0}, {1: 15.0, 2: 15.0, 8: 20.0}, Crossover(2.0, 15.0)),
        ({1: 10.0, 4: 20.0}, {1: 12.0, 4: 20.0}, None),
        ({1: 10.0, 4: 20.0}, {1: 8.0, 4: 22.0}, None),
        ({1: 10.0, 4: 20.0}, {1: 12.0}, None),
        ({}, {1: 12.0, 4: 18.0}, None),
    ],
)
def test_crossover_is_where_the_lines_meet(
    plain: dict[int, float], drafted: dict[int, float], expected: Crossover | None
) -> None:
    found = crossover(plain, drafted)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.concurrency, found.tokens_per_s) == pytest.approx((expected.concurrency, expected.tokens_per_s))


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ({1: 12.0, 4: 18.0}, "stops paying at about 2 requests at once."),
        (
            {1: 12.0, 4: 22.0},
            "no crossover in the measured range (1 to 4 at once); faster than plain decoding throughout.",
        ),
        (
            {1: 8.0, 4: 18.0},
            "no crossover in the measured range (1 to 4 at once); slower than plain decoding throughout.",
        ),
        ({1: 8.0, 4: 22.0}, "no crossover in the measured range (1 to 4 at once); slower at 1, faster at 4."),
        ({4: 22.0}, "no crossover at 4, the only one; faster than plain decoding throughout."),
    ],
)
def test_crossover_in_words(speeds: dict[int, float], words: str) -> None:
    row = {"class": "all", "temperature": 0}
    rows = [{**row, "drafter": "plain", "concurrency": num, "tokens_per_s": v} for num, v in ((1, 10.0), (4, 20.0))]
    rows += [{**row, "drafter": "default", "concurrency": num, "tokens_per_s": v} for num, v in speeds.items()]
    measured = read_record({"manifest": {}, "rows": rows})
    [said] = crossovers(measured, measured.settings[0])
    assert said.endswith(words)


@pytest.mark.parametrize(
    ("speedup", "low", "high", "words"),
    [
        (1.5, 1.4, 1.6, "1.50 times as fast, with identical output"),
        (1.01, 0.98, 1.04, "No clear difference: 1.01 times as fast, with identical output"),
        (0.9, 0.88, 0.95, "Slower: 0.90 times as fast, with identical output"),
        (1.5, None, None, "1.50 times as fast, with identical output"),
        (None, None, None, "Overall speed-up not measured, with identical output"),
    ],
)
def test_headline_says_how_fast(speedup: float | None, low: float | None, high: float | None, words: str) -> None:
    record = small_record()
    overall(record).update(speedup=speedup, speedup_low=low, speedup_high=high)
    assert headline(read_record(record)).title == words


def test_headline_names_model_machine_interval_and_range() -> None:
    first, second = headline(read_record(sample_record())).sentences
    assert first.startswith("Sample-135M-Instruct on Sample CPU 9000 (2 cores): speculation against plain decoding")
    assert re.search(r"at temperature 0, one request at a time, interval 1\.\d\d to 1\.\d\d\.$", first)
    assert "all 8 settings" in second
    assert "0.95 (temperature 0, 16 requests at once) to 1.45 (temperature 0, one request at a time)" in second


@pytest.mark.parametrize(
    ("code", "chat", "words", "by_class"),
    [
        (True, True, "with identical output", ("identical", "identical")),
        (True, False, "but the output differs in 1 of 2 comparisons", ("identical", "differs")),
        (True, None, "in the 1 comparisons that were checked", ("identical", "not checked")),
        (None, None, "identity of the output not checked", ("not checked", "not checked")),
    ],
)
def test_headline_says_whether_it_is_identical(
    code: bool | None, chat: bool | None, words: str, by_class: tuple[str, str]
) -> None:
    record = small_record()
    said = {"code": code, "chat": chat, "all": None}
    for row in record["rows"]:
        row["identical"] = None if row["drafter"] == "plain" else said[row["class"]]
    measured = read_record(record)
    assert headline(measured).title.endswith(words)
    assert tuple(verdict.words for verdict in verdicts(measured))[:2] == by_class


def test_difference_that_only_the_sum_knows_is_not_hidden() -> None:
    record = small_record()
    overall(record)["identical"] = False
    assert "but the output differs in 1 of 1 comparisons" in headline(read_record(record)).title


def test_latency_table_has_quantiles_and_ratios() -> None:
    record = small_record()
    overall(record, "plain")["tpot_ms"] = {"p50": 20.0, "p95": 30.0, "p99": 40.0}
    overall(record)["tpot_ms"] = {"p50": 10.0, "p95": 24.0, "p99": None}
    page = page_html(record)
    cells = re.findall(r'<td class="number">([^<]*) <small>([^<]*)</small></td>', page)
    assert cells[6:12] == [
        ("20.0 ms", ""), ("30.0 ms", ""), ("40.0 ms", ""), ("10.0 ms", "0.50×"), ("24.0 ms", "0.80×"), ("–", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("rows"), "has no rows"),
        (lambda r: r.update(rows=[]), "has no rows"),
        (lambda r: r.update(rows={"a": 1}), "rows is {'a': 1}, no list of objects"),
        (lambda r: r.update(rows=[1]), "rows is [1], no list of objects"),
        (lambda r: r.update(manifest=[]), "manifest is [], no object"),
        (lambda r: r["rows"][2].pop("class"), "rows[2], class is None, no text"),
        (lambda r: r["rows"][2].update(drafter=3), "rows[2], drafter is 3, no text"),
        (lambda r: r["rows"][0].update(temperature=None), "rows[0], temperature is None, no number"),
        (lambda r: r["rows"][0].update(concurrency=0), "concurrency is 0, no count from 1 up"),
        (lambda r: r["rows"][0].update(concurrency=1.5), "concurrency is 1.5, no count from 1 up"),
        (lambda r: r["rows"][1].update(speedup="fast"), "rows[1], speedup is 'fast', no number"),
        (lambda r: r["rows"][1].update(speedup=True), "speedup is True, no number"),
        (lambda r: r["rows"][1].update(speedup=float("nan")), "not plain JSON"),
        (lambda r: r["rows"][1].update(speedup=10**400), "no number"),
        (lambda r: r["rows"][1].update(speedup={1, 2}), "not plain JSON"),
        (lambda r: r["rows"][1].update(acceptance_by_position=["x"]), "no list of numbers"),
        (lambda r: r["rows"][1].update(ttft_ms=[1]), "ttft_ms is [1], no object"),
        (lambda r: r["rows"][1].update(identical="yes"), "neither true nor false nor null"),
        (lambda r: r["rows"].append(r["rows"][1]), "2 rows for class 'code' with drafter 'default'"),
        (lambda r: r["manifest"].update(samples=[{"class": "code"}]), "samples[0], drafter is None, no text"),
        (lambda r: r["manifest"]["cycle_time"][0].update(draft_s="?"), "cycle_time[0], draft_s is '?', no number"),
    ],
)
def test_record_of_a_wrong_shape_is_refused_with_the_place(change: Any, words: str) -> None:
    record = copy.deepcopy(small_record())
    change(record)
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        page_html(record)
    assert "understudy bench --json" in refused.value.remedy


def test_something_else_than_a_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="no object"):
        page_html([])  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_value_anywhere_makes_a_page_or_a_config_error(data: st.DataObject) -> None:
    record = small_record()
    manifest, row = record["manifest"], record["rows"][1]
    within = data.draw(st.sampled_from([record, manifest, row, manifest["cycle_time"][0], manifest["samples"][0]]))
    within[data.draw(st.sampled_from(sorted(within)))] = data.draw(JSON)
    try:
        page = page_html(record)
    except ConfigError:
        return
    assert embedded(page, "record") == record


def test_page_is_written_and_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    write_page(small_record(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page_html(small_record())
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(small_record(), tmp_path / "no" / "page.html")


def test_text_that_utf8_cannot_hold_does_not_stop_the_page(tmp_path: Path) -> None:
    record = small_record()
    record["manifest"]["notes"] = ["a path with \udcff in it"]
    write_page(record, tmp_path / "page.html")
    assert "a path with ? in it" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_shell_makes_a_page_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "record.json", tmp_path / "out.html"
    assert main([str(source)]) == 2
    assert main([str(source), str(out)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    source.write_text('{"rows": []}')
    assert main([str(source), str(out)]) == 1
    assert "has no rows" in capsys.readouterr().err
    source.write_text(json.dumps(small_record()))
    assert main([str(source), str(out)]) == 0
    assert embedded(out.read_text(encoding="utf-8"), "record") == small_record()


def test_drawing_is_loaded_only_when_a_page_is_made() -> None:
    program = "import sys, understudy.bench.page; sys.exit('plotly' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_numbers_as_text() -> None:
    assert [figure(value, "ms") for value in (None, 0.0, 1.234, 12.34, 1234.5)] == [
        "–", "0.00 ms", "1.23 ms", "12.3 ms", "1,234 ms",
    ]  # fmt: skip
    assert (as_bytes(5 << 20), as_bytes(3 << 29)) == ("5 MiB", "1.50 GiB")
    assert label("a" * 40) == "a" * 25 + "…"

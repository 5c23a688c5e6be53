import itertools
import json
import statistics
from pathlib import Path

import pytest

from understudy.bench.arrivals import Closed, Poisson, Recorded, Timed, TraceLine, read_trace
from understudy.errors import ConfigError


def test_a_closed_loop_sends_when_there_is_a_free_place() -> None:
    closed = Closed(2)
    assert closed.due_s(5, now_s=3.0, num_running=1) == 3.0
    assert closed.due_s(5, now_s=3.0, num_running=2) is None
    assert closed.most_at_once == 2


def test_an_open_loop_does_not_care_what_is_running() -> None:
    timed = Timed((0.0, 1.5))
    assert timed.due_s(1, now_s=9.0, num_running=100) == 1.5
    assert timed.most_at_once is None


def test_poisson_gaps_are_exponential_and_repeat() -> None:
    arrivals = Poisson(rate=4.0, count=4001, seed=3)
    times = list(arrivals(7))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert len(times) == 4001
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # an exponential's deviation is its mean
    assert times == list(Poisson(4.0, 4001, 3)(7))
    assert times != list(arrivals(8))
    assert times != list(Poisson(4.0, 4001, 4)(7))


def test_a_recorded_sequence_is_always_the_same() -> None:
    assert Recorded((0.0, 2.0))(0) == Recorded((0.0, 2.0))(5) == (0.0, 2.0)


def write(folder: Path, *lines: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_a_trace_counts_from_its_first_request_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        "",
        {"timestamp": 27000, "class": "code"},
        {"timestamp": 30000, "text_input": "Why?"},
        {"timestamp": 99999},
    )
    lines = read_trace(file, unit="ms", count=3)
    assert [line.time_s for line in lines] == pytest.approx([0.0, 0.482, 3.0])
    assert [line.prompt_class for line in lines] == ["code", None, None]
    assert lines[1].max_tokens == 52
    assert lines[2].prompt == "Why?"


def test_a_trace_may_be_in_seconds(tmp_path: Path) -> None:
    file = write(tmp_path, {"timestamp": 1.5}, {"timestamp": 4, "prompt": "Hello"})
    assert read_trace(file, unit="s", count=9) == [TraceLine(0.0), TraceLine(2.5, prompt="Hello")]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "no object"),
        ({}, "timestamp is 'None'"),
        ({"timestamp": -1}, "timestamp is '-1'"),
        ({"timestamp": True}, "timestamp is 'True'"),
        ('{"timestamp": NaN}', "timestamp is 'nan'"),
        ('{"timestamp": Infinity}', "timestamp is 'inf'"),
        ({"timestamp": 0, "class": 3}, "class is '3'"),
        ({"timestamp": 0, "prompt": ""}, "prompt is ''"),
        ({"timestamp": 0, "output_length": 0}, "output_length is '0'"),
        ({"timestamp": 0, "output_length": 1.5}, "output_length is '1.5'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, what: str) -> None:
    file = write(tmp_path, {"timestamp": 0}, line)
    with pytest.raises(ConfigError) as raised:
        read_trace(file, unit="ms", count=2)
    assert f"{file}, line 2: " in str(raised.value)
    assert what in str(raised.value)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "gone", unit="ms", count=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "a\0b", unit="ms", count=1)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "bytes", unit="ms", count=1)
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(write(tmp_path, "", " "), unit="ms", count=1)

"""Records: what is written can be read again, within the limits, and nothing of it reaches a request."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.served import fake_service
from understudy.core.request import Facts, Grammar, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.errors import ConfigError
from understudy.server import record
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.record import Recorder, read_records, record_files


def exchange(number: int = 0, *, num_tokens: int = 4) -> Exchange:
    request = Request(request_id=f"r{number}", prompt_ids=(1, 2, number), sampling=SamplingParams(n=2, max_tokens=9))
    made = Exchange(request, Caller(), "chat")
    made.admitted_s = made.first_s = made.ended_s = made.arrived_s + 0.5
    made.outcome = "finished"
    made.answers = {0: [7] * num_tokens, 1: [8]}
    made.facts = [Facts("chat", 5, 99, 0, 0, SpeculationCounts())]
    return made


@contextmanager
def recording(directory: Path, *, max_bytes: int = 1 << 20, max_age_s: float = 1000.0) -> Iterator[Recorder]:
    recorder = Recorder(directory, max_bytes=max_bytes, max_age_s=max_age_s)
    try:
        yield recorder
    finally:
        recorder.close()


def wait_written(recorder: Recorder) -> None:
    while not recorder._waiting.empty():
        time.sleep(0.001)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    directory = tmp_path / "records"
    sampling = SamplingParams(
        temperature=0.7, stop=("x",), logit_bias={3: -1.0}, grammar=Grammar("regex", "a+"), seed=2**64 - 1
    )
    first = Exchange(
        Request(
            request_id="a",
            prompt_ids=(5, 6),
            sampling=sampling,
            speculation=Speculation(max_depth=3),
            tenant="t",
            workload_class="code",
            prediction_ids=(9,),
        ),
        Caller("t"),
        "completions",
    )
    first.admitted_s = first.arrived_s + 0.25
    first.answers = {0: [1, 2, 3]}
    first.outcome = "cancelled"
    with recording(directory) as recorder:
        recorder.ended(first)
        recorder.ended(exchange(1))
        recorder.ended(Exchange(first.request, Caller(), "chat"))  # never computed: not kept
    one, two = read_records(directory)
    assert one.request == first.request
    assert (one.answers, one.outcome, one.seed, one.endpoint) == (((1, 2, 3),), "cancelled", 2**64 - 1, "completions")
    assert (one.admitted_s, one.first_s, one.ended_s) == (0.25, None, None)
    assert (two.answers, two.seed) == (((7,) * 4, (8,)), 99)
    assert -1 < one.arrived_s < two.arrived_s < 60
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in record_files(directory))


def test_files_are_begun_anew_and_the_oldest_go(tmp_path: Path) -> None:
    with recording(tmp_path, max_bytes=8000) as recorder:
        for number in range(100):
            recorder.ended(exchange(number))
            wait_written(recorder)
    files = record_files(tmp_path)
    assert len(files) > 1
    assert sum(path.stat().st_size for path in files) <= 8000
    assert all(path.stat().st_size <= 2000 for path in files)
    kept = [int(found.request.request_id[1:]) for found in read_records(tmp_path)]
    assert kept == list(range(kept[0], 100))
    assert 0 < kept[0] < 95


def test_old_files_go(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        recorder.ended(exchange(0))
    (old,) = record_files(tmp_path)
    os.utime(old, (time.time() - 5000,) * 2)
    with recording(tmp_path) as recorder:
        recorder._run += "-next"
        recorder.ended(exchange(1))
    assert not old.exists()
    assert len(list(read_records(tmp_path))) == 1


def test_hour_begins_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FILE_AGE_S", 0.0)
    with recording(tmp_path) as recorder:
        for number in range(3):
            recorder.ended(exchange(number))
    assert len(record_files(tmp_path)) == 3


def test_torn_line_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recording(tmp_path) as recorder:
        recorder.ended(exchange(0))
        recorder.ended(exchange(1))
    (path,) = record_files(tmp_path)
    content = path.read_bytes()
    for cut in range(content.index(b"\n") + 2, len(content) - 1, 37):
        path.write_bytes(content[:cut])
        assert [found.request.request_id for found in read_records(tmp_path)] == ["r0"]
    assert "line 2 is no record" in caplog.text


def test_disk_that_fails_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "records"
    with recording(directory) as recorder:
        directory.rmdir()
        for number in range(5):
            recorder.ended(exchange(number))
        wait_written(recorder)
    assert recorder.num_dropped == 5
    assert "could not be recorded" in caplog.text


def test_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_write_all", lambda self: None)
    recorder = Recorder(tmp_path, max_bytes=1000, max_age_s=10.0)
    for number in range(record._MOST_WAITING + 3):
        recorder.ended(exchange(number))
    assert recorder.num_dropped == 3


def test_place_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Nothing can be recorded"):
        Recorder(tmp_path / "file", max_bytes=1000, max_age_s=10.0)


def test_service_records_what_it_said(tmp_path: Path) -> None:
    config = ServerConfig(port=0, record_dir=tmp_path / "records")
    service = fake_service(tmp_path / "tokenizer", config)
    asked = Request(request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(n=2, max_tokens=6, seed=3))

    async def main() -> dict[int, list[int]]:
        said: dict[int, list[int]] = {}
        async for output in service.answer(Exchange(asked, Caller(), "chat")):
            said.setdefault(output.choice, []).extend(output.token_ids)
        return said

    said = asyncio.run(main())
    assert service.recorder is not None
    service.recorder.close()
    (found,) = read_records(tmp_path / "records")
    assert {choice: list(ids) for choice, ids in enumerate(found.answers)} == said
    assert found.outcome == "finished"
    assert found.seed == 3

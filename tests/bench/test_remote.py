import time

import pytest

from tests.bench.fake_server import Behaviour, fake_server
from tests.bench.made_up import question, unit
from understudy.bench.arrivals import Closed, Timed
from understudy.bench.record import ArmFacts
from understudy.bench.remote import RemoteArm
from understudy.bench.served import Answer
from understudy.bench.workloads import Unit
from understudy.client import Endpoint, find_model
from understudy.errors import ConfigError

NOBODY = "http://127.0.0.1:9"


def work(count: int = 1, arrivals: Closed | Timed | None = None) -> Unit:
    questions = tuple(question(f"code-{i}") for i in range(count))
    return unit(questions=questions, arrivals=arrivals or Closed(1), temperature=0.5)


def arm_for(url: str, **options: object) -> RemoteArm:
    return RemoteArm(ArmFacts("default"), Endpoint(url, **options), "fake")  # type: ignore[arg-type]


def ask(behaviour: Behaviour) -> Answer:
    with fake_server(behaviour) as server:
        (answer,) = arm_for(server.url).serve(work()).answers
    return answer


def test_an_answer_is_heard_and_timed() -> None:
    with fake_server(Behaviour(seconds_per_word=0.03)) as server:
        (answer,) = (
            arm_for(server.url, api_key="secret", extra={"speculation": {"enabled": False}}).serve(work()).answers
        )
    assert answer.error is None
    assert answer.text == "one two three"
    assert answer.finish_reason == "stop"
    assert answer.num_tokens == 6, "as the server counts them: two in each chunk"
    assert answer.token_ids is answer.counts is None
    assert answer.ttft_ms is not None
    assert answer.tpot_ms is not None
    assert 30 <= answer.ttft_ms < answer.request_ms
    assert answer.tpot_ms >= 0.8 * 60 / 5, "two pauses for five tokens; the first word may have been heard late"
    (body,) = server.bodies
    assert server.keys == ["Bearer secret"]
    assert body["model"] == "fake"
    assert body["messages"] == [{"role": "user", "content": "the cat and the dog"}]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.5, 4, 0)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["speculation"] == {"enabled": False}


def test_a_closed_loop_keeps_so_many_running() -> None:
    with fake_server(Behaviour(seconds_per_word=0.02)) as server:
        served = arm_for(server.url).serve(work(9, Closed(3)))
    assert server.most_at_once == 3
    assert len(served.answers) == 9
    assert not served.errors


def test_an_open_loop_asks_in_time_and_counts_from_when_it_was_due() -> None:
    with fake_server(Behaviour(seconds_per_word=0.05)) as server:
        started = time.perf_counter()
        served = arm_for(server.url).serve(work(3, Timed((0.0, 0.05, 0.3))))
    assert [answer.arrived_s for answer in served.answers] == [0.0, 0.05, 0.3]
    assert all(answer.ended_s >= answer.arrived_s + 0.15 for answer in served.answers)
    first, second, third = sorted(server.times_s)
    assert second - started >= 0.05
    assert third - started >= 0.3
    assert first < second


def test_a_server_without_usage_is_noted() -> None:
    with fake_server(Behaviour(usage=False)) as server:
        arm = arm_for(server.url)
        (answer,) = arm.serve(work()).answers
    assert answer.num_tokens == 3
    (note,) = arm.notes
    assert "the server sends no usage; its chunks were counted as tokens" in note


def test_acceptance_is_read_where_a_server_tells_it() -> None:
    """Of ten steps with two drafted tokens each, five accepted none, three one and two both."""
    block = {"acceptance_histogram": [5, 3, 2], "num_spec_steps": 10, "num_draft_tokens": 20, "num_spec_tokens": 2}
    counts = ask(Behaviour(metrics={"speculative_decoding": block})).counts
    assert counts is not None
    assert (counts.cycles, counts.drafted, counts.accepted) == (10, 20, 7)
    assert counts.reached_by_position == [10, 5]
    assert counts.matched_by_position == [5, 2]


@pytest.mark.parametrize(
    "block", [{}, {"acceptance_histogram": "x"}, {"acceptance_histogram": [1], "num_spec_steps": 1}]
)
def test_an_unknown_block_is_none(block: dict[str, object]) -> None:
    answer = ask(Behaviour(metrics={"speculative_decoding": block}))
    assert answer.error is None
    assert answer.counts is None


@pytest.mark.parametrize(
    ("behaviour", "what"),
    [
        (Behaviour(status=404), "answered 404"),
        (Behaviour(fail_from=0), "ended before the answer did"),
        (Behaviour(raw=b"data: {\n\n"), "no chunk"),
        (Behaviour(raw=b"data: 7\n\n"), "no chunk"),
        (Behaviour(raw=b'data: {"choices": 7}\n\n'), "no chunk"),
        (Behaviour(raw=b'data: {"choices": [7]}\n\n'), "no chunk"),
        (Behaviour(raw=b'data: {"error": "out of memory"}\n\n'), "out of memory"),
        (Behaviour(raw=b""), "ended before the answer did"),
        (Behaviour(raw=b"data: [DONE]\n\n"), "ended before the answer did"),
    ],
)
def test_what_goes_wrong_is_an_error_of_the_request(behaviour: Behaviour, what: str) -> None:
    answer = ask(behaviour)
    assert answer.error is not None
    assert what in answer.error


def test_a_server_that_is_gone_is_an_error_at_once() -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="cannot be reached"):
        find_model(Endpoint(NOBODY), "fake")
    with pytest.raises(ConfigError, match="cannot be reached"):
        arm_for(NOBODY).warm_up(work())
    assert time.perf_counter() - started < 5
    (answer,) = arm_for(NOBODY).serve(work()).answers
    assert "cannot be reached" in (answer.error or "")


def test_warming_up_finds_what_cannot_work() -> None:
    with fake_server(Behaviour(status=404)) as server, pytest.raises(ConfigError, match="no such model"):
        arm_for(server.url).warm_up(work())
    with fake_server() as server:
        arm_for(server.url).warm_up(work())
    assert server.bodies[0]["max_tokens"] == 2


def test_the_model_is_found() -> None:
    with fake_server() as server:
        assert find_model(Endpoint(server.url), None) == "fake"
        assert find_model(Endpoint(server.url + "/"), "mine") == "mine"
        server.models = ("a", "b")
        with pytest.raises(ConfigError, match="a, b"):
            find_model(Endpoint(server.url), None)
        server.status = 401
        with pytest.raises(ConfigError, match="answered 401"):
            find_model(Endpoint(server.url), None)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host/v1", "http://", "http://host:port/", "http://[::1", "http://me:pw@host/v1"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a server"):
        find_model(Endpoint(url), "fake")


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "http://secret@host/v1", "http://host/v1?key=secret"])
def test_what_may_be_secret_in_a_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_model(Endpoint(url), "fake")
    assert "secret" not in str(refused.value).replace("may be secret", "")


@pytest.mark.parametrize("told", [Behaviour(status=401), Behaviour()])
def test_a_key_that_a_server_repeats_is_taken_out(told: Behaviour) -> None:
    told.raw = b'data: {"error": "the key SECRET is wrong"}\n\n'
    with fake_server(told) as server:
        arm = arm_for(server.url)
        arm.endpoint = Endpoint(server.url, "SECRET")
        (answer,) = arm.serve(work()).answers
    assert "the key (the key) is wrong" in (answer.error or "")


def test_a_stream_without_its_last_empty_line_is_whole() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "\xc3\xa9"}, "finish_reason": "stop"}]}\r\n\r\n'
    answer = ask(Behaviour(raw=b": a comment\r\n" + chunk + b"data: [DONE]"))
    assert (answer.error, answer.text, answer.finish_reason) == (None, "é", "stop")


def test_a_key_is_never_shown() -> None:
    assert "secret" not in repr(Endpoint("http://host/v1", "secret"))

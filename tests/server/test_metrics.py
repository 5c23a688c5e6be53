"""What is counted: nothing twice, nothing lost, no label without end, under our names and vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from tests.server.test_speculation_block import counted, facts
from tests.server.watched import Watched, samples, total, value, watched
from tests.tiny_models import write_tiny_model
from understudy.core.events import Cycle, Ended, Fallback, Notice, Preempted
from understudy.core.request import Facts, Grammar, Request, SamplingParams, Speculation, SpeculationCounts
from understudy.core.switches import ALL_ON, Switches
from understudy.errors import EngineLost, InvalidRequest
from understudy.server.admission import Overloaded
from understudy.server.exchange import Caller, Exchange
from understudy.server.metrics import MOST_FIELDS, Metrics
from understudy.server.speculation_block import block

CYCLE = Cycle(
    num_sequences=2,
    num_prompt_rows=5,
    num_draft_rows=6,
    num_scout_rows=1,
    num_emitted=4,
    num_accepted=2,
    context=100,
    draft_s=0.25,
    forward_s=0.5,
    sample_s=0.125,
    total_s=0.875,
    reason="",
    num_rows=14,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("metrics") / "tiny")


@pytest.fixture
def server(folder: Path) -> Watched:
    return watched(folder)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["chat", "code", "mine"]), counted(20)), max_size=8), st.data())
def test_counters_are_the_sums_of_all_per_request_blocks(
    choices: list[tuple[str, SpeculationCounts]], data: st.DataObject
) -> None:
    metrics = Metrics()
    expected: Counter[tuple[str, ...]] = Counter()
    for workload_class, counts in choices:
        reason = data.draw(st.sampled_from(["stop", "length", "abort", "error"]))
        metrics.hear(Ended("r", 0, reason, facts(counts, workload_class)))
        told: dict[str, Any] = block([facts(counts)], max_depth=20)
        expected["understudy_spec_drafts_total", workload_class] += told["num_spec_steps"]
        expected["understudy_spec_drafted_tokens_total", workload_class] += told["num_draft_tokens"]
        expected["understudy_spec_accepted_tokens_total", workload_class] += told["num_accepted_draft_tokens"]
        expected["understudy_spec_rejected_tokens_total", workload_class] += counts.rejected
        expected["understudy_spec_cycles_total", workload_class] += counts.cycles
        expected["understudy_target_passes_saved_total", workload_class] += counts.accepted
        expected["understudy_spec_drafts_by_accepted_total", workload_class] += told["num_spec_steps"]
        expected["understudy_spec_position_accepted_total", workload_class] += told["num_accepted_draft_tokens"]
        if counts.drafts:  # a drafter is named once it has drafted
            expected["understudy_spec_accepted_by_drafter_total", workload_class] += counts.accepted
            expected["understudy_spec_rows_total", workload_class] += counts.rows
    found = samples(metrics)
    for (name, workload_class), count in expected.items():
        assert total(found, name, workload_class=workload_class) == count, name


def test_positions_and_drafters_are_told_apart() -> None:
    metrics = Metrics()
    counts = SpeculationCounts(cycles=2, drafted=22, accepted=19, rejected=1)
    counts.add_walk([True] * 18 + [False])
    counts.add_walk([True])
    counts.add_draft(["ngram"] * 10 + ["suffix"] * 10, range(18))
    counts.add_draft(["suffix"] * 2, range(1))
    metrics.hear(Ended("r", 0, "abort", facts(counts, "code")))
    reached = "understudy_spec_position_reached_total"
    accepted = "understudy_spec_position_accepted_total"
    assert value(metrics, reached, position="1") == value(metrics, accepted, position="1") == 2
    assert value(metrics, reached, position="2") == 1
    assert (value(metrics, reached, position="16+"), value(metrics, accepted, position="16+")) == (4, 3)
    assert value(metrics, "understudy_spec_rows_total", drafter="ngram") == 10
    assert value(metrics, "understudy_spec_rows_total", drafter="suffix", workload_class="code") == 12
    assert value(metrics, "understudy_spec_accepted_by_drafter_total", drafter="suffix") == 9
    assert value(metrics, "understudy_spec_drafts_by_accepted_total", accepted="16+") == 1
    assert value(metrics, "understudy_spec_drafts_by_accepted_total", accepted="1") == 1


def test_a_request_is_counted_with_its_times(server: Watched) -> None:
    async def main() -> None:
        server.backend.first_s = 0.02
        await server.ask("a", workload_class="code", endpoint="completions")
        await server.ask("b", workload_class="code", sampling={"n": 2})

    asyncio.run(main())
    labels = {"workload_class": "code"}
    assert server.value("understudy_requests_total", endpoint="completions", outcome="finished", **labels) == 1
    assert server.value("understudy_choices_total", finish_reason="length", **labels) == 3
    assert server.value("understudy_prompt_tokens_total", **labels) == 6
    assert server.value("understudy_generation_tokens_total", **labels) == 36
    for name in ("time_to_first_token", "request", "time_per_output_token", "queue"):
        assert server.value(f"understudy_{name}_seconds_count", **labels) == 2, name
    assert server.value("understudy_time_to_first_token_seconds_sum") >= 0.04
    assert server.value("understudy_time_to_first_token_seconds_bucket", le="0.01") == 0
    assert server.value("understudy_queue_seconds_sum") < 0.04
    assert server.value("understudy_request_seconds_sum") >= server.value("understudy_time_to_first_token_seconds_sum")


def test_time_per_token_is_over_the_gaps_of_one_choice() -> None:
    metrics = Metrics()
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(n=2, max_tokens=11))
    exchange = Exchange(request, Caller(), "chat", arrived_s=0.0, admitted_s=1.0, first_s=2.0, last_s=7.0, ended_s=8.0)
    exchange.num_tokens, exchange.outcome = 22, "finished"
    metrics.ended(exchange)
    assert value(metrics, "understudy_time_per_output_token_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "understudy_request_seconds_sum") == 8.0
    assert value(metrics, "understudy_queue_seconds_sum") == 1.0
    assert value(metrics, "understudy_time_to_first_token_seconds_sum") == 2.0


def test_failures_are_told_apart_by_model_and_settings(folder: Path) -> None:
    server = watched(folder, served_name="ours", max_running=1, max_waiting=1, queue_timeout_s=0.01)

    async def main() -> None:
        request = Request(request_id="long", prompt_ids=(1,) * 64, sampling=SamplingParams(temperature=0.0))
        with pytest.raises(InvalidRequest):
            await server.answer(Exchange(request, Caller(), "chat"))
        server.backend.step_s = 0.01
        running = asyncio.create_task(server.ask("slow", sampling={"max_tokens": 60}))
        await asyncio.sleep(0.005)
        with pytest.raises(Overloaded):
            await server.ask(
                "late", sampling={"temperature": 0.3, "top_p": 0.9}, speculation=Speculation(enabled=False)
            )
        server.backend.die()
        with pytest.raises((EngineLost, Overloaded)):
            await running

    asyncio.run(main())
    name = "understudy_request_failures_total"
    assert server.value(name, model="ours", cause="refused", temperature_band="zero", speculation="on") == 1
    assert server.value(name, cause="overloaded", temperature_band="low", filters="top_p", speculation="off") == 1
    assert server.value(name, cause="lost", temperature_band="mid", filters="none", grammar="no") == 1
    assert server.value("understudy_requests_total", outcome="lost") == 1


@pytest.mark.parametrize(
    ("sampling", "band", "filters", "grammar"),
    [
        ({"temperature": 0.0}, "zero", "none", "no"),
        ({"temperature": 0.5, "top_k": 4}, "low", "top_k", "no"),
        ({"temperature": 1.0, "min_p": 0.1}, "mid", "min_p", "no"),
        ({"temperature": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.1}, "high", "penalties", "no"),
        ({"logit_bias": {1: 2.0}}, "mid", "logit_bias", "no"),
        ({"top_k": 4, "top_p": 0.5, "grammar": Grammar("regex", "a+")}, "mid", "several", "yes"),
    ],
)
def test_settings_of_a_failure(sampling: dict[str, Any], band: str, filters: str, grammar: str) -> None:
    metrics = Metrics()
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(**sampling))
    metrics.ended(Exchange(request, Caller(), "chat", outcome="error"))
    labels = {"temperature_band": band, "filters": filters, "grammar": grammar}
    assert value(metrics, "understudy_request_failures_total", cause="error", **labels) == 1


def test_choice_that_ends_with_an_error_is_a_failure_of_its_request() -> None:
    metrics = Metrics()
    metrics.hear(Ended("r", 0, "error", facts(SpeculationCounts(cycles=1))))
    for request_id in ("r", "another", "r"):
        exchange = Exchange(Request(request_id=request_id, prompt_ids=(1,)), Caller(), "chat", outcome="finished")
        metrics.ended(exchange)
    assert value(metrics, "understudy_request_failures_total", cause="choice") == 1


def test_client_that_leaves_is_no_failure(server: Watched) -> None:
    async def main() -> None:
        request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=50))
        async with contextlib.aclosing(server.service.answer(Exchange(request, Caller(), "chat"))) as outputs:
            await anext(outputs)

    asyncio.run(main())
    assert server.value("understudy_requests_total", outcome="cancelled") == 1
    assert "understudy_request_failures_total" not in {name for name, _ in samples(server.metrics)}
    assert server.value("understudy_time_to_first_token_seconds_count") == 1


def test_steps_are_counted_by_part_and_kind() -> None:
    metrics = Metrics()
    metrics.hear(CYCLE)
    metrics.hear(CYCLE)
    parts = ("draft", "forward", "sample")
    seconds = {part: value(metrics, "understudy_step_seconds_total", part=part) for part in parts}
    assert seconds == {"draft": 0.5, "forward": 1.0, "sample": 0.25}
    rows = {kind: value(metrics, "understudy_rows_total", kind=kind) for kind in ("prompt", "draft", "scout", "word")}
    assert rows == {"prompt": 10, "draft": 12, "scout": 2, "word": 4}
    assert value(metrics, "understudy_step_rows_sum") == sum(rows.values())
    assert value(metrics, "understudy_step_rows_bucket", le="8.0") == 0
    assert value(metrics, "understudy_step_rows_bucket", le="16.0") == 2
    assert value(metrics, "understudy_steps_total") == 2
    assert value(metrics, "understudy_emitted_tokens_total") == 8
    assert value(metrics, "understudy_step_accepted_tokens_sum") == 4
    assert value(metrics, "understudy_step_draft_rows_sum") == 12


def test_state_is_read_when_somebody_asks(server: Watched) -> None:
    assert server.value("understudy_memory_bytes", part="target") == 1000
    assert server.value("understudy_memory_bytes", part="draft") == 200
    assert server.value("understudy_memory_bytes", part="kv") == 30
    assert server.value("understudy_kv_usage_ratio") == 0.75
    assert server.value("understudy_kv_free_blocks") == 25
    assert server.value("understudy_engine_running_sequences") == 3
    assert server.value("understudy_engine_ready") == 1
    server.service.admission.num_running = 5
    server.backend.num_restarts = 2
    server.backend.die()
    server.service.admission.drain()
    assert server.value("understudy_running_choices") == 5
    assert server.value("understudy_engine_restarts_total") == 2
    assert server.value("understudy_engine_ready") == 0
    assert server.value("understudy_draining") == 1


def test_what_others_tell_is_counted() -> None:
    metrics = Metrics()
    assert value(metrics, "understudy_parity_checks_total", result="different") == 0
    for ok in (True, True, False):
        metrics.parity(ok)
    metrics.hear(Preempted("r", 0))
    metrics.hear(Fallback("the draft model", "serving without it"))
    metrics.hear(Notice("the weights", "not counted"))
    metrics.rejected("unauthorized")
    assert value(metrics, "understudy_parity_checks_total", result="same") == 2
    assert value(metrics, "understudy_parity_checks_total", result="different") == 1
    assert value(metrics, "understudy_preemptions_total") == 1
    assert value(metrics, "understudy_fallbacks_total", what="the-draft-model") == 1
    assert value(metrics, "understudy_http_rejections_total", cause="unauthorized") == 1
    assert value(metrics, "understudy_metrics_errors_total") == 0


def test_what_others_count_is_read_from_them(server: Watched) -> None:
    assert server.value("understudy_audit_write_failures_total") == 0
    assert server.value("understudy_records_dropped_total") == 0
    metrics = Metrics()
    metrics.watch(server.service, audit_failures=lambda: 3, records_dropped=lambda: 4)
    assert value(metrics, "understudy_audit_write_failures_total") == 3
    assert value(metrics, "understudy_records_dropped_total") == 4


def test_kill_switch_is_shown_and_its_flips_are_counted() -> None:
    metrics = Metrics()
    assert value(metrics, "understudy_speculation_enabled", scope="all") == 1
    off = Switches(classes_off=frozenset({"code"}), drafters_off=frozenset({"suffix"}), max_depth=4)
    metrics.switched(off, source="file")
    assert value(metrics, "understudy_speculation_enabled", scope="all") == 1
    assert value(metrics, "understudy_speculation_enabled", scope="class", name="code") == 0
    assert value(metrics, "understudy_speculation_enabled", scope="drafter", name="suffix") == 0
    assert value(metrics, "understudy_speculation_max_depth") == 4
    metrics.switched(Switches(enabled=False), source="admin")
    assert value(metrics, "understudy_speculation_enabled", scope="all") == 0
    metrics.switched(ALL_ON, source="admin")
    assert value(metrics, "understudy_speculation_enabled") == 1, "classes that are on again are shown no more"
    assert value(metrics, "understudy_switch_flips_total", source="admin") == 2


def test_labels_from_outside_are_limited() -> None:
    metrics = Metrics()
    metrics.ignored(f"field_{number}" for number in range(500))
    metrics.ignored(["\ud800", "x" * 10_000, 'quo"te\n'])
    for number in range(100):
        metrics.rejected(f"cause {number}")
        metrics.hear(Fallback(f"what {number}", "why"))
        metrics.hear(Ended("r", 0, "stop", facts(SpeculationCounts(cycles=1), f"class-{number}\ud800")))
        metrics.switched(Switches(classes_off=frozenset({f"more-{number}"})), source=f"source {number}")
    found = samples(metrics)
    for name, label, most in (
        ("understudy_ignored_fields_total", "field", MOST_FIELDS),
        ("understudy_http_rejections_total", "cause", 32),
        ("understudy_fallbacks_total", "what", 32),
        ("understudy_spec_cycles_total", "workload_class", 32),
        ("understudy_switch_flips_total", "source", 32),
    ):
        values = {dict(labels)[label] for sample, labels in found if sample == name}
        assert "other" in values
        assert len(values) <= most, name
    assert value(metrics, "understudy_ignored_fields_total") == 503, "those beyond the limit are counted together"
    assert value(metrics, "understudy_spec_cycles_total") == 100


def test_vllm_names_carry_the_same_numbers(server: Watched) -> None:
    async def main() -> None:
        await server.ask("a", workload_class="code")
        await server.ask("b", workload_class="chat", sampling={"max_tokens": 5})

    asyncio.run(main())
    labels = {"model_name": "tiny", "engine": "0"}
    for theirs, ours in (
        ("spec_decode_num_drafts_total", "spec_drafts_total"),
        ("spec_decode_num_draft_tokens_total", "spec_drafted_tokens_total"),
        ("spec_decode_num_accepted_tokens_total", "spec_accepted_tokens_total"),
        ("spec_decode_num_accepted_tokens_per_pos_total", "spec_position_accepted_total"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("e2e_request_latency_seconds_count", "request_seconds_count"),
        ("request_time_per_output_token_seconds_bucket", "time_per_output_token_seconds_bucket"),
    ):
        assert server.value(f"vllm:{theirs}", **labels) == pytest.approx(server.value(f"understudy_{ours}")) != 0
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    first = server.value("understudy_spec_position_accepted_total", position="1")
    assert server.value(per_position, position="0") == first > 0
    assert server.value("vllm:request_success_total", finished_reason="length") == 2
    assert server.value("vllm:request_success_total", finished_reason="stop") == 0
    assert server.value("vllm:num_requests_running", **labels) == 3
    assert server.value("vllm:num_requests_waiting", **labels) == 1
    assert server.value("vllm:kv_cache_usage_perc", **labels) == 0.75


def test_vllm_names_are_there_before_the_first_request_and_of_the_right_type(server: Watched) -> None:
    content = server.metrics.text()[0].decode()
    types = dict(line.split()[2:4] for line in content.splitlines() if line.startswith("# TYPE vllm:"))
    assert types == {
        "vllm:spec_decode_num_drafts_total": "counter",
        "vllm:spec_decode_num_draft_tokens_total": "counter",
        "vllm:spec_decode_num_accepted_tokens_total": "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": "counter",
        "vllm:prompt_tokens_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter",
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram",
    }
    assert server.value("vllm:spec_decode_num_drafts_total") == 0
    assert "_created" not in content


def test_numbers_can_be_read_while_the_model_is_still_loading(folder: Path) -> None:
    server = watched(folder)
    server.backend.state = type(server.backend.state)("starting")
    assert server.value("vllm:num_requests_waiting", model_name="") == 1
    with pytest.raises(KeyError):
        server.value("understudy_memory_bytes")


def test_error_of_our_own_is_counted_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    impossible = Facts("chat", 0, 1, 0, 0, SpeculationCounts(cycles=3))  # fewer words than cycles
    metrics.hear(Ended("r", 0, "stop", impossible))
    assert value(metrics, "understudy_metrics_errors_total") == 1
    assert "could not be counted" in caplog.text


def test_every_number_is_explained(server: Watched) -> None:
    families = text_string_to_metric_families(server.metrics.text()[0].decode())
    told = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    page = (Path(__file__).parents[2] / "docs" / "SERVER.md").read_text()
    assert set(re.findall(r"`((?:understudy_|vllm:)\w+)`", page)) == told


def test_two_registries_do_not_meet() -> None:
    first, second = Metrics(), Metrics()
    first.parity(ok=True)
    assert value(second, "understudy_parity_checks_total", result="same") == 0


def test_counting_is_cheap() -> None:
    metrics = Metrics()
    counts = SpeculationCounts(cycles=40, drafted=300, accepted=80, rejected=200)
    counts.drafts, counts.accepted_histogram = 30, [2] * 17
    counts.reached_by_position = counts.matched_by_position = [5] * 16
    counts.rows_by_drafter = counts.accepted_by_drafter = {"ngram": 40, "suffix": 40}
    request = Request(request_id="r", prompt_ids=(1, 2, 3), workload_class="code")
    exchange = Exchange(request, Caller(), "chat", 0.0, 0.1, 0.2, 3.0, 3.0, 120, "finished")
    ended = Ended("r", 0, "stop", facts(counts, "code"))

    def one_request() -> None:
        metrics.hear(ended)
        metrics.ended(exchange)

    one_s = _fastest_s(Gauge("yardstick", "How fast this machine counts", registry=CollectorRegistry()).inc)
    assert _fastest_s(one_request) < 200 * one_s
    assert _fastest_s(lambda: metrics.hear(CYCLE)) < 8 * one_s


def _fastest_s(work: Any) -> float:
    times = []
    for _ in range(40):
        started = time.perf_counter()
        for _ in range(20):
            work()
        times.append((time.perf_counter() - started) / 20)
    return min(times)

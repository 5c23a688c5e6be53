"""AIPerf and its two reports on speculation: one from a block in each answer, one by category from our /metrics.

Nothing tells it what serves the model: it knows vLLM's block and vLLM's counters. The block is asked for in the body.
Its categories are given to us as workload classes, so that our own counters can be held against its numbers.
"""

from __future__ import annotations

import csv
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.counters import Speculated, read_speculated
from tests.clients.data_files import read_lines, texts_of, write_lines
from tests.clients.environments import Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients

CATEGORIES = {"coding": "code", "summarization": "summarization"}
"""AIPerf's categories, and the class of our prompts that stands in for each."""
NUM_REQUESTS = 4
QUESTIONS = "qualitative.jsonl"
"""The name that a file of SPEED-Bench's questions must have."""


@dataclass(frozen=True)
class Profile:
    """What AIPerf wrote of one category, and what we counted of it."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    counted: Speculated
    counted_in_all: Speculated


def write_questions(path: Path) -> None:
    """Our prompts in the form of SPEED-Bench."""
    write_lines(
        path,
        [
            {"question_id": uuid.uuid4().hex, "category": category, "messages": [{"role": "user", "content": text}]}
            for category, prompt_class in CATEGORIES.items()
            for text in texts_of(prompt_class)[:NUM_REQUESTS]
        ],
    )


def profile(aiperf: Client, server: Server, model: str, *, tokenizer_folder: Path, category: str) -> Profile:
    """Let AIPerf ask the questions of one category."""
    before, before_in_all = read_speculated(server, category), read_speculated(server)
    aiperf.run(
        "aiperf", "profile", "--model", model, "--url", f"http://127.0.0.1:{server.port}",
        "--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer_folder),
        "--input-file", QUESTIONS, "--custom-dataset-type", f"speed_bench_{category}",
        "--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--workers-max", "1",
        "--extra-inputs", '{"include_metrics": true, "max_completion_tokens": 48, "temperature": 0}',
        "--header", f"X-Workload-Class:{category}",
        "--server-metrics-formats", "json", "--no-gpu-telemetry",
        "--output-artifact-dir", f"artifacts/{category}", "--ui", "simple",
        timeout_s=240,
    )  # fmt: skip
    folder = aiperf.home / "artifacts" / category
    return Profile(
        summary=json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8")),
        records=read_lines(folder / "profile_export.jsonl"),
        counted=read_speculated(server, category).since(before),
        counted_in_all=read_speculated(server).since(before_in_all),
    )


def check(found: Profile) -> None:
    """Every request succeeded, and AIPerf's sums are our counters."""
    assert found.summary["request_count"]["avg"] == NUM_REQUESTS
    assert not found.summary.get("error_summary")
    blocks = [record["spec_decode_acceptance"] for record in found.records]
    assert len(blocks) == NUM_REQUESTS
    assert found.counted.accepted_tokens > 0
    assert found.counted_in_all == found.counted
    assert found.counted == Speculated(
        sum(block["num_spec_steps"] for block in blocks),
        sum(block["num_draft_tokens"] for block in blocks),
        sum(block["num_accepted_draft_tokens"] for block in blocks),
    )
    assert found.counted == Speculated(
        found.summary["total_spec_decode_steps"]["avg"],
        found.summary["total_draft_tokens"]["avg"],
        found.summary["total_accepted_draft_tokens"]["avg"],
    )
    histogram = found.summary["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == found.counted.drafts
    assert sum(int(accepted) * steps for accepted, steps in histogram.items()) == found.counted.accepted_tokens


def test_its_reports_say_what_we_counted(
    server: Server, model: str, client: Callable[[str], Client], tokenizer_folder: Path
) -> None:
    aiperf = client("aiperf")
    write_questions(aiperf.home / QUESTIONS)
    found = {
        category: profile(aiperf, server, model, tokenizer_folder=tokenizer_folder, category=category)
        for category in CATEGORIES
    }
    for one in found.values():
        check(one)
    for metric, expected in {
        "accept_length": {name: 1 + one.counted.accepted_tokens / one.counted.drafts for name, one in found.items()},
        "accept_rate": {name: one.counted.accepted_tokens / one.counted.draft_tokens for name, one in found.items()},
    }.items():
        aiperf.run("aiperf", "speed-bench-report", "artifacts", "--metric", metric, "--output", "report.csv")
        with (aiperf.home / "report.csv").open(encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        assert row["Model"] == model
        assert {name: float(row[name]) for name in expected} == {
            name: float(f"{value:.2f}") for name, value in expected.items()
        }

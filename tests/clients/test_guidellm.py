"""guidellm, vLLM's benchmark: it probes health and models, streams with usage in every chunk, and writes its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.data_files import texts_of, write_lines
from tests.clients.environments import OFFLINE, Client
from tests.live.serving import Server

pytestmark = pytest.mark.clients

NUM_REQUESTS = 6
NUM_TOKENS = 24


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_without_errors(
    server: Server, model: str, client: Callable[[str], Client], tokenizer_folder: Path, request_format: str
) -> None:
    guidellm = client("guidellm")
    texts = texts_of("summarization")[:NUM_REQUESTS]
    write_lines(
        guidellm.home / "prompts.jsonl", [{"prompt": text, "output_tokens_count": NUM_TOKENS} for text in texts]
    )
    target = f"http://127.0.0.1:{server.port}"
    guidellm.run(
        "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={target},model={model},request_format={request_format}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--data", "kind=json_file,path=prompts.jsonl",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer_folder}",
        "--output", "kind=json,path=report.json",
        "--output", "kind=csv,path=report.csv",
        timeout_s=240,
        variables=OFFLINE,
    )  # fmt: skip
    report: dict[str, Any] = json.loads((guidellm.home / "report.json").read_text(encoding="utf-8"))
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_TOKENS, "ignore_eos and the length were honoured"
        assert request["output"]
    assert (guidellm.home / "report.csv").stat().st_size > 0

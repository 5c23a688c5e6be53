"""The routes for whoever runs a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.server.watched import Watched, watched
from tests.tiny_models import write_tiny_model
from understudy import __version__
from understudy.core.backend import BackendState
from understudy.server import system
from understudy.server.app import make_routes
from understudy.server.exchange import Caller


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("system") / "tiny")


@pytest.fixture
def server(folder: Path) -> Watched:
    return watched(folder)


def get(server: Watched, path: str, *, headers: dict[str, str] | None = None, caller: Caller | None = None) -> Any:
    app = make_routes(server.service, server.metrics)

    async def gated(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        scope.setdefault("state", {})["caller"] = caller
        await app(scope, receive, send)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(gated)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(main())


def test_health_is_good_while_the_process_lives(server: Watched) -> None:
    server.backend.die()
    assert get(server, "/health").json() == {"status": "ok", "reason": ""}
    assert not server.backend.requests, "nothing was computed"


def test_deep_health_computes_one_token(server: Watched) -> None:
    answer = get(server, "/health?deep=1")
    assert answer.status_code == 200
    (request,) = server.backend.requests
    assert request.sampling.max_tokens == 1
    assert not server.backend.running
    assert server.value("understudy_requests_total", endpoint="health", outcome="finished") == 1


def test_deep_health_fails_where_no_token_comes_in_time(server: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "DEEP_LIMIT_S", 0.02)
    server.backend.first_s = 10.0
    answer = get(server, "/health?deep=1")
    assert answer.status_code == 503
    assert answer.json() == {"status": "failing", "reason": "no token came within 0.02 s"}
    assert not server.backend.running, "what was asked for is aborted"
    assert server.service.admission.num_running == 0


def test_deep_health_fails_while_the_server_drains(server: Watched) -> None:
    server.service.admission.drain()
    answer = get(server, "/health?deep=1")
    assert answer.status_code == 503
    assert "stopped" in answer.json()["reason"]


def test_deep_health_needs_a_key_where_there_are_keys(folder: Path) -> None:
    server = watched(folder, api_keys=("secret",))
    assert get(server, "/health?deep=1", caller=Caller()).status_code == 401
    assert not server.backend.requests
    assert get(server, "/health", caller=Caller()).status_code == 200
    assert get(server, "/health?deep=1", caller=Caller("somebody")).status_code == 200


def test_ready_says_why_not(server: Watched) -> None:
    assert get(server, "/ready").json() == {"status": "ready", "reason": ""}
    server.backend.die()
    answer = get(server, "/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "it died")
    server.backend.state = BackendState("starting")
    assert get(server, "/ready").json()["reason"] == "the engine is starting"
    server.backend.revive()
    server.service.admission.drain()
    answer = get(server, "/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "the server is being stopped")


def test_metrics_are_text_of_prometheus(server: Watched) -> None:
    answer = get(server, "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nvllm:spec_decode_num_drafts_total{" in answer.text
    assert "\nunderstudy_kv_usage_ratio 0.75\n" in answer.text


def test_metrics_are_open_metrics_where_that_is_asked_for(server: Watched) -> None:
    asyncio.run(server.ask("a"))
    answer = get(server, "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family.type for family in text_string_to_metric_families(answer.text)}
    assert families["vllm:generation_tokens"] == "counter"
    assert families["understudy_request_seconds"] == "histogram"


def test_version_and_load(server: Watched) -> None:
    assert get(server, "/version").json() == {"version": __version__}
    server.service.admission.num_running = 2
    assert get(server, "/load").json() == {
        "server_load": 2,
        "running_choices": 2,
        "waiting_requests": 0,
        "engine_running_sequences": 3,
        "engine_waiting_sequences": 1,
        "kv_usage_ratio": 0.75,
        "draining": False,
    }


def test_routes_are_documented(server: Watched) -> None:
    paths = make_routes(server.service, server.metrics).openapi()["paths"]
    assert {"/health", "/ready", "/metrics", "/version", "/load"} <= set(paths)
    assert {"200", "401", "503"} <= set(paths["/health"]["get"]["responses"])
    assert "text/plain" in paths["/metrics"]["get"]["responses"]["200"]["content"]

"""schemathesis over the description of a real server: at least 500 requests, no crash, no 5xx."""

from __future__ import annotations

import pytest
import schemathesis

from tests.live.serving import Server
from tests.server import conformance

pytestmark = pytest.mark.live


def before_call(context: object, case: schemathesis.Case, kwargs: object) -> None:
    """Answers stay short, or a few hundred of them would take all day."""
    if isinstance(case.body, dict) and {"messages", "prompt"} & set(case.body):
        case.body["max_tokens"] = 2
        case.body.pop("max_completion_tokens", None)
        case.body.pop("min_tokens", None)


def test_every_answer_conforms(server: Server) -> None:
    config = conformance.config(seed=2, num_examples=20)
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    schemathesis.hook(before_call)
    try:
        failures, statuses = conformance.check(schemathesis.openapi.from_url(url, config=config))
    finally:
        schemathesis.hooks.unregister(before_call)
    assert sum(statuses.values()) >= 500
    assert not [status for status in statuses if status >= 500], statuses
    assert not failures, "\n".join(failures[:10])
    assert server.get("/admin/v1/state")["num_restarts"] == 0

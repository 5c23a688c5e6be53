"""Every answer is what /openapi.json says, whatever is sent: schemathesis writes the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis

from tests.server import conformance
from tests.server.serving import serve_fake


def test_description_is_complete(tmp_path: Path) -> None:
    schema = serve_fake(tmp_path).client.get("/openapi.json").json()
    expected = {"200", "400", "401", "403", "404", "405", "413", "415", "429", "500", "503"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert set(operation["responses"]) == expected, path
            assert ("requestBody" in operation) == (method == "post" and path != "/admin/v1/check")
    known = set(schema["components"]["schemas"])
    assert {"ChatBody", "CompletionBody", "ChatCompletion", "ChatCompletionChunk", "Error"} <= known
    for reference in _references(schema):
        assert reference.rpartition("/")[2] in known


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for entry in value.values() for reference in _references(entry)]
    return [reference for entry in value for reference in _references(entry)] if isinstance(value, list) else []


@pytest.mark.parametrize("num_examples", [10, pytest.param(700, marks=pytest.mark.full)])
def test_every_answer_conforms(tmp_path: Path, num_examples: int) -> None:
    app = serve_fake(tmp_path, info={"max_context": 64}).app
    config = conformance.config(seed=1, num_examples=num_examples)
    failures, statuses = conformance.check(schemathesis.openapi.from_asgi("/openapi.json", app, config=config))
    assert not failures, "\n".join(failures[:5])
    assert num_examples < 100 or sum(statuses.values()) >= 10_000
    assert statuses[200] > 100
    assert statuses[400] > 100
    assert set(statuses) <= {200, 400, 404, 405, 415}

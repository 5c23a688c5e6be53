"""schemathesis over a description: which answers did not conform, and how many had which status."""

from __future__ import annotations

from collections import Counter
from typing import Any

from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema


def config(*, seed: int, num_examples: int) -> SchemathesisConfig:
    """All phases: examples, coverage of every bound, fuzzing, sequences of calls."""
    return SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "continue-on-failure": True,
            "generation": {"max-examples": num_examples},
            # rules between fields, grammars and the model's context are beyond a schema: valid JSON may be refused
            "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]}},
        }
    )


def check(schema: Any) -> tuple[list[str], Counter[int]]:
    """Send everything that the configuration asks for."""
    failures: list[str] = []
    statuses: Counter[int] = Counter()
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        statuses.update(i.response.status_code for i in event.recorder.interactions.values() if i.response is not None)
        for case_id, checks in event.recorder.checks.items():
            case = event.recorder.cases[case_id].value
            failed = [check for check in checks if check.status.name != "SUCCESS"]
            failures += [f"{check.name}: {case.method} {case.formatted_path} {case.body!r:.300}" for check in failed]
    print(f"{sum(statuses.values())} requests: {dict(statuses)}")
    return failures, statuses

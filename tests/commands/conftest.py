"""Commands run within the tests' own process here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns a process may tell its garbage collector what to leave alone; a command in a test does not."""
    monkeypatch.setattr("understudy.upkeep.calm_process", lambda: None)

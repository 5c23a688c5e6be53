"""What a user should know reaches the log where nobody else listens, and nothing more does."""

from __future__ import annotations

import logging

import pytest

from understudy.core.events import Fallback, Notice, Preempted, log_fallbacks


def test_fallbacks_and_notices_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="understudy"):
        log_fallbacks(Fallback("the self-test", "rows depend on their neighbours"))
        log_fallbacks(Notice("the draft model", "it is large"))
        log_fallbacks(Preempted("request-1", 0))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the self-test: rows depend on their neighbours"),
        ("WARNING", "the draft model: it is large"),
    ]

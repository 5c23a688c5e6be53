"""What only the first drafts of a process cost is paid before anybody asks, and leaves no trace."""

from __future__ import annotations

import pytest

from tests.engine.engines import tiny_target
from understudy.assembly import build_engine
from understudy.config import EngineConfig
from understudy.core.events import Event
from understudy.drafters.suffix import SuffixDrafter


def test_drafters_have_drafted_before_anybody_asks_and_nothing_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    propose = SuffixDrafter.propose

    def watched(self: SuffixDrafter, contexts: list, budgets: list) -> list:  # type: ignore[type-arg]
        asked.extend(context.temperature for context in contexts)
        return propose(self, contexts, budgets)

    monkeypatch.setattr(SuffixDrafter, "propose", watched)
    heard: list[Event] = []
    engine = build_engine(tiny_target("llama"), EngineConfig(kv_tokens=512), emit=heard.append)
    assert {0.0, 1.0} <= set(asked)
    assert heard == []
    assert engine.explain().learned.rates == ()
    assert engine.explain().num_steps == 0
    assert engine.num_free_blocks == engine.num_blocks
    engine.check()


def test_an_engine_without_drafters_is_not_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.assembly.warm_up", lambda engine: pytest.fail("there is nothing to warm"))
    build_engine(tiny_target("llama"), EngineConfig(kv_tokens=512, drafters=()))


def test_a_context_that_is_too_short_for_it_is_left_alone() -> None:
    engine = build_engine(tiny_target("llama"), EngineConfig(kv_tokens=512, max_context=24))
    assert engine.max_context == 24

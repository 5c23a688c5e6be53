"""Forced drafts: what the grammar says must follow, within the budget, and nothing for anybody else."""

from __future__ import annotations

import json
import random
from typing import ClassVar

import pytest
from tests.engine.engines import new_engine, tiny_target
from tests.engine.scripted import Book, Scripted

from understudy.assembly import built_in_drafters
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.core.request import Grammar, Request, SamplingParams, Speculation
from understudy.core.switches import Switches
from understudy.drafters.base import Budget, Context
from understudy.drafters.forced import ForcedDrafter
from understudy.engine.engine import Engine
from understudy.sampling.noise import NoiseKey

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"return": {"type": "boolean"}, "range": {"enum": ["print index", "print"]}},
        "required": ["return", "range"],
        "additionalProperties": False,
    }
)


def context_of(forced: list[int] | None) -> Context:
    asks = None if forced is None else lambda: forced
    return Context(0, [1], 1, tenant="", temperature=0.0, noise=NoiseKey(0), forced_tokens=asks)


@pytest.mark.parametrize(("depth", "rows", "count"), [(8, 8, 4), (3, 8, 3), (8, 2, 2), (0, 8, 0), (8, 0, 0)])
def test_drafts_what_is_forced_within_the_budget(depth: int, rows: int, count: int) -> None:
    (draft,) = ForcedDrafter().propose([context_of([5, 6, 7, 8])], [Budget(depth, rows)])
    assert draft.tokens == (5, 6, 7, 8)[:count]
    assert draft.parents == (-1, 0, 1, 2)[:count]
    assert set(draft.confidence) <= {1.0}
    assert set(draft.sources) <= {"forced"}


def test_has_nothing_to_say_without_a_grammar() -> None:
    drafter, plain = ForcedDrafter(), context_of(None)
    assert not drafter.concerns(plain)
    assert drafter.propose([plain, context_of([])], [Budget(8, 8)] * 2) == [EMPTY, EMPTY]
    assert drafter.concerns(context_of([]))


def said(engine: Engine, *, grammar: bool = True, **speculation: object) -> tuple[list[int], dict[str, int], int]:
    """The tokens, those that each drafter had foreseen, and the cycles."""
    sampling = SamplingParams(
        temperature=0.0, seed=1, max_tokens=40, grammar=Grammar("json_schema", SCHEMA) if grammar else None
    )
    wanted = Speculation(**speculation)  # type: ignore[arg-type]
    (sequence,) = engine.submit(Request(request_id="r", prompt_ids=(7, 8), sampling=sampling, speculation=wanted))
    while engine.has_work:
        engine.step()
    tokens = sequence.tokens[2:]
    return tokens, sequence.counts.accepted_by_drafter, sequence.counts.cycles


def test_saves_cycles_and_changes_no_word() -> None:
    target = tiny_target("llama")
    plain, _, num_plain = said(new_engine(target))
    engine = new_engine(target, drafters=built_in_drafters())
    tokens, accepted, num_cycles = said(engine)
    assert tokens == plain
    assert accepted["forced"] > len(tokens) / 2
    assert num_cycles < num_plain / 2


def test_obeys_requests_and_switches() -> None:
    engine = new_engine(tiny_target("llama"), drafters=built_in_drafters())
    assert engine.drafter_names == ["forced", "prediction"]
    assert said(engine, drafter="forced")[1]
    assert not said(engine, drafter="prediction")[1]
    assert not said(engine, enabled=False)[1]
    assert not said(engine, max_depth=0)[1]
    assert not said(engine, grammar=False)[1]
    engine.switch(Switches(drafters_off=frozenset({"forced"})))
    assert not said(engine)[1]
    engine.switch(Switches(enabled=False))
    assert not said(engine)[1]


def test_is_bought_at_once_where_rows_are_cheap() -> None:
    """What is certain need not be learned: the first forced tokens of the first request are drafted."""
    engine = new_engine(tiny_target("llama"), drafters=built_in_drafters())
    first = said(engine)[2]
    for _ in range(5):
        said(engine)
    assert said(engine)[2] == first


class Rival(Scripted):
    """Is sure of tokens that a grammar rules out."""

    name: ClassVar[str] = "rival"

    def draft(self, context: Context, budget: Budget) -> Draft:
        return Draft((5, 6), (ROOT, ROOT), (0.99, 0.99), (self.name,) * 2)


def test_guesses_beside_what_is_certain_are_not_verified() -> None:
    target = tiny_target("llama")
    rival = Rival(Book(), random.Random(0), target.decoder.config.vocab_size)
    engine = new_engine(target, drafters=[*built_in_drafters(), rival])
    grammar = Grammar("regex", "range print index return the other")
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=40, grammar=grammar)
    (sequence,) = engine.submit(Request(request_id="r", prompt_ids=(7, 8), sampling=sampling))
    while engine.has_work:
        engine.step()
    counts = sequence.counts
    assert counts.proposed["rival"] > 0
    assert set(counts.rows_by_drafter) == {"forced"}, "all of the text is forced"
    assert counts.accepted == counts.rows > 0

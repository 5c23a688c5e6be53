"""A draft model read once must score at every depth as the replay does, which asks it cycle by cycle."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from tests.advise.test_replay import LIMITS, model_drafter, questions, served
from tests.engine.engines import new_engine, tiny_target
from understudy.advise.chains import read, score_chains
from understudy.advise.replay import score
from understudy.advise.scores import TranscriptScore
from understudy.assembly import Target, with_draft
from understudy.control.cost import CostModel
from understudy.drafters.base import PricedDrafter

DEPTHS = (0, 1, 2, 3, 5, 8, 16)


@pytest.fixture(scope="module")
def target() -> Target:
    return with_draft(tiny_target("llama"), "layers:1")


def timeless(found: TranscriptScore) -> TranscriptScore:
    return replace(found, cycles=tuple(replace(cycle, asking_s=0.0) for cycle in found.cycles))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_depth_is_what_the_replay_finds(target: Target, temperature: float) -> None:
    asked = [replace(request, tenant=request.request_id) for request in questions(temperature)]
    transcripts = served(new_engine(target), asked)
    reading = read(cast(PricedDrafter, model_drafter(target)), transcripts, cost=CostModel({1: 1e-9}))
    ours = score_chains(reading, name="model", depths=DEPTHS, limits=LIMITS)
    theirs = score(lambda: model_drafter(target), transcripts, depths=DEPTHS, limits=LIMITS)
    assert any(found.counts.accepted for found in theirs), "a draft that is never right proves little"
    assert any(found.counts.rejected for found in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.drafter, mine.depth) == (other.drafter, other.depth)
        for one, two in zip(mine.scores, other.scores, strict=True):
            assert timeless(one) == timeless(two)


def test_time_that_is_up_leaves_what_was_read(target: Target) -> None:
    transcripts = served(new_engine(target), questions(0.0)[:3])
    drafter = cast(PricedDrafter, model_drafter(target))
    watched: list[tuple[int, int]] = []
    reading = read(
        drafter,
        transcripts,
        cost=CostModel({1: 1e-9}),
        has_time=lambda: False,
        watcher=lambda done, total: watched.append((done, total)),
    )
    assert [text.transcript for text in reading.texts] == transcripts[:1]
    assert watched == [(1, 3)]
    assert reading.guess_s > 0.0

"""The time that a replay is said to have taken, worked out by hand."""

from __future__ import annotations

import pytest

from understudy.advise.scores import Score, ScoredCycle, TimeModel, TranscriptScore, by_class, modelled_s, speedup
from understudy.advise.transcript import Transcript
from understudy.control.cost import CostModel
from understudy.core.request import Request, SpeculationCounts

COST = CostModel({1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0}, per_key_s=0.01, per_read_s=0.001)
DRAFT = CostModel({1: 0.1, 2: 0.2, 8: 0.3})


def scored(cycles: list[ScoredCycle], *, workload_class: str = "code") -> TranscriptScore:
    num_tokens = 1 + sum(cycle.emitted for cycle in cycles)
    request = Request(request_id="r", prompt_ids=(1,) * 10, workload_class=workload_class)
    transcript = Transcript(request=request, answer_ids=(3,) * num_tokens, seed=0)
    counts = SpeculationCounts(cycles=1 + len(cycles))
    return TranscriptScore(transcript, counts, tuple(cycles))


def cycle(context: int, *, rows: int, emitted: int, passes: int = 0, read: int = 0) -> ScoredCycle:
    return ScoredCycle(context, rows, rows, emitted - 1, emitted, 0.0 if read else 0.25, passes, read)


def test_plain_is_one_pass_for_each_word_but_the_first() -> None:
    score = scored([cycle(10, rows=0, emitted=1), cycle(11, rows=0, emitted=1)])
    expected = (1.0 + 0.011 * 10) + (1.0 + 0.011 * 11)
    assert TimeModel(COST).plain_s(score.transcript) == pytest.approx(expected)
    prompt_s = COST.rows_s[8] + 2 * (COST.rows_s[8] - COST.rows_s[4]) / 4  # ten rows, on the line beyond the table
    assert TimeModel(COST, with_prompt=True).plain_s(score.transcript) == pytest.approx(expected + prompt_s, rel=0.05)
    assert TimeModel(COST, word_s=0.5).plain_s(score.transcript) == pytest.approx(expected + 2 * 0.5)


def test_cycle_is_a_pass_and_the_asking() -> None:
    score = scored([cycle(10, rows=3, emitted=3)])
    assert modelled_s([score], TimeModel(COST)) == pytest.approx(2.0 + 0.01 * 10 + 0.001 * 4 * 10 + 0.25)


def test_batch_shares_a_pass_and_asks_for_each() -> None:
    score = scored([cycle(10, rows=3, emitted=3)])
    expected = 3.0 + 0.01 * 20 + 0.001 * 8 * 10 + 2 * 0.25
    assert modelled_s([score], TimeModel(COST, batch=2)) == pytest.approx(expected)


def test_draft_model_reads_and_makes_passes() -> None:
    score = scored([cycle(10, rows=3, emitted=3, passes=3, read=2)])
    target_s = 2.0 + 0.01 * 10 + 0.001 * 4 * 10
    assert modelled_s([score], TimeModel(COST, DRAFT)) == pytest.approx(target_s + 0.2 + 2 * 0.1)
    with pytest.raises(AssertionError, match="must be given"):
        modelled_s([score], TimeModel(COST))


def test_speedup_has_an_interval_over_transcripts() -> None:
    flat = CostModel({1: 1.0, 8: 1.0})
    good = scored([ScoredCycle(10, 3, 3, 3, 4, 0.0)] * 5)
    bad = scored([ScoredCycle(10, 3, 3, 0, 1, 0.0)] * 20)
    alone = speedup([good], TimeModel(flat))
    assert alone is not None
    assert (alone.value, alone.low, alone.high) == (4.0, 4.0, 4.0)
    both = speedup([good, bad] * 10, TimeModel(flat))
    assert both is not None
    assert both.value == pytest.approx(40 / 25)
    assert 1.0 < both.low < both.value < both.high < 4.0
    assert speedup([scored([])], TimeModel(flat)) is None


def test_classes_are_taken_apart() -> None:
    scores = tuple(scored([cycle(10, rows=1, emitted=2)], workload_class=name) for name in ("rag", "code", "rag"))
    parts = by_class(Score("all", "ngram", 1, scores))
    assert [(part.workload_class, len(part.scores)) for part in parts] == [("code", 1), ("rag", 2)]
    assert parts[1].tokens_per_cycle == pytest.approx(6 / 4)

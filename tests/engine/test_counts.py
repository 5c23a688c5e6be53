"""What the engine counts of its drafts: by position, and nothing of what a stop or the maximum cut off."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.engine.engines import FixedCost, new_engine, run_alone, steps
from tests.engine.scripted import Book, Right, Scripted
from understudy.assembly import Target
from understudy.control.classes import MOST_CLASSES
from understudy.control.planning import Worth
from understudy.core.draft import Draft
from understudy.core.request import Request, SamplingParams, Speculation, SpeculationCounts
from understudy.drafters.base import Budget, Context
from understudy.drafters.ngram import NgramDrafter

SAMPLING = SamplingParams(temperature=1.0, max_tokens=13, seed=3, ignore_eos=True)
REQUEST = Request(
    request_id="r", prompt_ids=(5, 6, 7, 8), sampling=SAMPLING, speculation=Speculation(forced=True, max_depth=4)
)


class TwoRight(Scripted):
    """Right at two positions, wrong at the two after them."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        right = self.book.next_tokens(context, 4)
        return self.chain([*right[:2], *((token + 1) % self.vocab_size for token in right[2:])])


@pytest.fixture(scope="module")
def words(llama: Target) -> list[int]:
    (answer,) = run_alone(new_engine(llama), REQUEST)
    assert len(answer.token_ids) == 13
    return answer.token_ids


def counts_of(llama: Target, words: list[int], kind: type[Scripted], sampling: SamplingParams) -> SpeculationCounts:
    book = Book()
    book.write(3, 0, [*REQUEST.prompt_ids, *words])
    drafter = kind(book, random.Random(0), llama.decoder.config.vocab_size)
    engine = new_engine(llama, drafters=[drafter])
    (sequence,) = engine.submit(replace(REQUEST, sampling=sampling))
    for _ in steps(engine):
        pass
    return sequence.counts


def test_positions_are_counted_up_to_the_first_that_is_wrong(llama: Target, words: list[int]) -> None:
    """One word without a draft, then three per cycle: two that were drafted and the one that was not."""
    counts = counts_of(llama, words, TwoRight, replace(SAMPLING, max_tokens=10))
    assert counts.cycles == 4
    assert counts.reached_by_position[:2] == [3, 3]
    assert counts.matched_by_position[:2] == [3, 3]
    assert sum(counts.matched_by_position[2:]) == 0
    assert counts.reached_by_position[2] == 2, "the last draft was no longer than what may be said"
    assert len(counts.reached_by_position) == 3, "no walk came to the fourth"


def test_what_a_stop_cuts_off_is_neither_reached_nor_matched(llama: Target, words: list[int]) -> None:
    place = next(place for place in (3, 4) if words[place] not in words[:place])
    counts = counts_of(llama, words, Right, replace(SAMPLING, stop_token_ids=(words[place],)))
    assert counts.drafted == 4
    assert counts.reached_by_position == [1] * place
    assert counts.matched_by_position == [1] * place
    assert sum(counts.matched_by_position) == counts.accepted == place


def test_what_was_not_drafted_leaves_no_balance(llama: Target) -> None:
    """Words cost what they cost plainly, whoever ends beside them and however long that one's text was."""
    cost = FixedCost({1: 1.0, 1024: 2.0}, per_key_s=0.1, per_read_s=0.1)
    engine = new_engine(llama, cost=cost, drafters=[NgramDrafter()])
    long = replace(REQUEST, request_id="long", prompt_ids=(5, 6, 7) * 30, sampling=replace(SAMPLING, max_tokens=4))
    sequences = [*engine.submit(REQUEST), *engine.submit(long)]
    for _ in steps(engine):
        pass
    for sequence in sequences:
        assert sequence.ledger.plain_s > 4.0
        assert abs(sequence.ledger.spent_s - sequence.ledger.plain_s) < 0.5, "seconds that asking nobody took"


def test_names_of_classes_make_no_more_kinds_of_steps_than_there_are_classes(
    llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: set[str] = set()
    monkeypatch.setattr(Worth, "num_resting", lambda self, kind, num_slept=0: kinds.add(kind) or 0)
    engine = new_engine(llama, drafters=[NgramDrafter()])
    sampling = replace(SAMPLING, max_tokens=3)
    for number in range(2 * MOST_CLASSES):
        run_alone(engine, replace(REQUEST, sampling=sampling, speculation=Speculation(), workload_class=f"c{number}"))
    assert 1 < len(kinds) <= MOST_CLASSES

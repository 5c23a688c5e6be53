"""Prompt lookup against a scan of the whole context."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.ngram import NgramDrafter
from understudy.errors import ConfigError
from understudy.sampling.noise import NoiseKey

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def context_of(tokens: list[int], sequence_id: int = 0) -> Context:
    return Context(sequence_id, tokens, len(tokens), tenant="t", temperature=0.0, noise=NoiseKey(0))


def draft_of(drafter: NgramDrafter, context: Context, *, depth: int = 8, rows: int = 8) -> Draft:
    (draft,) = drafter.propose([context], [Budget(max_depth=depth, max_rows=rows)])
    return draft


def scan(tokens: list[int], *, min_n: int, max_n: int, reach: int) -> tuple[int, list[int]]:
    """The slow twin: look at every earlier place, the latest first, for the longest n that agrees."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return n, tokens[end : end + reach]
    return 0, []


@settings(deadline=None)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40)), limits=st.tuples(st.integers(1, 3), st.integers(0, 3)))
def test_equals_a_scan_however_the_tokens_arrive(tokens: list[int], cuts: list[int], limits: tuple[int, int]) -> None:
    min_n, max_n = limits[0], limits[0] + limits[1]
    drafter = NgramDrafter(min_n=min_n, max_n=max_n)
    context = context_of([])
    for cut in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        context.tokens.extend(tokens[len(context.tokens) : cut])
        draft = draft_of(drafter, context, depth=5)
        n, copied = scan(tokens[:cut], min_n=min_n, max_n=max_n, reach=5)
        assert list(draft.tokens) == copied
        assert draft.parents == tuple(range(-1, len(copied) - 1))
        assert draft.sources == ("ngram",) * len(copied)
        assert set(draft.confidence) <= {n**2 / (n**2 + 6.0)}


def test_longer_match_wins_over_a_later_one_and_is_surer() -> None:
    longer = draft_of(NgramDrafter(), context_of([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]))
    shorter = draft_of(NgramDrafter(), context_of([9, 2, 3, 8, 1, 2, 3]))
    assert longer.tokens[:2] == (7, 9)
    assert shorter.tokens[:2] == (8, 1)
    assert 0.0 < shorter.confidence[0] < longer.confidence[0] < 1.0


@pytest.mark.parametrize(("depth", "rows", "length"), [(3, 8, 3), (8, 2, 2), (0, 8, 0), (8, 0, 0), (8, 8, 5)])
def test_stays_within_the_budget_and_ends_with_the_context(depth: int, rows: int, length: int) -> None:
    drafter, context = NgramDrafter(), context_of([1, 2, 3, 4, 5, 1, 2])
    drafter.start(context)
    assert draft_of(drafter, context, depth=depth, rows=rows).tokens == (3, 4, 5, 1, 2)[:length]


def test_sequences_are_apart_and_stop_forgets() -> None:
    drafter = NgramDrafter()
    repeats, fresh = context_of([1, 2, 3, 1, 2], 1), context_of([1, 2], 2)
    drafter.start(repeats)
    drafter.start(fresh)
    drafts = drafter.propose([fresh, repeats], [Budget(4, 4), Budget(4, 4)])
    assert drafts == [EMPTY, draft_of(NgramDrafter(), repeats, depth=4)]
    for context in (repeats, fresh):
        drafter.stop(context, finished=True)
    assert not drafter._indexes
    assert draft_of(drafter, context_of([1, 2], 1)) == EMPTY  # an id that comes back starts afresh


def test_cost_does_not_grow_with_the_context() -> None:
    drafter = NgramDrafter()
    context = context_of([7 * i % 1009 for i in range(8192)])
    drafter.start(context)
    times_s = []
    for token in range(200):
        context.tokens.append(token)
        begin = time.perf_counter()
        draft_of(drafter, context)
        times_s.append(time.perf_counter() - begin)
    assert statistics.median(times_s) < 100e-6


def test_refuses_sizes_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="min_n is 3"):
        NgramDrafter(min_n=3, max_n=2)

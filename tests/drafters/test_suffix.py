"""Suffix drafting against a twin that counts by scanning, and its promises on memory, tenants and time."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.automaton import DOUBT
from understudy.drafters.base import Budget, Context
from understudy.drafters.suffix import SuffixDrafter
from understudy.errors import ConfigError
from understudy.sampling.noise import NoiseKey, reference_gumbel

Text = list[int]
Tree = dict[tuple[int, ...], float]  # path -> confidence of its last node
WIDE = Budget(max_depth=4, max_rows=200)


def context_of(
    tokens: Text, *, sequence_id: int = 0, tenant: str = "t", temperature: float = 0.0, seed: int = 0
) -> Context:
    return Context(sequence_id, list(tokens), len(tokens), tenant, temperature, NoiseKey(seed))


def draft_of(drafter: SuffixDrafter, context: Context, budget: Budget = WIDE) -> Draft:
    (draft,) = drafter.propose([context], [budget])
    return draft


def remember(drafter: SuffixDrafter, answer: Text, *, tenant: str = "t", prompt: Text | None = None) -> None:
    """Let a request of this tenant come and go."""
    context = context_of(prompt or [], sequence_id=10**6, tenant=tenant)
    drafter.start(context)
    context.tokens.extend(answer)
    drafter.stop(context, finished=True)


def test_a_prompt_is_read_when_a_draft_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the request comes: somebody waits for its first word."""
    drafter, context = SuffixDrafter(), context_of([1, 2, 3, 1, 2])
    with monkeypatch.context() as patched:
        patched.setattr("understudy.drafters.suffix.Automaton", None)  # nothing is made of it yet
        drafter.start(context)
    assert draft_of(drafter, context).tokens[0] == 3


def followers(texts: list[Text], string: Text) -> dict[int, list[int]]:
    """Token -> the places where it follows the string, counted through all texts."""
    found: dict[int, list[int]] = {}
    offset = 0
    for text in texts:
        for end in range(len(string), len(text)):
            if text[end - len(string) : end] == string:
                found.setdefault(text[end], []).append(offset + end)
        offset += len(text)
    return found


def scan(texts: list[Text], context: Context, *, match: Text, max_width: int, floor: float) -> Tree:
    """The slow twin: path -> confidence of every node down to depth 4."""
    tree: Tree = {}
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        path, survival = todo.pop()
        places = followers(texts, match + list(path)) if len(path) < WIDE.max_depth else {}
        weights = {token: float(len(where)) for token, where in places.items()}
        if context.temperature > 0:
            position = len(context.tokens) + len(path)
            weights = {
                token: math.exp(reference_gumbel(context.noise, position, token)) * weight
                for token, weight in weights.items()
            }
        ranked = sorted(weights, key=lambda token: (weights[token], places[token][-1]), reverse=True)
        for token in ranked[:max_width]:
            share = weights[token] / (sum(weights.values()) + DOUBT / (len(match) + len(path)))
            if survival * share >= floor:
                tree[(*path, token)] = share
                todo.append(((*path, token), survival * share))
    return tree


def paths(draft: Draft) -> Tree:
    return {tuple(draft.tokens[n] for n in draft.path(node)): draft.confidence[node] for node in range(len(draft))}


def survival(draft: Draft) -> list[float]:
    result: list[float] = []
    for parent, confidence in zip(draft.parents, draft.confidence, strict=True):
        result.append(confidence * (1.0 if parent == ROOT else result[parent]))
    return result


def assert_valid(draft: Draft, budget: Budget) -> None:
    assert len(draft.tokens) == len(draft.parents) == len(draft.confidence) == len(draft.sources)
    assert all(type(token) is int for token in draft.tokens + draft.parents)
    assert draft.clipped(vocab_size=2**31, max_depth=budget.max_depth, max_rows=budget.max_rows) is draft
    assert all(0.0 < confidence <= 1.0 for confidence in draft.confidence)
    assert set(draft.sources) <= {"suffix"}


SAMPLING = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(0, 2**64 - 1))


@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    past=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=2),
    sampling=SAMPLING,
    max_width=st.integers(1, 4),
)
def test_tree_equals_a_scan(text: Text, past: list[Text], sampling: tuple[float, int], max_width: int) -> None:
    drafter = SuffixDrafter(max_width=max_width)
    for answer in past:
        remember(drafter, answer)
    context = context_of(text, temperature=sampling[0], seed=sampling[1])
    draft = draft_of(drafter, context)
    assert_valid(draft, WIDE)
    own, old = (
        next((n for n in range(len(text), 0, -1) if followers(texts, text[-n:])), 0) for texts in ([text], past)
    )
    if max(own, old) < 1:
        assert draft == EMPTY
        return
    texts = past if old > own else [text]  # the longest match; of equals the request itself
    expected = scan(texts, context, match=text[-max(own, old) :], max_width=max_width, floor=0.02)
    assert paths(draft) == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    sampling=SAMPLING,
    budget=st.builds(Budget, max_depth=st.integers(0, 6), max_rows=st.integers(0, 12)),
)
def test_budget_is_kept_and_spent_on_the_likeliest_nodes(
    text: Text, sampling: tuple[float, int], budget: Budget
) -> None:
    drafter = SuffixDrafter(min_survival=0.001)
    context = context_of(text, temperature=sampling[0], seed=sampling[1])
    draft = draft_of(drafter, context, budget)
    assert_valid(draft, budget)
    everything = draft_of(drafter, context, Budget(budget.max_depth, 500))
    assert survival(draft) == sorted(survival(draft), reverse=True)
    assert survival(draft) == pytest.approx(survival(everything)[: len(draft)])
    assert len(draft) == min(budget.max_rows, len(everything))


@settings(deadline=None, max_examples=40)
@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60), cuts=st.sets(st.integers(1, 60)), sampling=SAMPLING)
def test_drafts_depend_on_the_text_and_not_on_how_it_arrived(
    text: Text, cuts: set[int], sampling: tuple[float, int]
) -> None:
    drafter = SuffixDrafter(max_match=6)
    remember(drafter, text[::-1])
    context = context_of([], temperature=sampling[0], seed=sampling[1])
    other = context_of([1, 0, 1, 0], sequence_id=2)
    for cut in sorted({min(cut, len(text)) for cut in cuts} | {len(text)}):
        context.tokens.extend(text[len(context.tokens) : cut])
        whole = context_of(context.tokens, sequence_id=1, temperature=sampling[0], seed=sampling[1])
        drafter.start(whole)
        drafts = drafter.propose([whole, other, context], [WIDE] * 3)
        assert drafts[0] == drafts[2]


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0])
def test_first_child_is_the_best_of_log_count_plus_the_targets_noise(temperature: float) -> None:
    text = [token for follower in (1, 1, 1, 1, 2, 2, 2, 3, 3, 4) for token in (8, 9, follower, 100 + follower)] + [8, 9]
    chosen = set()
    for seed in range(200):
        context = context_of(text, temperature=temperature, seed=2**64 - 1 - seed)
        context.noise = NoiseKey(context.noise.seed, choice=seed % 3)
        draft = draft_of(SuffixDrafter(), context)
        counts = {1: 4, 2: 3, 3: 2, 4: 1}
        scores = {t: math.log(c) + reference_gumbel(context.noise, len(text), t) for t, c in counts.items()}
        best = max(scores, key=scores.__getitem__)
        assert draft.tokens[0] == best
        chosen.add(best)
    assert chosen == {1, 2, 3, 4}  # the noise decides, not the counts alone


def test_at_temperature_0_the_most_frequent_child_is_first_and_the_latest_of_equals() -> None:
    text = [8, 9, 1, 8, 9, 2, 8, 9, 2, 8, 9, 3, 8, 9, 4, 8, 9]
    draft = draft_of(SuffixDrafter(max_width=3), context_of(text), Budget(max_depth=1, max_rows=9))
    assert draft.tokens == (2, 4, 3)


def test_longer_match_and_more_evidence_mean_more_confidence() -> None:
    once, twice, longer = [1, 2, 3], [1, 2, 3, 1, 2, 3], [9, 1, 2, 3]
    first = {
        name: draft_of(SuffixDrafter(), context_of(tokens)).confidence[0]
        for name, tokens in {
            "once": [*once, 7, 1, 2],
            "twice": [*twice, 7, 1, 2],
            "longer": [*longer, 7, 9, 1, 2],
        }.items()
    }
    assert first["once"] < first["longer"]
    assert first["once"] < first["twice"]


def test_extreme_token_ids_and_seeds() -> None:
    big = 2**31 - 1
    context = context_of([big, 0, big - 1, big, 0], temperature=1.0, seed=2**64 - 1)
    assert draft_of(SuffixDrafter(), context).tokens[0] == big - 1


def test_too_short_a_match_says_nothing() -> None:
    assert draft_of(SuffixDrafter(min_match=2), context_of([])) == EMPTY
    assert draft_of(SuffixDrafter(min_match=2), context_of([5])) == EMPTY
    assert draft_of(SuffixDrafter(min_match=2), context_of([1, 2, 1])) == EMPTY
    assert draft_of(SuffixDrafter(), context_of([1, 2, 1])).tokens == (2, 1)


def test_a_finished_answer_is_learned_and_neither_its_prompt_nor_an_aborted_one() -> None:
    drafter = SuffixDrafter()
    remember(drafter, [1, 2, 3, 4], prompt=[5, 6, 7])
    aborted = context_of([], sequence_id=3)
    aborted.tokens.extend([11, 12, 13])
    drafter.stop(aborted, finished=False)
    assert draft_of(drafter, context_of([1, 2], sequence_id=4)).tokens == (3, 4)
    assert draft_of(drafter, context_of([5, 6], sequence_id=5)) == EMPTY
    assert draft_of(drafter, context_of([11, 12], sequence_id=6)) == EMPTY


def test_no_match_runs_across_two_answers() -> None:
    drafter = SuffixDrafter(min_match=2)
    remember(drafter, [1, 2])
    remember(drafter, [3, 4])
    assert draft_of(drafter, context_of([1, 2])) == EMPTY
    assert draft_of(drafter, context_of([2, 3], sequence_id=1)) == EMPTY


def test_tenants_never_see_each_other() -> None:
    drafter = SuffixDrafter()
    remember(drafter, [1, 2, 3], tenant="a")
    assert draft_of(drafter, context_of([1, 2], tenant="b")) == EMPTY
    assert draft_of(drafter, context_of([1, 2], tenant="a", sequence_id=1)).tokens == (3,)


def test_a_running_sequence_sees_what_is_learned_beside_it() -> None:
    drafter = SuffixDrafter()
    remember(drafter, [1, 2, 9])
    context = context_of([7, 8, 1, 2])
    assert draft_of(drafter, context).tokens == (9,)
    remember(drafter, [7, 8, 1, 2, 5])  # a longer match than its cursor could know
    assert draft_of(drafter, context).tokens == (5,)
    context.tokens.append(5)
    remember(drafter, [1, 2, 5, 6])  # splits the state on which the cursor stands
    assert draft_of(drafter, context).tokens == (6,)


def test_history_is_bounded_and_the_oldest_goes_first() -> None:
    drafter = SuffixDrafter(generation_tokens=100, max_generations=3)
    for i in range(50):
        remember(drafter, [1000 * i + j for j in range(40)])
        generations = list(drafter.history.generations("t"))
        assert len(generations) <= 3
        assert all(generation.automaton.num_tokens <= 100 for generation in generations)
        assert sum(generation.automaton.num_bytes for generation in generations) <= 3 * (128 * 120 + 100)
    # Two answers fit a generation, so of fifty the last six are remembered.
    known = [i for i in range(50) if len(draft_of(drafter, context_of([1000 * i, 1000 * i + 1], sequence_id=i)))]
    assert known == [44, 45, 46, 47, 48, 49]


def test_of_an_answer_too_long_for_a_generation_the_end_is_kept() -> None:
    drafter = SuffixDrafter(generation_tokens=10)
    remember(drafter, list(range(100)))
    assert [generation.automaton.num_tokens for generation in drafter.history.generations("t")] == [10]
    assert draft_of(drafter, context_of([94, 95])).tokens[0] == 96
    assert draft_of(drafter, context_of([44, 45], sequence_id=1)) == EMPTY


def test_the_least_recently_used_tenant_goes_first() -> None:
    drafter = SuffixDrafter(max_tenants=2)
    remember(drafter, [1, 2, 3], tenant="a")
    remember(drafter, [1, 2, 4], tenant="b")
    draft_of(drafter, context_of([5], tenant="a"))
    remember(drafter, [1, 2, 5], tenant="c")
    assert len(drafter.history) == 2
    first = [draft_of(drafter, context_of([1, 2], tenant=t, sequence_id=9 + i)).tokens for i, t in enumerate("abc")]
    assert first == [(3,), (), (5,)]


def test_stop_forgets_the_sequence() -> None:
    drafter = SuffixDrafter()
    context = context_of([1, 2, 3, 1, 2])
    assert draft_of(drafter, context).tokens[0] == 3
    drafter.stop(context, finished=False)
    assert not drafter._sequences
    assert draft_of(drafter, context_of([1, 2])) == EMPTY


@pytest.mark.parametrize(
    "limits", [{"min_match": 0}, {"min_match": 3, "max_match": 2}, {"min_survival": 0.0}, {"max_generations": 0}]
)
def test_refuses_limits_that_make_no_sense(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="suffix"):
        SuffixDrafter(**limits)


def phrases(num_tokens: int, seed: int) -> Text:
    """Text that repeats itself like real text: phrases of a small stock, some common, with fresh words between."""
    dice = random.Random(seed)
    stock = [[dice.randrange(5000) for _ in range(dice.randrange(3, 12))] for _ in range(300)]
    text: Text = []
    while len(text) < num_tokens:
        text += stock[min(dice.randrange(300), dice.randrange(300))] + [dice.randrange(50000)]
    return text[:num_tokens]


def median_s(drafter: SuffixDrafter, text: Text, *, temperature: float) -> float:
    """Median time of a proposal while the context grows from 8192 tokens on, one to three tokens at a time."""
    context = context_of(text[:8192], temperature=temperature)
    drafter.start(context)
    times_s: list[float] = []
    while len(context.tokens) < len(text):
        context.tokens.extend(text[len(context.tokens) :][: 1 + len(times_s) % 3])
        begin = time.perf_counter()
        draft_of(drafter, context, Budget(max_depth=8, max_rows=32))
        times_s.append(time.perf_counter() - begin)
    drafter.stop(context, finished=False)
    return statistics.median(times_s)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_proposal_takes_under_100_microseconds_at_8k_context(temperature: float) -> None:
    drafter = SuffixDrafter(generation_tokens=8192)
    for part in range(4):
        remember(drafter, phrases(8192, seed=part))
    hostile = [token for i in range(4300) for token in (0, 0, i + 1)]  # thousands of followers of one match
    for text in (phrases(8800, seed=0), [5] * 8800, [1, 2] * 4400, hostile[:8800]):
        assert median_s(drafter, text, temperature=temperature) < 100e-6

"""A draft model's state is lengths: whatever happened before, it drafts as if it had just read the text."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.engines import FixedCost, new_engine, run_alone, steps, tiny_target

from understudy.assembly import DraftModel, Target, with_draft
from understudy.core.draft import EMPTY, Draft
from understudy.core.events import Event, Fallback
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context
from understudy.drafters.model import ModelDrafter, guess
from understudy.runtime.runner import Runner
from understudy.sampling.noise import NoiseKey, gumbel
from understudy.sampling.processors import Sampler

BUDGET = Budget(5, 32)


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny target that drafts for itself: with all of its layers, so that it is always right."""
    llama = tiny_target("llama")
    draft = with_draft(llama, "layers:1").draft
    assert draft is not None
    return replace(llama, draft=DraftModel(llama.decoder, draft.vocabulary, "itself", 0))


@pytest.fixture(scope="module")
def poor(target: Target) -> Target:
    """The same with its first layer alone, which is wrong more often than not."""
    return with_draft(target, "layers:1")


def drafter_of(target: Target, *, num_blocks: int = 64) -> ModelDrafter:
    assert target.draft is not None
    runner = Runner(target.draft.decoder, num_blocks=num_blocks, page_tokens=target.page_tokens)
    return ModelDrafter(runner, target.draft.vocabulary, cost=FixedCost({1: 0.001}))


def context_of(
    tokens: list[int], *, sequence_id: int = 1, temperature: float = 0.0, tenant: str = "", seed: int = 3
) -> Context:
    sampling = SamplingParams(temperature=temperature)
    return Context(sequence_id, tokens, len(tokens), tenant, temperature, NoiseKey(seed), sampling)


def propose(drafter: ModelDrafter, context: Context, budget: Budget = BUDGET) -> Draft:
    return drafter.propose([context], [budget])[0]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draft_of_the_target_itself_is_always_right(target: Target, temperature: float) -> None:
    events: list[Event] = []
    engine = new_engine(target, drafters=[drafter_of(target)], emit=events.append)
    sampling = SamplingParams(temperature=temperature, max_tokens=60, seed=5, ignore_eos=True)
    request = Request(
        request_id="r", prompt_ids=tuple(some_tokens(40)), sampling=sampling, speculation=Speculation(forced=True)
    )
    (plain,) = run_alone(new_engine(target), request)
    (sequence,) = engine.submit(request)
    for _ in steps(engine):
        pass
    assert sequence.tokens[40:] == plain.token_ids
    assert sequence.counts.rejected <= (0 if temperature == 0.0 else 6)  # the race leaves unlikely tokens out
    assert sequence.counts.accepted >= 45
    assert not [event for event in events if isinstance(event, Fallback)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_came_before_it_drafts_like_one_that_just_read_the_text(poor: Target, seed: int) -> None:
    """Guesses accepted in part, words of the target's own, pauses: the live drafter equals a fresh one, bit for bit."""
    rng = random.Random(seed)
    temperature = rng.choice((0.0, 1.0))
    live = drafter_of(poor)
    context = context_of(some_tokens(rng.choice((1, 5, 31, 32, 33, 70)), seed), temperature=temperature)
    for _ in range(25):
        draft = propose(live, context, Budget(rng.choice((1, 3, 7)), 32))
        fresh = propose(drafter_of(poor), context, Budget(len(draft), 32))
        assert draft == fresh
        accepted = draft.tokens[: rng.randint(0, len(draft))]
        context.tokens.extend([*accepted, *some_tokens(rng.choice((1, 1, 1, 4)), rng.getrandbits(30))])


def test_only_what_was_not_read_is_read(target: Target) -> None:
    drafter = drafter_of(target)
    context = context_of(some_tokens(50))
    assert drafter.num_unread(context) == 50
    draft = propose(drafter, context)
    context.tokens.extend([*draft.tokens[:2], (draft.tokens[2] + 1) % 300])
    assert drafter.num_unread(context) == 1
    rows: list[int] = []
    forward = drafter._runner.forward

    def counted(works: Any) -> Any:
        rows.append(sum(len(work.known) for work in works))
        return forward(works)

    drafter._runner.forward = counted  # type: ignore[method-assign]
    propose(drafter, context, Budget(3, 32))
    assert rows == [1, 1, 1]


def test_long_text_is_read_in_pieces_and_then_drafted_for(target: Target) -> None:
    drafter = drafter_of(target)
    context, short = context_of(some_tokens(400)), context_of(some_tokens(10, 1), sequence_id=2)
    drafts = drafter.propose([context, short], [BUDGET] * 2)
    assert drafts[0] == EMPTY
    assert drafter.num_unread(context) == 144
    drafts = drafter.propose([context, short], [BUDGET] * 2)
    assert [len(draft) for draft in drafts] == [5, 5]
    assert drafts[1] == propose(drafter_of(target), short)


def test_texts_that_begin_alike_share_what_was_read_within_a_tenant(target: Target) -> None:
    drafter = drafter_of(target)
    tokens = some_tokens(100)
    propose(drafter, context_of(list(tokens)))
    for sequence_id, tenant, read in ((2, "", 96), (3, "other", 0)):
        context = context_of(list(tokens), sequence_id=sequence_id, tenant=tenant)
        text = drafter._caught_up(context)
        assert text.cache.length == read


def test_guesses_are_never_shared(poor: Target) -> None:
    """Thirty-two guesses fill a block; only words that were said may be found by another text."""
    drafter = drafter_of(poor)
    context = context_of(some_tokens(31))
    draft = propose(drafter, context, Budget(40, 64))
    assert len(draft) == 40
    twin = context_of([*context.tokens, *draft.tokens], sequence_id=2)
    assert drafter._caught_up(twin).cache.length == 0


def test_room_is_taken_from_texts_that_wait_and_given_back_in_the_end(target: Target) -> None:
    drafter = drafter_of(target, num_blocks=4)
    contexts = [context_of(some_tokens(60, seed), sequence_id=seed, tenant=str(seed)) for seed in range(5)]
    for context in [*contexts, *contexts]:
        draft = propose(drafter, context)
        assert draft == propose(drafter_of(target), context)
    assert drafter.num_unread(contexts[4]) == 1
    assert drafter.num_unread(contexts[0]) == 60, "its room was taken: all of it is to be read again"
    both = drafter.propose(contexts[:2], [BUDGET] * 2)
    assert [len(draft) > 0 for draft in both] == [True, True]
    crowd = drafter.propose(contexts, [BUDGET] * 5)  # ten blocks are wanted: some go without
    assert 1 <= sum(len(draft) > 0 for draft in crowd) <= 2
    for context in contexts:
        drafter.stop(context, finished=True)
        drafter.stop(context, finished=True)
    drafter._pool.check([drafter._prefix.blocks()])
    assert drafter._pool.num_available == 4


def test_beyond_its_own_context_it_says_nothing(target: Target) -> None:
    longest = target.decoder.config.max_positions
    drafter = drafter_of(target)
    context = context_of(some_tokens(longest - 3))
    for _ in range(longest // 256):
        draft = propose(drafter, context, Budget(16, 32))
    assert 1 <= len(draft) <= 4
    context.tokens.extend(some_tokens(10))
    assert propose(drafter, context) == EMPTY


def test_goes_on_only_while_it_is_told_to(target: Target) -> None:
    drafter = drafter_of(target)
    seen: list[int] = []

    def goes_on(draft: Draft) -> bool:
        seen.append(len(draft))
        return len(draft) < 3

    assert len(propose(drafter, context_of(some_tokens(5)), Budget(16, 32, goes_on))) == 3
    assert seen == [1, 2, 3]
    assert len(propose(drafter, context_of(some_tokens(5)), Budget(16, 2))) == 2


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"temperature": 0.3}, {"temperature": 1e-9}]
)
def test_guess_on_the_targets_own_logits_is_its_word(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    ids = np.arange(1000, dtype=np.int64)
    agreed = 0
    for position in range(300):
        logits = rng.normal(0, 3, 1000).astype(np.float32)
        key = NoiseKey(7, 1)
        context = Context(1, [1], 1, "", sampling.temperature, key, sampling)
        place, sureness = guess(logits.copy(), ids, context, position=position)
        sampler = Sampler(sampling, key, prompt_ids=(), end_ids=(), vocab_size=1000)
        agreed += place == sampler.sample(logits.copy(), position=position, num_generated=0)
        assert 0.0 <= sureness <= 1.0
    assert agreed >= 297


def test_sureness_is_the_probability_or_the_lead_in_the_race() -> None:
    logits = np.log(np.array([0.2, 0.7, 0.1], np.float32))
    ids = np.array([4, 5, 6])
    place, sureness = guess(logits, ids, context_of([1]), position=1)
    assert (place, sureness) == (1, pytest.approx(0.7))
    context = context_of([1], temperature=1.0)
    place, sureness = guess(logits, ids, context, position=1)
    totals = np.sort(logits - logits.max() + gumbel(context.noise, 1, ids))
    assert sureness == pytest.approx(1.0 - np.exp(totals[-2] - totals[-1]))

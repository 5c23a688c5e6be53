"""Predicted outputs: followed while they hold, found again behind what was replaced, left out or put in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.engine.engines import new_engine, run_alone, tiny_target

from understudy.assembly import built_in_drafters
from understudy.core.draft import EMPTY, Draft
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context
from understudy.drafters.prediction import PredictionDrafter
from understudy.errors import InvalidRequest
from understudy.sampling.noise import NoiseKey

PROMPT = [90, 91, 92]


def context_of(prediction: list[int], said: list[int]) -> Context:
    return Context(
        0,
        [*PROMPT, *said],
        len(PROMPT),
        tenant="",
        temperature=0.0,
        noise=NoiseKey(0),
        prediction_ids=tuple(prediction),
    )


def draft_of(drafter: PredictionDrafter, context: Context, reach: int = 4) -> Draft:
    (draft,) = drafter.propose([context], [Budget(reach, 8)])
    return draft


@pytest.mark.parametrize(
    ("prediction", "said", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], [], (1, 2, 3, 4)),
        ([1, 2, 3, 4, 5, 6], [1, 2], (3, 4, 5, 6)),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], ()),
        ([1, 2, 3, 4, 5, 6], [9], ()),
        ([1, 2, 3, 4, 5, 6], [1, 9], ()),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3], ()),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4], (5, 6)),
        ([1, 2, 3, 4, 5, 6], [1, 8, 9, 2, 3], (4, 5, 6)),
        ([1, 2, 3, 4, 5, 6], [1, 5, 6], ()),
        ([7, 8, 1, 7, 8, 2, 7, 8, 3], [7, 8, 1, 9, 7, 8], (2, 7, 8, 3)),
        ([5, 7, 8, 1, 6, 7, 8, 2], [9, 6, 7, 8], (2,)),
        ([1, 7, 8, 2, 3, 4], [1, 7, 8, 2, 9, 7, 8], (2, 3, 4)),
        ([1], [1], ()),
        ([1], [2, 3], ()),
    ],
    ids=["begins", "goes on", "ends", "never held", "left", "one agrees", "replaced", "put in", "at its end",
         "ahead first", "longest", "behind if nowhere else", "short", "short and wrong"],
)  # fmt: skip
def test_where_it_goes_on(prediction: list[int], said: list[int], expected: tuple[int, ...]) -> None:
    assert draft_of(PredictionDrafter(), context_of(prediction, said)).tokens == expected


def test_is_the_same_however_the_words_arrive() -> None:
    rng = random.Random(1)
    for _ in range(200):
        prediction = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        answer = [rng.choice((token, token, token, rng.randrange(4))) for token in prediction for _ in range(1)]
        step_by_step, context = PredictionDrafter(), context_of(prediction, [])
        for token in answer:
            context.tokens.append(token)
            draft = draft_of(step_by_step, context)
            if draft.tokens:  # it goes on with what stands somewhere in the prediction
                text = ",".join(map(str, prediction))
                assert ",".join(map(str, draft.tokens)) in text
        again = draft_of(step_by_step, context)
        assert again == draft, "asking twice is no news"


def test_is_surer_the_longer_it_holds_after_it_was_found_again() -> None:
    drafter, context = PredictionDrafter(), context_of(list(range(40)), [])
    assert draft_of(drafter, context).confidence[0] == 0.9
    context.tokens += [0, 1, 50, 3, 4]
    found = draft_of(drafter, context).confidence[0]
    context.tokens += [5, 6, 7, 8]
    later = draft_of(drafter, context).confidence[0]
    assert 0.3 < found < later < 0.9


def test_has_nothing_to_say_without_a_prediction_and_forgets() -> None:
    drafter, plain = PredictionDrafter(), context_of([], [1])
    assert not drafter.concerns(plain)
    assert draft_of(drafter, plain) == EMPTY
    context = context_of([1, 2], [])
    assert drafter.concerns(context)
    drafter.start(context)
    drafter.stop(context, finished=True)
    assert not drafter._readings


def test_a_pair_that_is_everywhere_costs_little() -> None:
    drafter = PredictionDrafter()
    context = context_of([1] * 20_000, [2, 1, 1, 1])
    assert draft_of(drafter, context).tokens == (1, 1, 1, 1)


def test_choices_search_one_index_which_is_made_when_it_is_needed_and_forgotten_with_the_last() -> None:
    drafter, first = PredictionDrafter(), context_of([*range(9)], [])
    second = replace(first, sequence_id=1, tokens=[*PROMPT])
    for context in (first, second):
        drafter.start(context)
        context.tokens.extend((0, 1))
        assert draft_of(drafter, context).tokens == (2, 3, 4, 5)
    ((_, pairs),) = drafter._pairs.items()
    assert "places" not in vars(pairs), "the answers have not left the prediction"
    for context in (first, second):
        context.tokens.extend((50, 5, 6))
        assert draft_of(drafter, context).tokens == (7, 8)
    assert "places" in vars(pairs)
    del pairs
    drafter.stop(first, finished=True)
    assert len(drafter._pairs) == 1
    drafter.stop(second, finished=True)
    assert not drafter._pairs


def test_of_a_huge_prediction_the_beginning_is_searched() -> None:
    prediction = [*range(1_000), *[0] * (1 << 17), 7_000, 7_001, 7_002]
    assert draft_of(PredictionDrafter(), context_of(prediction, [5_000, 8, 9])).tokens == (10, 11, 12, 13)
    assert draft_of(PredictionDrafter(), context_of(prediction, [5_000, 7_000, 7_001])) == EMPTY


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_prediction_saves_cycles_and_no_prediction_changes_a_word(temperature: float) -> None:
    target = tiny_target("llama")
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=30, ignore_eos=True)
    plain = run_alone(new_engine(target), Request(request_id="r", prompt_ids=(7, 8), sampling=sampling))[0]
    right = tuple(plain.token_ids)
    edited = (*right[:10], 33, *right[12:])
    for prediction, least, most in ((right, 1, 8), (edited, 2, 20), ((5, 6) * 20, 20, 30)):
        engine = new_engine(target, drafters=built_in_drafters())
        request = Request(
            request_id="r",
            prompt_ids=(7, 8),
            sampling=sampling,
            speculation=Speculation(drafter="prediction"),
            prediction_ids=prediction,
        )
        (sequence,) = engine.submit(request)
        while engine.has_work:
            engine.step()
        assert tuple(sequence.tokens[2:]) == right
        assert least <= sequence.counts.cycles <= most
        assert set(sequence.counts.rows_by_drafter) <= {"prediction"}


def test_tokens_that_do_not_exist_are_refused() -> None:
    engine = new_engine(tiny_target("llama"))
    with pytest.raises(InvalidRequest, match="Token 999 does not exist"):
        engine.submit(Request(request_id="r", prompt_ids=(7,), prediction_ids=(1, 999)))

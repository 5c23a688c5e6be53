"""A drafter that costs time is asked where that is expected to pay, as far as it pays, and otherwise now and then."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.control.cost import CostModel, Load
from understudy.control.planning import MOST_DEPTH, Allowance, AnswerLengths, Plan, Prospect, Worth, asking_s, plan

TARGET = CostModel({1: 0.060, 8: 0.066, 32: 0.120})
DRAFT = CostModel({1: 0.010, 8: 0.011, 32: 0.030})


def prospect(
    acceptance: float, *, unread: int = 1, free: float = 0.0, left: float = 100.0, context: int = 100
) -> Prospect:
    return Prospect(context, unread, [acceptance] * MOST_DEPTH, free, left)


def make_plan(prospects: Sequence[Prospect], *, target: CostModel = TARGET, draft: CostModel = DRAFT) -> Plan:
    base = Load.of((1, entry.context) for entry in prospects)
    return plan(prospects, base, target=target, drafter=draft, num_emitting=len(prospects))


def expected_speed(acceptance: float, depth: int) -> float:
    """Tokens per second of one sequence, straight from the definition."""
    tokens = 1.0 + sum(acceptance**position for position in range(1, depth + 1))
    return tokens / (TARGET.step_s(Load(1 + depth, 100, 0)) + depth * DRAFT.step_s(Load(1, 100, 100)))


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_depth_is_the_one_of_most_tokens_per_second(acceptance: float) -> None:
    chosen = make_plan([prospect(acceptance)])
    speeds = {depth: expected_speed(acceptance, depth) for depth in range(MOST_DEPTH + 1)}
    best = max(speeds, key=lambda depth: speeds[depth])
    if speeds[best] > 1.02 * speeds[0]:
        assert (chosen.asked, chosen.depth) == ((0,), best)
        assert chosen.tokens_per_s == pytest.approx(speeds[best])
    else:
        assert chosen == Plan()


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_what_guesses_all_depths_in_one_pass_pays_for_one(acceptance: float) -> None:
    base, pass_s = Load(1, 100, 100), DRAFT.step_s(Load(1, 100, 100))
    chosen = plan(
        [prospect(acceptance)], base, target=TARGET, drafter=DRAFT, num_emitting=1, is_one_pass=True
    )  # fmt: skip
    speeds = {0: 1.0 / TARGET.step_s(base)}
    for depth in range(1, MOST_DEPTH + 1):
        tokens = 1.0 + sum(acceptance**position for position in range(1, depth + 1))
        speeds[depth] = tokens / (TARGET.step_s(Load(1 + depth, 100, 0)) + pass_s)
    best = max(speeds, key=lambda depth: speeds[depth])
    if speeds[best] > 1.02 * speeds[0]:
        assert (chosen.asked, chosen.depth) == ((0,), best)
        assert chosen.tokens_per_s == pytest.approx(speeds[best])
        assert chosen.drafting_s == pytest.approx(pass_s)
    else:
        assert chosen == Plan()


def test_rivals_take_rows_beside_their_guesses() -> None:
    base, stairs = Load(1, 100, 0), CostModel({1: 0.1, 8: 0.1, 9: 0.4, 64: 0.4})
    depths = [
        plan(
            [prospect(0.9)], base, target=stairs, drafter=DRAFT, num_emitting=1, rows_per_guess=rows_per_guess
        ).depth
        for rows_per_guess in (1, 2)
    ]  # fmt: skip
    assert depths == [7, 3]  # the last that has its rows below the step


def test_poor_guesses_and_dear_drafts_are_not_asked_for() -> None:
    assert make_plan([prospect(0.1)]) == Plan()
    assert make_plan([prospect(0.9)], draft=CostModel({1: 0.2})) == Plan()
    assert make_plan([]) == Plan()


def test_what_comes_with_asking_is_weighed_too() -> None:
    base = Load(1, 100, 0)
    one, known = prospect(0.8), {"target": TARGET, "drafter": DRAFT, "num_emitting": 1}
    cheap, dear = plan([one], base, **known), plan([one], base, **known, overhead_s=0.01)
    assert dear.drafting_s == pytest.approx(dear.depth * DRAFT.step_s(Load(1, 100, 100)) + 0.01)
    assert dear.depth >= cheap.depth, "it is the same however deep the draft"
    assert dear.tokens_per_s < cheap.tokens_per_s
    assert plan([one], base, **known, overhead_s=0.2) == Plan()


def test_a_further_token_must_keep_up_with_the_expected_speed() -> None:
    chosen = make_plan([prospect(0.8)])
    pass_s = DRAFT.step_s(Load(1, 100, 100))
    assert chosen.is_worth(1.0)
    assert not chosen.is_worth(chosen.tokens_per_s * pass_s * 0.9)
    assert chosen.is_worth(chosen.tokens_per_s * (pass_s + 0.001) * 1.1)


def test_reading_a_long_text_must_pay_within_the_words_that_are_left() -> None:
    unread = 1000
    assert make_plan([prospect(0.6, unread=unread, left=1000.0)]).asked
    assert not make_plan([prospect(0.6, unread=unread, left=10.0)]).asked
    assert make_plan([prospect(0.6, unread=2, left=10.0)]).asked


def test_text_that_is_over_before_it_is_read_is_not_read() -> None:
    """A thousand tokens are read in four pieces: three words are said without a draft, whatever reading costs."""
    free_reading = CostModel({1: 0.010, 2: 0.010})
    assert not make_plan([prospect(0.9, unread=1000, left=3.0)], draft=free_reading).asked
    assert make_plan([prospect(0.9, unread=1000, left=9.0)], draft=free_reading).asked
    assert not make_plan([prospect(0.9, unread=1000, left=9.0, free=2.0)], draft=free_reading).asked


def test_text_that_is_dear_to_read_keeps_nobody_else_from_being_asked() -> None:
    assert make_plan([prospect(0.9, unread=8000, left=50.0), prospect(0.8)]).asked == (1,)
    assert make_plan([prospect(0.9, unread=8000, left=3.0), prospect(0.8)]).asked == (1,)


def test_what_comes_free_is_not_paid_for() -> None:
    assert make_plan([prospect(0.7)]).asked
    assert not make_plan([prospect(0.7, free=4.0)]).asked


def test_only_those_are_asked_for_whom_it_pays() -> None:
    draft = CostModel({1: 0.020, 2: 0.040})
    assert make_plan([prospect(0.05), prospect(0.9)], draft=draft).asked == (1,)
    assert make_plan([prospect(0.9), prospect(0.9)]).asked == (0, 1)


def test_nobody_waits_for_the_others_for_longer_than_he_can() -> None:
    """Else his ledger will have no room before long, and nothing is bought of what was drafted."""
    good, dear = prospect(0.9), prospect(0.9, unread=8000, left=50.0)
    alone = make_plan([dear, good])
    assert alone.asked == (1,)
    assert alone.load is not None
    extra_s = TARGET.step_s(alone.load) + alone.drafting_s - TARGET.step_s(Load(2, 200, 200))
    assert make_plan([replace(dear, patience_s=1.01 * extra_s), good]) == alone
    assert make_plan([replace(dear, patience_s=0.0), good]) == Plan()
    assert make_plan([dear, replace(good, patience_s=0.0)]) == alone, "what it gains is worth more than that"
    shallow = make_plan([replace(dear, patience_s=0.6 * extra_s), good])
    assert shallow.asked == (1,)
    assert 0 < shallow.depth < alone.depth


def test_whoever_is_asked_may_wait_for_what_he_gains() -> None:
    hasty = [replace(prospect(acceptance), patience_s=0.0) for acceptance in (0.9, 0.6, 0.05)]
    assert make_plan(hasty[:2]).asked == (0, 1)
    assert make_plan(hasty) == Plan(), "the last would wait for the others, asked or not"
    patient = [*hasty[:2], replace(hasty[2], patience_s=1.0)]
    assert make_plan(patient).asked == (0, 1)
    lucky = [*hasty[:2], replace(hasty[2], free_tokens=3.0)]
    assert make_plan(lucky).asked == (0, 1), "what comes free is gained as well"


def test_nor_does_anybody_wait_who_could_not_be_asked() -> None:
    base, known = Load(2, 200, 0), {"target": TARGET, "drafter": DRAFT, "num_emitting": 2}
    for patience_s, asked in [(1.0, (0,)), (0.0, ())]:
        assert plan([prospect(0.9)], base, **known, others_patience_s=patience_s).asked == asked


def survivals(acceptance: Sequence[float], depth: int) -> list[float]:
    """How likely each position is reached and right."""
    return list(itertools.accumulate(acceptance[:depth], operator.mul))


@settings(max_examples=200, deadline=None)
@given(
    acceptances=st.lists(st.lists(st.floats(0, 1), min_size=0, max_size=4), min_size=0, max_size=3),
    draft_s=st.floats(1e-4, 0.2),
    free=st.floats(0, 3),
)
def test_no_choice_is_better_than_the_one_taken(acceptances: list[list[float]], draft_s: float, free: float) -> None:
    """Against brute force over every set of sequences and every depth, but for what a set may leave on the table."""
    draft = CostModel({1: draft_s, 4: 2 * draft_s})
    prospects = [Prospect(10, 1, line, free, 50.0) for line in acceptances]
    base = Load.of((1, 10) for _ in prospects)
    chosen = plan(prospects, base, target=TARGET, drafter=draft, num_emitting=len(prospects))
    assert chosen.depth <= 4
    for count in range(1, len(prospects) + 1):
        for asked in itertools.combinations(range(len(prospects)), count):
            for depth in range(1, 5):
                added = sum(max(0.0, sum(survivals(acceptances[index], depth)) - free) for index in asked)
                seconds = TARGET.step_s(Load(base.rows + count * depth, base.keys, base.reads + 10 * count * depth))
                seconds += depth * draft.step_s(Load(count, 10 * count, 10 * count))
                speed = (len(prospects) * (1 + free) + added) / seconds
                plain = len(prospects) * (1 + free) / TARGET.step_s(base)
                assert speed <= max(chosen.tokens_per_s, 1.02 * plain) * 1.1 + 1e-9


def test_asking_costs_all_the_reading() -> None:
    assert asking_s(100, 32, DRAFT) == pytest.approx(DRAFT.step_s(Load(32, 100, 3200)))


def test_probing_takes_a_two_hundredth_of_the_time() -> None:
    allowance = Allowance()
    probes = 0
    for _ in range(10_000):
        allowance.save("model", 0.05)
        probes += allowance.spend("model", 0.1)
    assert probes == pytest.approx(10_000 * 0.05 * 0.005 / 0.1, abs=1)
    assert not allowance.spend("another", 0.001)


def test_what_was_saved_for_a_long_text_is_not_spent_on_a_row_of_short_ones() -> None:
    allowance = Allowance()
    allowance.save("model", 1000.0)
    assert not allowance.spend("model", 5.1)
    assert [allowance.spend("model", 0.1) for _ in range(5)] == [True, True, False, False, False]


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    lengths = AnswerLengths()
    assert lengths.num_left("chat", num_generated=3, num_allowed=500) == 500.0
    for _ in range(50):
        lengths.observe("chat", 40)
    assert lengths.num_left("chat", num_generated=10, num_allowed=500) == pytest.approx(30.0)
    assert lengths.num_left("chat", num_generated=39, num_allowed=500) == pytest.approx(10.0)
    assert lengths.num_left("chat", num_generated=39, num_allowed=4) == 4.0
    for number in range(100):
        lengths.observe(f"class {number}", 7)
    assert len(lengths._mean) <= 32


def without_credit(kind: str) -> Worth:
    """A balance that has spent what it began with."""
    worth = Worth()
    worth.observe(kind, saved=1e-9, spent=0.25)
    return worth


def test_the_first_asks_of_a_kind_need_not_pay() -> None:
    worth = Worth()
    count = 0
    while worth.asks("chat"):
        count += 1
        worth.observe("chat", saved=0.0, spent=0.05)
    assert 5 <= count <= 7, "a quarter of a step"


def test_asking_that_does_not_pay_is_done_every_tenth_time() -> None:
    worth = without_credit("8 sequences")
    asked = 0
    for _ in range(800):
        if worth.asks("8 sequences"):
            asked += 1
            worth.observe("8 sequences", saved=0.01, spent=0.04)
    assert 78 <= asked <= 84
    assert worth.asks("another kind")


def test_asking_that_loses_much_is_done_less_often() -> None:
    worth = Worth()
    lost = 0.0
    for _ in range(3200):
        if worth.asks("32 sequences"):
            lost += 0.1
            worth.observe("32 sequences", saved=0.0, spent=0.1)
    assert lost / 3200 < 0.0031


def test_where_nothing_was_worth_buying_for_long_less_is_spent_on_looking() -> None:
    worth = without_credit("creative")

    def asked(num_steps: int) -> int:
        count = 0
        for _ in range(num_steps):
            if worth.asks("creative"):
                count += 1
                worth.observe("creative", saved=0.0, spent=0.03)
        return count

    assert asked(80) == 8, "every tenth time"
    asked(2000)
    assert 19 <= asked(800) <= 21, "a quarter as often"
    worth.observe("creative", saved=0.1, spent=0.03)
    assert asked(100) >= 10, "one that pays is enough"


def test_kinds_that_nobody_learned_of_are_not_kept() -> None:
    worth = Worth()
    assert all(worth.asks(f"class {number}") for number in range(1000))
    assert not worth._balances


def test_asking_that_pays_again_is_taken_up_again() -> None:
    worth = Worth()

    def asked(num_steps: int, *, saved: float) -> int:
        count = 0
        for _ in range(num_steps):
            if worth.asks("chat"):
                count += 1
                worth.observe("chat", saved=saved, spent=0.02)
        return count

    assert asked(200, saved=0.0) <= 31
    assert asked(200, saved=0.2) > 170, "where nothing was worth buying for long it is asked every 27th time"
    assert asked(200, saved=0.0) <= 31 + 25, "good times pay for half a step"


def test_a_step_that_took_far_too_long_is_not_paid_for_for_ever() -> None:
    worth = Worth()
    worth.observe("chat", saved=0.0, spent=50.0)
    assert [worth.asks("chat") for _ in range(128)].count(True) in (1, 2)


def test_asking_that_takes_next_to_nothing_goes_on() -> None:
    worth = Worth()
    for _ in range(100):
        assert worth.asks("chat")
        worth.observe("chat", saved=0.0, spent=0.001)


def test_a_rest_says_how_long_it_lasts_and_steps_that_were_slept_through_count() -> None:
    worth = Worth()
    assert worth.num_resting("chat") == 0, "nothing is known of it"
    worth.observe("chat", saved=0.0, spent=0.35)
    watched = [worth.num_resting("chat") for _ in range(40)]
    first = watched[0]
    assert 30 <= first <= 34
    assert watched[: first + 1] == [*range(first, 0, -1), 0]
    worth.observe("chat", saved=0.0, spent=0.1)
    resting = worth.num_resting("chat")
    assert worth.num_resting("chat", num_slept=resting - 1) == 0

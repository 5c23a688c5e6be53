"""Drafters that cost time are asked where it pays; rows that only teach are bought where what they teach pays."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tests.engine import scripted
from tests.engine.engines import FixedCost, new_engine, run_alone, steps
from tests.engine.scripted import Book
from understudy.assembly import Target
from understudy.control.classes import MOST_CLASSES
from understudy.control.controller import PLANNING
from understudy.control.cost import CostModel
from understudy.control.planning import MOST_READ_ROWS
from understudy.core.draft import Draft
from understudy.core.events import Cycle, Event, Fallback
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Budget, Context
from understudy.drafters.lookahead import LookaheadDrafter
from understudy.engine.engine import Engine
from understudy.kernels.host_passes import HostPasses

PROMPT = (5, 6, 7, 8)
NUM_TOKENS = 220
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True)


class Paid(scripted.Right):
    """Right, or wrong with `error` probability at each token, at a price; asks before each further token."""

    name: ClassVar[str] = "paid"
    error = 0.0

    def __init__(self, book: Book, *, cost: CostModel) -> None:
        super().__init__(book, random.Random(0), 304)
        self.cost = cost
        self.depths: list[int] = []
        self.lengths: list[int] = []
        """Of the texts that it was asked for."""

    def num_unread(self, context: Context) -> int:
        return 1

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        return [self.draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def draft(self, context: Context, budget: Budget) -> Draft:
        tokens: list[int] = []
        draft = Draft()
        for token in self.book.next_tokens(context, budget.max_depth):
            wrong = self.rng.random() < self.error
            tokens.append((token + wrong) % self.vocab_size)
            draft = Draft.chain(tokens, confidence=[0.5] * len(tokens), source=self.name)
            if len(tokens) >= budget.max_depth or not budget.goes_on(draft):
                break
        self.depths.append(len(draft))
        self.lengths.append(len(context.tokens))
        return draft

    def check_only_probed(self) -> None:
        """Once somebody who is free and always right is known to be, it is asked no more than to probe."""
        known = min(self.lengths) + NUM_TOKENS // 3
        assert sum(length > known for length in self.lengths) <= NUM_TOKENS * 0.005 / 0.3 + 1


class OftenWrong(Paid):
    error = 0.6


class AlwaysWrong(Paid):
    error = 1.0


@pytest.fixture(scope="module")
def book(llama: Target) -> Book:
    book = Book()
    (answer,) = run_alone(new_engine(llama), request("plain"))
    book.write(1, 0, [*PROMPT, *answer.token_ids])
    return book


def request(name: str, *, forced: bool = False) -> Request:
    return Request(
        request_id=name, prompt_ids=PROMPT, sampling=SAMPLING, speculation=Speculation(forced=forced, max_depth=16)
    )


def play(target: Target, book: Book, drafters: Sequence[Any], **settings: Any) -> tuple[Engine, list[Event], list[int]]:
    events: list[Event] = []
    forced = settings.pop("forced", False)
    engine = new_engine(target, drafters=drafters, emit=events.append, **settings)
    (sequence,) = engine.submit(request("speculative", forced=forced))
    for _ in steps(engine):
        pass
    engine.check()
    said = sequence.tokens[len(PROMPT) :]
    assert said == book.next_tokens(Context(0, list(PROMPT), 4, "", 0.0, sequence.context.noise), NUM_TOKENS)
    return engine, events, said


STEP = FixedCost({1: 1.0, 32: 1.1})


def test_cheap_and_right_is_asked_every_time_and_drafts_deep(llama: Target, book: Book) -> None:
    drafter = Paid(book, cost=FixedCost({1: 0.05}))
    play(llama, book, [drafter], cost=STEP)
    assert len(drafter.depths) < NUM_TOKENS / 5
    assert max(drafter.depths) == 8


def test_dear_is_asked_only_to_probe(llama: Target, book: Book) -> None:
    drafter = Paid(book, cost=FixedCost({1: 1.05}))
    play(llama, book, [drafter], cost=STEP)
    assert drafter.depths == [1] * len(drafter.depths)
    assert 1 <= len(drafter.depths) <= NUM_TOKENS * 0.005 / 1.05 + 1


class AlsoPaid(Paid):
    name: ClassVar[str] = "also paid"


def test_planning_for_two_that_are_not_asked_is_owed_for_both(
    llama: Target, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it took to find out that neither need be asked is added up: a second must not hide the first."""
    drafters = [kind(book, cost=FixedCost({1: 50.0})) for kind in (Paid, AlsoPaid)]
    engine = new_engine(llama, drafters=drafters, cost=STEP)
    ticks, found = itertools.count(), []
    asking = engine._drafting._asking
    monkeypatch.setattr(asking, "_clock", lambda: float(next(ticks)))  # each look at the clock is a second later
    ask_all = asking.ask_all

    def listened(*arguments: Any, **settings: Any) -> Any:
        found.append(ask_all(*arguments, **settings))
        return found[-1]

    monkeypatch.setattr(asking, "ask_all", listened)
    engine.submit(request("speculative"))
    while not found:
        engine.step()
    assert {name: sum(seconds.values()) for name, seconds in found[0].seconds.items()} == {PLANNING: 2.0}


def test_wrong_is_soon_asked_only_to_probe(llama: Target, book: Book) -> None:
    drafter = AlwaysWrong(book, cost=FixedCost({1: 0.2}))
    play(llama, book, [drafter], cost=STEP)
    assert len(drafter.depths) < 40
    assert set(drafter.depths[12:]) <= {1}


def test_less_sure_is_drafted_less_deep(llama: Target, book: Book) -> None:
    deep, shallow = (kind(book, cost=FixedCost({1: 0.1})) for kind in (Paid, OftenWrong))
    for drafter in (deep, shallow):
        play(llama, book, [drafter], cost=STEP)
    assert sum(shallow.depths[10:]) / len(shallow.depths[10:]) < sum(deep.depths[10:]) / len(deep.depths[10:]) - 2


def test_nothing_is_paid_for_what_comes_free(llama: Target, book: Book) -> None:
    free = scripted.Right(book, random.Random(0), 304)
    drafter = Paid(book, cost=FixedCost({1: 0.3}))
    play(llama, book, [free, drafter], cost=STEP)
    drafter.check_only_probed()


def test_forced_is_asked_to_the_end_whatever_it_costs(llama: Target, book: Book) -> None:
    drafter = Paid(book, cost=FixedCost({1: 100.0}))
    play(llama, book, [drafter], cost=STEP, forced=True)
    assert max(drafter.depths) == 16
    assert len(drafter.depths) < NUM_TOKENS / 10


def test_price_that_cannot_be_told_is_a_failure_like_any_other(llama: Target, book: Book) -> None:
    class Silent(Paid):
        def num_unread(self, context: Context) -> int:
            raise RuntimeError("no idea")

    _, events, _ = play(llama, book, [Silent(book, cost=FixedCost({1: 1.5}))], cost=STEP)
    fallbacks = [event for event in events if isinstance(event, Fallback)]
    assert "no idea" in fallbacks[0].reason
    assert "switched off" in fallbacks[-1].reason


def scouted(events: Sequence[Event]) -> int:
    return sum(event.num_scout_rows > 0 for event in events if isinstance(event, Cycle))


def test_scouts_ride_along_where_rows_are_cheap_and_bring_words(llama: Target, book: Book) -> None:
    _, events, _ = play(llama, book, [LookaheadDrafter()], cost=FixedCost({1: 1.0, 64: 1.05}))
    cycles = [event for event in events if isinstance(event, Cycle)]
    assert scouted(events) > 0.9 * len(cycles)
    assert sum(cycle.num_accepted for cycle in cycles) > 10
    assert {cycle.num_scout_rows for cycle in cycles} == {0, 15}
    assert all(cycle.num_prompt_rows == 0 for cycle in cycles[1:])


def test_scouts_stay_home_where_rows_are_dear(llama: Target, book: Book) -> None:
    _, events, _ = play(llama, book, [LookaheadDrafter()], cost=FixedCost({1: 1.0, 2: 1.5, 16: 8.5}))
    assert scouted(events) <= 1


def test_scouts_that_bring_nothing_are_given_up(llama: Target, book: Book) -> None:
    class Useless(LookaheadDrafter):
        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            return [Draft()] * len(contexts)

    _, events, _ = play(llama, book, [Useless()], cost=FixedCost({1: 1.0, 16: 1.2}))
    assert 5 < scouted(events) < 60


@pytest.mark.parametrize("call", ["scout", "learn"])
def test_scouting_that_fails_changes_no_word(llama: Target, book: Book, call: str) -> None:
    class Failing(LookaheadDrafter):
        pass

    def fail(*arguments: Any, **names: Any) -> Any:
        raise RuntimeError("lost")

    setattr(Failing, call, fail)
    _, events, _ = play(llama, book, [Failing()], cost=FixedCost({1: 1.0, 64: 1.05}))
    assert any(isinstance(event, Fallback) and "lost" in event.reason for event in events)


def test_scouts_give_way_where_blocks_are_short(llama: Target, book: Book) -> None:
    """The text just fits: near the end of a block there is no room for fifteen more rows."""
    blocks = -(-(len(PROMPT) + NUM_TOKENS) // 32)
    _, events, _ = play(llama, book, [LookaheadDrafter()], forced=True, num_blocks=blocks)
    assert 0 < scouted(events) < sum(isinstance(event, Cycle) for event in events) - 1


class Reading(Paid):
    """Reads its text in pieces of 256 rows before its first guess; a prompt of 4 tokens counts as one of 600."""

    def __init__(self, book: Book, *, cost: CostModel) -> None:
        super().__init__(book, cost=cost)
        self.num_read = 0

    def num_unread(self, context: Context) -> int:
        return max(1, 600 - self.num_read)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        if self.num_read < 600:
            self.num_read += 256
        return [Draft()] if self.num_read < 600 else super().propose(contexts, budgets)


def test_probe_of_a_long_text_is_paid_for_once_and_read_to_its_end(llama: Target, book: Book) -> None:
    """Reading takes 0.95 steps: saved up after 190 of the 220, which leaves nothing for a second payment."""
    drafter = Reading(book, cost=FixedCost({1: 0.1, 601: 0.95}))
    drafter.error = 1.0
    engine = new_engine(llama, drafters=[drafter], cost=STEP)
    for _ in range(300):  # known to be of no use
        engine._drafting.stats.observe("other", Draft.chain([1], confidence=[0.5], source="paid"), [0])
    engine.submit(request("one"))
    for _ in steps(engine):
        pass
    assert drafter.num_read == 768
    assert drafter.depths, "it came to a guess"


def test_long_reading_does_not_make_rows_look_cheap(llama: Target, book: Book) -> None:
    class Slow(Reading):
        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
            time.sleep(0.05)
            return [Draft()] * len(contexts)

        def num_unread(self, context: Context) -> int:
            return 1

    class Doubtful(scripted.Wrong):
        def draft(self, context: Context, budget: Budget) -> Draft:
            return Draft.chain([1], confidence=[0.5], source=self.name)

    free = Doubtful(book, random.Random(0), 304)
    drafter = Slow(book, cost=FixedCost({1: 1e-5}))
    engine = new_engine(llama, drafters=[free, drafter], cost=FixedCost({1: 0.01, 2: 0.02}))
    (sequence,) = engine.submit(request("one"))
    for _ in range(6):
        engine.step()
    assert sequence.counts.rows == 0


class Reader(Paid):
    """Reads some rows of all texts in a step, one text after the other, and guesses where it has read to the end."""

    def __init__(self, book: Book, *, cost: CostModel) -> None:
        super().__init__(book, cost=cost)
        self.unread: dict[int, int] = {}
        self.reading: list[tuple[int, int]] = []
        """By step, the rows that were unread before it, and the deepest draft that was allowed."""

    def num_unread(self, context: Context) -> int:
        return self.unread.setdefault(context.sequence_id, 150)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        unread = [self.num_unread(context) for context in contexts]
        self.reading.append((sum(unread), max(budget.max_depth for budget in budgets)))
        room = MOST_READ_ROWS
        for context, rows in zip(contexts, unread, strict=True):
            read = min(rows - 1, room)
            self.unread[context.sequence_id] -= read
            room -= read
        return [
            self.draft(context, budget) if self.unread[context.sequence_id] == 1 else Draft()
            for context, budget in zip(contexts, budgets, strict=True)
        ]


def test_while_many_texts_are_read_nobody_pays_passes_for_the_few_who_are_read_up(llama: Target, book: Book) -> None:
    drafter = Reader(book, cost=FixedCost({1: 0.05, 64: 0.06}))
    engine = new_engine(llama, drafters=[drafter], cost=FixedCost({1: 1.0, 64: 1.1}), max_sequences=8)
    for number in range(8):
        engine.submit(request(f"text {number}"))
    for _ in steps(engine):
        pass
    catching_up = [depth for rows, depth in drafter.reading if rows > MOST_READ_ROWS]
    assert 3 <= len(catching_up) <= 6, "once it is begun it is done, in steps that follow each other"
    assert set(catching_up) == {1}
    assert max(depth for rows, depth in drafter.reading if rows <= MOST_READ_ROWS) > 1


def test_what_was_paid_for_is_not_crowded_out_by_poor_guesses_that_came_free(llama: Target, book: Book) -> None:
    class Crowd(scripted.Scripted):
        def draft(self, context: Context, budget: Budget) -> Draft:
            count = budget.max_rows
            (right, *_) = [*self.book.next_tokens(context, 1), 0]
            return Draft(tuple((right + 1 + i) % 304 for i in range(count)), (-1,) * count, (0.01,) * count,
                         (self.name,) * count)  # fmt: skip

    crowd, drafter = Crowd(book, random.Random(0), 304), Paid(book, cost=FixedCost({1: 0.01}))
    _, events, _ = play(llama, book, [crowd, drafter], cost=STEP)
    assert sum(event.num_accepted for event in events if isinstance(event, Cycle)) > NUM_TOKENS / 2


def test_free_drafts_that_never_pay_are_soon_asked_for_seldom(llama: Target, book: Book) -> None:
    """Beside a drafter that costs time, too: what it took to find that no row pays is weighed in either case."""
    now_s = 0.0

    class Talker(scripted.Wrong):
        num_asked = 0

        def draft(self, context: Context, budget: Budget) -> Draft:
            nonlocal now_s
            now_s += 0.05
            self.num_asked += 1
            return super().draft(context, budget)

    talker, dear = Talker(book, random.Random(0), 304), Paid(book, cost=FixedCost({1: 1.5}))
    rows_are_dear = FixedCost({1: 1.0, 2: 2.0, 32: 32.0})
    _, events, _ = play(llama, book, [talker, dear], cost=rows_are_dear, clock=lambda: now_s)
    reasons = [event.reason for event in events if isinstance(event, Cycle)]
    assert sum(reason.startswith("asking does not pay") for reason in reasons) > NUM_TOKENS / 2
    assert 1 < talker.num_asked < NUM_TOKENS / 4


@pytest.mark.parametrize("control_share", [0.0, 1e-9])
def test_a_rest_is_slept_through_until_a_text_comes_that_insists(
    llama: Target, book: Book, control_share: float
) -> None:
    """Nothing of such steps is written down, but a control group counts them; who insists is drafted for at once."""
    now_s = 0.0

    class Talker(scripted.Wrong):
        def draft(self, context: Context, budget: Budget) -> Draft:
            nonlocal now_s
            now_s += 0.05
            return super().draft(context, budget)

    events: list[Event] = []
    talker = Talker(book, random.Random(0), 304)
    dear = FixedCost({1: 1.0, 2: 2.0, 32: 32.0})
    engine = new_engine(
        llama, drafters=[talker], cost=dear, emit=events.append, clock=lambda: now_s, control_share=control_share
    )
    engine.submit(request("one"))
    num_asleep = 0
    for _ in range(60):
        engine.step()
        num_asleep += engine._drafting.is_asleep
    num_settled = engine.explain().num_steps
    assert num_asleep > 20
    assert num_settled + num_asleep <= 60
    episode = engine._drafting.controller.switchback._episode
    assert (episode.num_steps if episode else 0) == (num_settled + num_asleep - 1 if control_share else 0)
    while not engine._drafting.is_asleep:
        engine.step()
    engine.submit(request("two", forced=True))
    events.clear()
    for _ in range(3):
        engine.step()
        assert not engine._drafting.is_asleep
    assert any("forced" in event.reason for event in events if isinstance(event, Cycle))


def test_free_drafters_are_asked_before_those_that_cost(llama: Target, book: Book) -> None:
    drafter = Paid(book, cost=FixedCost({1: 0.3}))
    play(llama, book, [drafter, scripted.Right(book, random.Random(0), 304)], cost=STEP)
    drafter.check_only_probed()


def test_price_that_is_none_is_a_failure_like_any_other(llama: Target, book: Book) -> None:
    drafter = Paid(book, cost=FixedCost({1: 1.5}))
    drafter.cost = "cheap"  # type: ignore[assignment]
    engine, events, _ = play(llama, book, [drafter], cost=STEP)
    assert "switched off" in [event for event in events if isinstance(event, Fallback)][-1].reason
    assert engine._drafting._asking.active == []


CHEAP = FixedCost({1: 1.0, 64: 1.05})
NOT_SCOUTS = {
    "no draft": 7,
    "too many": Draft.chain([1] * 99, confidence=[0.5] * 99, source="x"),
    "no such token": Draft.chain([1, 304], confidence=[0.5] * 2, source="x"),
    "negative token": Draft.chain([1, -1], confidence=[0.5] * 2, source="x"),
    "no tree": Draft((1, 2), (1, -1), (0.5,) * 2, ("x",) * 2),
    "text": Draft(("a",), (-1,), (0.5,), ("x",)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("answer", NOT_SCOUTS.values(), ids=NOT_SCOUTS.keys())
def test_scouts_that_cannot_be_computed_are_a_failure_and_change_no_word(
    llama: Target, book: Book, answer: object
) -> None:
    class Hostile(LookaheadDrafter):
        def scout(self, context: Context) -> Any:
            return answer

    _, events, _ = play(llama, book, [Hostile()], cost=CHEAP)
    assert scouted(events) == 0
    assert any("scout() must" in event.reason for event in events if isinstance(event, Fallback))


def test_number_of_scouts_that_cannot_be_told_changes_no_word(llama: Target, book: Book) -> None:
    class Silent(LookaheadDrafter):
        @property
        def num_scouts(self) -> int:
            raise RuntimeError("no idea")

    _, events, _ = play(llama, book, [Silent()], cost=CHEAP)
    assert any(isinstance(event, Fallback) and "no idea" in event.reason for event in events)


def test_no_row_stands_beyond_the_context(llama: Target) -> None:
    """Not even one that only teaches: there are no rotary angles for it."""
    engine = new_engine(llama, drafters=[LookaheadDrafter()])
    positions: list[int] = []
    passes = engine._runner._passes

    def watched(rows: Any) -> Any:
        positions.append(int(rows.positions.max()))
        return passes.launch(rows, []).found

    engine._runner._passes = HostPasses(watched)
    sampling = SamplingParams(temperature=1.0, max_tokens=10_000, seed=1, ignore_eos=True)
    prompt = tuple(range(3, 3 + engine.max_context - 30 - 300)) + tuple(range(3, 303))
    engine.submit(Request(request_id="r", prompt_ids=prompt, sampling=sampling, speculation=Speculation(forced=True)))
    for _ in steps(engine):
        pass
    assert max(positions) == engine.max_context - 2, "the last word is said and never computed"


@pytest.mark.parametrize("limits", [{"max_rows": 14}, {"max_depth": 0}, {"enabled": False}])
def test_scouts_ride_only_where_the_request_allows_their_rows(llama: Target, limits: dict[str, Any]) -> None:
    events: list[Event] = []
    engine = new_engine(llama, drafters=[LookaheadDrafter()], cost=CHEAP, emit=events.append)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, seed=1, ignore_eos=True)
    for name, speculation in (("limited", Speculation(**limits)), ("free", Speculation())):
        engine.submit(Request(request_id=name, prompt_ids=PROMPT, sampling=sampling, speculation=speculation))
    for _ in steps(engine):
        pass
    assert {event.num_scout_rows for event in events if isinstance(event, Cycle)} == {0, 15}


def test_yield_is_learned_only_where_scouts_rode_along(llama: Target) -> None:
    """Beside a prompt nobody drafts: that says nothing of what scouting brings."""
    engine = new_engine(llama, drafters=[LookaheadDrafter()], cost=CHEAP)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, seed=1, ignore_eos=True)
    engine.submit(Request(request_id="first", prompt_ids=PROMPT, sampling=sampling))
    for _ in range(3):
        engine.step()
    engine.explain()  # else the last step is told of when the next one begins
    before = dict(engine._drafting._scouting._yields)
    assert before
    engine.submit(Request(request_id="second", prompt_ids=PROMPT, sampling=sampling))
    engine.step()
    engine.explain()
    assert engine._drafting._scouting._yields == before


def test_classes_without_end_take_no_memory_without_end(llama: Target) -> None:
    engine = new_engine(llama, drafters=[LookaheadDrafter()], cost=CHEAP)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, seed=1, ignore_eos=True)
    for number in range(50):
        request = Request(request_id="r", prompt_ids=PROMPT, sampling=sampling, workload_class=f"class {number}")
        run_alone(engine, request)
    assert len(engine._drafting._scouting._yields) <= MOST_CLASSES
    assert engine._drafting._scouting._yields["other"] != 0.5, "those beyond are learned of together"


def test_word_after_a_scout_is_the_targets_at_its_position(llama: Target) -> None:
    """Rows along the right path, beside a draft: what is learned after them is what the dice will say there."""

    class Oracle(scripted.Mixed):
        num_scouts = 3

        def scout(self, context: Context) -> Draft:
            *path, word = self.book.next_tokens(context, 4)
            self.expected = word
            return Draft.chain(path, confidence=[0.5] * 3, source=self.name)

        def learn(self, context: Context, words: Sequence[int]) -> None:
            learned.append((words[0], self.expected))

    learned: list[tuple[int, int]] = []
    sampling = SamplingParams(temperature=1.0, max_tokens=60, seed=1, ignore_eos=True)
    asked = Request(request_id="r", prompt_ids=PROMPT, sampling=sampling, speculation=Speculation(forced=True))
    (answer,) = run_alone(new_engine(llama), asked)
    book = Book()
    book.write(1, 0, [*PROMPT, *answer.token_ids])
    events: list[Event] = []
    run_alone(new_engine(llama, drafters=[Oracle(book, random.Random(0), 304)], emit=events.append), asked)
    assert any(cycle.num_draft_rows and cycle.num_scout_rows for cycle in events if isinstance(cycle, Cycle))
    assert len(learned) > 5
    assert [word for word, _ in learned] == [expected for _, expected in learned]


def test_words_that_came_free_in_one_step_keep_nobody_from_being_asked_in_the_next(llama: Target, book: Book) -> None:
    class Now(scripted.Right):
        """Offers four right words in every sixth step, and nothing else."""

        name: ClassVar[str] = "now"
        num_calls = 0

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            self.num_calls += 1
            return super().propose(contexts, budgets) if self.num_calls % 6 == 0 else [Draft()] * len(contexts)

    drafter = Paid(book, cost=FixedCost({1: 0.55}))
    _, events, _ = play(llama, book, [Now(book, random.Random(0), 304), drafter], cost=STEP)
    steps = [event for event in events if isinstance(event, Cycle) and not event.num_prompt_rows]
    plain = [event for event in steps if not event.num_draft_rows]
    assert len(plain) < len(steps) / 4, "a plan of one such step held for eight"

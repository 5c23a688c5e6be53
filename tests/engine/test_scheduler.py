"""Who computes what: one budget, arrival order, the youngest gives way, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.engine.engines import new_engine, steps
from tests.engine.scripted import Book, RandomTrees
from understudy.assembly import Target
from understudy.core.events import Event, Preempted
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.engine.scheduler import Scheduler, Share
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import PrefixCache
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work

PAGE = 4


@dataclass(eq=False)
class Actor:
    """As much of a sequence as a scheduler sees."""

    name: str
    tokens: list[int]
    cache: SequenceCache
    answer_tokens: int
    num_preemptions: int = 0
    cached_tokens: int = 0
    finished_at: int | None = None
    scores_prompt: bool = False

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cache.length


@dataclass
class Stage:
    """A scheduler, and an engine that computes nothing: planned rows are committed, words are made up."""

    num_blocks: int = 64
    max_rows: int = 16
    max_sequences: int = 8
    prefix_cache: bool = False
    preempted: list[str] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.prefix = PrefixCache(self.pool, PAGE) if self.prefix_cache else None
        self.scheduler = Scheduler(
            self.pool,
            page_tokens=PAGE,
            max_rows=self.max_rows,
            max_sequences=self.max_sequences,
            on_preempt=lambda sequence: self.preempted.append(cast(Actor, sequence).name),
        )
        self.actors: list[Actor] = []

    def arrive(self, name: str, prompt_tokens: int, answer_tokens: int = 4) -> Actor:
        cache = SequenceCache(self.pool, PAGE, self.prefix, "")
        # every actor has a text of its own
        actor = Actor(name, [1000 * len(self.actors) + n for n in range(prompt_tokens)], cache, answer_tokens)
        self.actors.append(actor)
        self.scheduler.waiting.append(cast(Any, actor))
        return actor

    def plan(self) -> list[Share]:
        shares = self.scheduler.plan()
        self.check(shares)
        return shares

    def step(self) -> list[Share]:
        """Plan, pretend to compute, commit, and say one word where the end is reached."""
        shares = self.plan()
        self.num_steps += 1
        for share in shares:
            actor = cast(Actor, share.sequence)
            reaches_end = share.reaches_end
            actor.cache.commit(share.num_known, actor.tokens)
            if reaches_end:
                actor.tokens.append(-1)
                actor.answer_tokens -= 1
            if not actor.answer_tokens:
                actor.finished_at = self.num_steps
                self.scheduler.remove(share.sequence)
        return shares

    def check(self, shares: Items[Share]) -> None:
        """What holds after every plan."""
        assert sum(share.num_known for share in shares) <= self.max_rows
        assert len(self.scheduler.running) <= self.max_sequences
        assert all(1 <= share.num_known <= share.sequence.num_pending for share in shares)
        assert len({id(share.sequence) for share in shares}) == len(shares)
        assert all(share.sequence in self.scheduler.running for share in shares)
        for share in shares:
            cache = share.sequence.cache
            assert len(cache.blocks) * PAGE >= cache.length + share.num_known, "no room for a planned row"
        owners = [sequence.cache.blocks for sequence in self.scheduler.running]
        self.pool.check([*owners, self.prefix.blocks()] if self.prefix else owners)
        assert all(not sequence.cache.blocks for sequence in self.scheduler.waiting)

    def run(self, most_steps: int = 1000) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(), "work is left, and nothing was planned"
            assert self.num_steps < most_steps


def names(shares: Items[Share]) -> list[str]:
    return [cast(Actor, share.sequence).name for share in shares]


def rows(shares: Items[Share]) -> list[int]:
    return [share.num_known for share in shares]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    stage = Stage(max_rows=16)
    stage.arrive("long", 40)
    assert [rows(stage.step()) for _ in range(4)] == [[16], [16], [8], [1]]


def test_budget_is_filled_in_order_of_arrival() -> None:
    stage = Stage(max_rows=16)
    for name, length in (("a", 10), ("b", 10), ("c", 10)):
        stage.arrive(name, length)
    shares = stage.step()
    assert (names(shares), rows(shares)) == (["a", "b"], [10, 6])
    shares = stage.step()
    assert (names(shares), rows(shares)) == (["a", "b", "c"], [1, 4, 10])


def test_those_who_run_come_before_those_who_wait() -> None:
    stage = Stage(max_rows=8)
    stage.arrive("a", 3)
    stage.step()
    stage.arrive("b", 30)
    shares = stage.step()
    assert (names(shares), rows(shares)) == (["a", "b"], [1, 7])


def test_share_knows_whether_the_next_word_can_be_drawn() -> None:
    stage = Stage(max_rows=16)
    actor = stage.arrive("a", 20)
    assert [share.reaches_end for share in stage.plan()] == [False]
    actor.cache.commit(16, actor.tokens)
    assert [share.reaches_end for share in stage.plan()] == [True]


def test_no_more_than_the_allowed_number_run() -> None:
    stage = Stage(max_sequences=2)
    for name in "abcd":
        stage.arrive(name, 2, answer_tokens=2)
    assert names(stage.step()) == ["a", "b"]
    stage.step()
    assert names(stage.step()) == ["c", "d"]


def test_waiting_is_first_come_first_served_even_past_a_large_one() -> None:
    """A small request does not overtake a large one that does not fit yet: that would starve it."""
    stage = Stage(num_blocks=6)
    stage.arrive("a", 8, answer_tokens=6)
    stage.arrive("large", 16)
    stage.arrive("small", 1)
    assert names(stage.step()) == ["a"]
    stage.run()
    finished = {actor.name: actor.finished_at for actor in stage.actors}
    assert finished["a"] is not None
    assert finished["large"] is not None
    assert finished["small"] is not None
    assert finished["a"] < finished["large"]


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    stage = Stage(num_blocks=5)
    for name in "abc":
        stage.arrive(name, 3, answer_tokens=8)
    stage.step()
    assert len(stage.scheduler.running) == 3
    while not stage.preempted:
        stage.step()
    assert stage.preempted == ["c"]
    assert [cast(Any, actor).name for actor in stage.scheduler.running] == ["a", "b"]
    assert cast(Any, stage.scheduler.waiting[0]).name == "c"
    assert stage.actors[2].cache.length == 0
    stage.run()


def test_the_preempted_comes_back_before_later_arrivals() -> None:
    stage = Stage(num_blocks=5)
    for name in "abc":
        stage.arrive(name, 3, answer_tokens=8)
    while not stage.preempted:
        stage.step()
    assert stage.preempted == ["c"]
    stage.arrive("late", 3, answer_tokens=1)
    order = []
    while not {"c", "late"} <= set(order):
        order += names(stage.step())
    assert order.index("c") < order.index("late")


def test_one_that_fills_the_cache_alone_is_never_preempted() -> None:
    stage = Stage(num_blocks=5)
    stage.arrive("alone", 12, answer_tokens=8)
    stage.run()
    assert stage.preempted == []


def test_preempted_text_is_found_in_the_prefix_cache_and_not_counted_as_a_hit() -> None:
    stage = Stage(num_blocks=7, prefix_cache=True)
    for name in "abc":
        stage.arrive(name, 6, answer_tokens=10)
    while not stage.preempted:
        stage.step()
    (victim,) = (actor for actor in stage.actors if actor.num_preemptions)
    while victim.cache.length == 0:
        shares = stage.step()
    assert shares[-1].num_known < len(victim.tokens) - 1, "part of its text was found"
    assert [actor.cached_tokens for actor in stage.actors] == [0, 0, 0]
    stage.run()


@pytest.mark.parametrize("seed", range(30))
def test_everybody_finishes_whatever_arrives(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(
        num_blocks=rng.randint(8, 20),
        max_rows=rng.choice((1, 3, 8, 64)),
        max_sequences=rng.choice((1, 3, 16)),
        prefix_cache=rng.random() < 0.5,
    )
    for number in range(25):
        stage.arrive(str(number), rng.randint(1, 20), answer_tokens=rng.randint(1, 12))
        for _ in range(rng.choice((0, 0, 1, 4))):
            stage.step()
    stage.run(most_steps=5000)
    assert all(actor.finished_at is not None for actor in stage.actors)
    assert stage.pool.num_available == stage.num_blocks


def test_the_oldest_always_moves_forward() -> None:
    """No starvation: in every step the first of those who run, or the first in line, is served."""
    rng = random.Random(7)
    stage = Stage(num_blocks=9, max_rows=4)
    for number in range(30):
        stage.arrive(str(number), rng.randint(1, 16), answer_tokens=rng.randint(1, 10))
    while stage.scheduler.running or stage.scheduler.waiting:
        oldest = (stage.scheduler.running or stage.scheduler.waiting)[0]
        assert stage.step()[0].sequence is oldest


def test_removal_frees_the_blocks_of_one_who_runs_and_of_one_who_waits() -> None:
    stage = Stage(max_sequences=1)
    running, waiting = stage.arrive("a", 8), stage.arrive("b", 8)
    stage.step()
    stage.scheduler.remove(cast(Any, waiting))
    stage.scheduler.remove(cast(Any, running))
    assert stage.pool.num_available == 64
    assert stage.plan() == []


# The same through the engine.


def ask(request_id: str, prompt_tokens: int, max_tokens: int = 8, n: int = 1) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(range(3, 3 + prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, n=n),
        speculation=Speculation(forced=True),
    )


def test_rows_of_a_step_stay_within_the_budget(llama: Target) -> None:
    engine = new_engine(llama, drafters=[RandomTrees(Book(), random.Random(0), 304)], max_rows_per_step=20)
    launch = engine._runner.launch
    seen: list[tuple[int, int]] = []

    def counted(works: Items[Work]) -> Any:
        seen.append((sum(len(work.known) for work in works), sum(len(work.draft) for work in works)))
        return launch(works)

    engine._runner.launch = counted  # type: ignore[method-assign]
    for number in range(5):
        engine.submit(ask(str(number), 30))
    for _ in steps(engine):
        pass
    assert all(known + drafted <= 20 for known, drafted in seen)
    assert max(known for known, _ in seen) == 20
    assert max(drafted for _, drafted in seen) > 10


def test_abort_frees_at_the_next_step(llama: Target) -> None:
    engine = new_engine(llama, prefix_cache=False)
    engine.submit(ask("a", 60, n=2))
    engine.submit(ask("b", 60))
    engine.step()
    held = 64 - engine.num_free_blocks
    engine.abort("a")
    assert 64 - engine.num_free_blocks == held, "nothing happens before the step"
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs if o.finish_reason] == [("a", "abort")] * 2
    assert 64 - engine.num_free_blocks == held // 3
    engine.check()
    for _ in steps(engine):
        pass
    assert engine.num_free_blocks == 64


def test_abort_of_one_who_waits(llama: Target) -> None:
    engine = new_engine(llama, max_sequences=1)
    engine.submit(ask("a", 10))
    engine.submit(ask("b", 10))
    engine.step()
    engine.abort("b")
    assert ("b", "abort") in [(output.request_id, output.finish_reason) for output in engine.step()]
    assert not engine._scheduler.waiting
    for _ in steps(engine):
        pass
    engine.check()


def test_preemption_is_an_event_and_is_counted(llama: Target) -> None:
    events: list[Event] = []
    engine = new_engine(llama, emit=events.append, num_blocks=5, prefix_cache=False)
    sequences = [sequence for name in "abc" for sequence in engine.submit(ask(name, 28, max_tokens=20))]
    for _ in steps(engine):
        pass
    assert [event for event in events if isinstance(event, Preempted)] == [Preempted("c", 0)]
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0, 1]

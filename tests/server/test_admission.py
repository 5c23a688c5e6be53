"""Places never leak, nobody waits beyond the deadline, and the order is right. Time is virtual."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.virtual_time import run_virtual
from understudy.server.admission import Admission, Overloaded, Place


@dataclass
class Log:
    """What happened, in order."""

    admission: Admission
    began: list[str] = field(default_factory=list)
    refused: dict[str, Overloaded] = field(default_factory=dict)
    times_s: dict[str, float] = field(default_factory=dict)
    """When each was let in or sent away."""

    async def visit(
        self, name: str, *, hold_s: float = 1.0, tenant: str = "", priority: int = 0, num_choices: int = 1
    ) -> None:
        try:
            async with self.admission.place(tenant=tenant, priority=priority, num_choices=num_choices):
                self.began.append(name)
                self.times_s[name] = asyncio.get_running_loop().time()
                await asyncio.sleep(hold_s)
        except Overloaded as error:
            self.refused[name] = error
            self.times_s[name] = asyncio.get_running_loop().time()


def assert_empty(admission: Admission) -> None:
    assert admission.num_running == 0
    assert admission.num_waiting == 0
    assert not admission._num_requests
    assert not admission._num_places


def test_order_is_urgency_then_arrival() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=10))
        async with asyncio.TaskGroup() as tasks:
            for name, priority in (("first", 5), ("late", 1), ("b", 0), ("c", 0), ("urgent", -3)):
                tasks.create_task(log.visit(name, priority=priority))
                await asyncio.sleep(0.01)
        assert log.began == ["first", "urgent", "b", "c", "late"]
        assert_empty(log.admission)

    run_virtual(main())


def test_tenants_take_turns() -> None:
    """One who asks twenty times does not keep out one who asks twice."""

    async def main() -> None:
        log = Log(Admission(max_running=2, max_waiting=50))
        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(log.visit(f"many{number}", tenant="many"))
            await asyncio.sleep(0.5)
            for number in range(2):
                tasks.create_task(log.visit(f"few{number}", tenant="few"))
        assert log.began[:6] == ["many0", "many1", "few0", "many2", "few1", "many3"]
        assert [name for name in log.began if name.startswith("many")] == [f"many{n}" for n in range(20)]

    run_virtual(main())


def test_many_choices_do_not_starve_and_do_not_stop_the_house() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=4, max_waiting=200, timeout_s=1000.0))
        draw = random.Random(1)
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(log.visit(f"early{number}", hold_s=draw.uniform(1.0, 2.0)))
            await asyncio.sleep(0.1)
            tasks.create_task(log.visit("wide", num_choices=4))
            for number in range(60):
                tasks.create_task(log.visit(f"narrow{number}", hold_s=draw.uniform(1.0, 2.0)))
        passed = log.began.index("wide") - 4
        assert passed == 4, "a full house may pass it, no more and no less"
        assert not log.refused
        assert_empty(log.admission)

    run_virtual(main())


def test_more_choices_than_places_take_all_of_them() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=4, max_waiting=1))
        await log.visit("huge", num_choices=100)
        assert log.began == ["huge"]
        assert_empty(log.admission)

    run_virtual(main())


def test_full_queue_sends_away_the_least_urgent_then_the_greedy_then_the_youngest() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=3))
        async with asyncio.TaskGroup() as tasks:
            for name, tenant, priority in (
                ("runs", "x", 0),
                ("greedy1", "greedy", 0),
                ("greedy2", "greedy", 0),
                ("lazy", "x", 1),
                ("urgent", "x", -1),  # the lazy one goes
                ("modest", "y", 0),  # the second of the greedy goes
                ("young", "y", 0),  # goes itself: of two with one and two waiting, the youngest of the fuller
            ):
                tasks.create_task(log.visit(name, tenant=tenant, priority=priority))
                await asyncio.sleep(0.01)
        assert {name: error.cause for name, error in log.refused.items()} == {
            "lazy": "queue_full",
            "greedy2": "queue_full",
            "young": "queue_full",
        }
        assert log.began == ["runs", "urgent", "greedy1", "modest"]

    run_virtual(main())


def test_waiting_ends_at_the_deadline() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=10, timeout_s=5.0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(log.visit("long", hold_s=100.0))
            await asyncio.sleep(1.0)
            tasks.create_task(log.visit("waits"))
        assert log.refused["waits"].code == "queue_timeout"
        assert log.times_s["waits"] == pytest.approx(6.0)
        assert_empty(log.admission)

    run_virtual(main())


def test_nobody_waits_in_vain() -> None:
    """Once it is known how long a place is held, whoever would wait too long is told at once."""

    async def main() -> None:
        admission = Admission(max_running=2, max_waiting=100, timeout_s=5.0)
        log = Log(admission)
        await log.visit("teaches", hold_s=4.0)
        async with asyncio.TaskGroup() as tasks:
            for number in range(10):
                tasks.create_task(log.visit(f"v{number}", hold_s=4.0))
        # 2 run; places come free every 2 s in the mean: those with more than 5 s of others before them go
        at_once = [name for name, error in log.refused.items() if log.times_s[name] == pytest.approx(4.0)]
        assert at_once == [f"v{number}" for number in range(5, 10)]
        assert all(error.cause == "queue_timeout" for error in log.refused.values())
        assert all(1.0 <= error.retry_after_s <= 60.0 for error in log.refused.values())
        assert log.began == ["teaches", "v0", "v1", "v2", "v3"]

    run_virtual(main())


def test_an_empty_queue_never_refuses_whatever_was_learned() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=10, timeout_s=5.0))
        await log.visit("slow", hold_s=1000.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(log.visit("a", hold_s=1.0))
            await asyncio.sleep(0.1)
            tasks.create_task(log.visit("b", hold_s=1.0))
        assert log.began == ["slow", "a", "b"]

    run_virtual(main())


def test_limit_of_one_key() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=10, max_per_tenant=2))
        async with asyncio.TaskGroup() as tasks:
            for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
                tasks.create_task(log.visit(name, tenant=tenant))
        assert list(log.refused) == ["a3"]
        assert log.refused["a3"].code == "rate_limit_exceeded"
        await log.visit("a4", tenant="a")
        assert log.began[-1] == "a4"

    run_virtual(main())


def test_drain_sends_the_waiting_away_and_lets_the_running_finish() -> None:
    async def main() -> None:
        log = Log(Admission(max_running=1, max_waiting=10))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(log.visit("runs", hold_s=3.0))
            tasks.create_task(log.visit("waits"))
            await asyncio.sleep(1.0)
            log.admission.drain()
            await log.visit("late")
        assert log.began == ["runs"]
        assert {name: error.code for name, error in log.refused.items()} == {"late": "draining", "waits": "draining"}
        assert log.times_s["waits"] == pytest.approx(1.0)
        assert_empty(log.admission)

    run_virtual(main())


def test_answer_that_takes_too_long_ends() -> None:
    async def main() -> None:
        admission = Admission(max_running=1, max_waiting=1, request_timeout_s=10.0)
        async with admission.place(tenant="") as place:
            await place.before_end(asyncio.sleep(4.0))
            with pytest.raises(Overloaded) as caught:
                await place.before_end(asyncio.sleep(100.0))
        assert caught.value.code == "deadline_exceeded"
        assert asyncio.get_running_loop().time() == pytest.approx(10.0)

    run_virtual(main())


def test_engine_is_waited_for_until_the_deadline() -> None:
    async def main() -> None:
        place = Place(5.0)
        with pytest.raises(Overloaded) as caught:
            await place.wait_for(asyncio.Event().wait())  # type: ignore[arg-type]
        assert caught.value.code == "engine_restarting"
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)

    run_virtual(main())


@pytest.mark.parametrize("request_timeout_s", [None, 8.0])
def test_ten_times_too_much(request_timeout_s: float | None) -> None:
    """Goodput stays at the peak, refusals are quick or within the deadline, and who is let in finishes in time."""

    async def main() -> None:
        max_running, hold_s, length_s = 8, 2.0, 200.0
        admission = Admission(
            max_running=max_running, max_waiting=256, timeout_s=6.0, request_timeout_s=request_timeout_s
        )
        draw = random.Random(7)
        finished_s: list[float] = []
        waited_s: list[float] = []
        causes: set[str] = set()

        async def visit() -> None:
            arrived_s = asyncio.get_running_loop().time()
            try:
                async with admission.place(tenant=draw.choice("abc")) as place:
                    await place.before_end(asyncio.sleep(draw.uniform(0.5, 1.5) * hold_s))
                finished_s.append(asyncio.get_running_loop().time() - arrived_s)
            except Overloaded as error:
                causes.add(error.code)
                waited_s.append(asyncio.get_running_loop().time() - arrived_s)

        rate = 10 * max_running / hold_s
        async with asyncio.TaskGroup() as tasks:
            while asyncio.get_running_loop().time() < length_s:
                tasks.create_task(visit())
                await asyncio.sleep(draw.expovariate(rate))
        peak = max_running / hold_s * length_s
        assert len(finished_s) >= 0.9 * peak
        assert causes <= {"overloaded", "queue_timeout", "deadline_exceeded"}
        assert max(waited_s) <= 6.0 + 1e-6 if request_timeout_s is None else 8.0 + 1e-6
        assert max(finished_s) <= (6.0 + 1.5 * hold_s if request_timeout_s is None else 8.0) + 1e-6
        assert_empty(admission)

    run_virtual(main())


VISITS = st.lists(
    st.tuples(
        st.integers(0, 40),  # arrival, in tenths of a second
        st.integers(0, 30),  # hold
        st.integers(-1, 1),  # priority
        st.integers(1, 5),  # choices
        st.sampled_from(["a", "b"]),
        st.one_of(st.none(), st.integers(0, 30)),  # cancelled after
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    visits=VISITS,
    max_running=st.integers(1, 4),
    max_waiting=st.integers(1, 8),
    request_timeout_s=st.sampled_from([None, 2.0]),
    drained_at=st.one_of(st.none(), st.integers(0, 60)),
)
def test_whatever_happens_no_place_is_lost(
    visits: list[tuple[int, int, int, int, str, int | None]],
    max_running: int,
    max_waiting: int,
    request_timeout_s: float | None,
    drained_at: int | None,
) -> None:
    timeout_s = 1.5

    async def main() -> None:
        admission = Admission(
            max_running=max_running, max_waiting=max_waiting, timeout_s=timeout_s, request_timeout_s=request_timeout_s
        )
        loop = asyncio.get_running_loop()
        held = 0

        async def visit(arrival: int, hold: int, priority: int, num_choices: int, tenant: str) -> None:
            nonlocal held
            await asyncio.sleep(arrival / 10)
            begun = False
            try:
                async with admission.place(tenant=tenant, priority=priority, num_choices=num_choices):
                    begun = True
                    assert loop.time() - arrival / 10 <= timeout_s + 1e-6
                    held += min(num_choices, max_running)
                    try:
                        # places are given a moment before their holders wake up
                        assert held <= admission.num_running <= max_running
                        await asyncio.sleep(hold / 10)
                    finally:
                        held -= min(num_choices, max_running)
            except Overloaded:
                assert not begun
                assert loop.time() - arrival / 10 <= timeout_s + 1e-6

        tasks = []
        for *what, cancelled_after in visits:
            task = loop.create_task(visit(*what))  # type: ignore[arg-type]
            tasks.append(task)
            if cancelled_after is not None:
                loop.call_later((what[0] + cancelled_after) / 10, task.cancel)  # type: ignore[operator]
        if drained_at is not None:
            loop.call_later(drained_at / 10, admission.drain)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        strange = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
        assert not strange, strange
        assert_empty(admission)

    run_virtual(main())


@settings(max_examples=200, deadline=None)
@given(
    priorities=st.lists(st.tuples(st.integers(-2, 2), st.integers(1, 3)), min_size=1, max_size=20),
    max_running=st.integers(3, 5),
)
def test_who_waits_is_served_by_urgency(priorities: list[tuple[int, int]], max_running: int) -> None:
    """Nobody begins after one that is less urgent and arrived no sooner, but for a full house of narrower ones."""

    async def main() -> None:
        log = Log(Admission(max_running=max_running, max_waiting=100, timeout_s=1e6))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(log.visit("first", num_choices=max_running))
            await asyncio.sleep(0.1)
            for number, (priority, num_choices) in enumerate(priorities):
                tasks.create_task(log.visit(str(number), priority=priority, num_choices=num_choices))
        order = [int(name) for name in log.began[1:]]
        assert sorted(order) == list(range(len(priorities)))
        for place, number in enumerate(order):
            rank = (priorities[number][0], number)
            passed = [priorities[other][1] for other in order[:place] if (priorities[other][0], other) > rank]
            assert sum(passed) < max_running + 3
            if priorities[number][1] == 1:
                assert not passed, "whoever needs one place is never passed"

    run_virtual(main())

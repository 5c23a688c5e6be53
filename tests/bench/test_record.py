import json
from dataclasses import replace

import pytest

from tests.bench.made_up import answer, measured, question, turn, unit
from understudy.bench.alternate import Measured, Turn
from understudy.bench.record import (
    ArmFacts,
    MemoryBytes,
    PassBytes,
    Percentiles,
    Row,
    cycle_time_of,
    groups,
    row_of,
    samples_of,
)
from understudy.bench.served import Served, StepTime
from understudy.core.request import SpeculationCounts

PLAIN = ArmFacts("plain", "fp32", "exact", MemoryBytes(100, 0, 50))
DEFAULT = ArmFacts("default", "fp32", "exact", MemoryBytes(100, 0, 50))
ARMS = (PLAIN, DEFAULT)


def rows_of(result: Measured, arms: tuple[ArmFacts, ...] = ARMS) -> dict[tuple[str, str], Row]:
    rows = [row_of(group) for group in groups(result, arms)]
    return {(row.prompt_class, row.drafter): row for row in rows}


def test_a_row_has_exactly_these_keys() -> None:
    row = rows_of(measured(turn(plain=answer(), default=answer())))["code", "default"].describe()
    assert list(row) == [
        "class",
        "drafter",
        "temperature",
        "concurrency",
        "weights",
        "numerics",
        "tokens_per_s",
        "speedup",
        "speedup_low",
        "speedup_high",
        "acceptance_rate",
        "acceptance_by_position",
        "tokens_per_cycle",
        "rows_per_cycle",
        "bandwidth_gb_s",
        "ttft_ms",
        "tpot_ms",
        "request_ms",
        "memory_bytes",
        "identical",
    ]
    assert [list(row[name]) for name in ("ttft_ms", "tpot_ms", "request_ms")] == [["p50", "p95", "p99"]] * 3
    assert row["memory_bytes"] == {"target": 100, "draft": 0, "kv": 50}
    json.dumps(row, allow_nan=False)


def test_a_row_by_hand() -> None:
    counts = SpeculationCounts(
        cycles=2, drafted=4, accepted=3, rejected=1, rows=6, reached_by_position=[2, 2], matched_by_position=[2, 1]
    )
    first = turn(plain=answer(seconds=2.0), default=answer(seconds=1.0, counts=counts))
    second = turn(unit(number=1), plain=answer(seconds=3.0), default=answer(seconds=3.0, counts=counts))
    rows = rows_of(measured(first, second))
    row = rows["code", "default"]
    assert row.tokens_per_s == pytest.approx(10 / 4)
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx(5 / 4)
    assert (row.speedup.low, row.speedup.high) == (1.0, 2.0)
    assert row.acceptance_rate == pytest.approx(6 / 8)
    assert row.acceptance_by_position == pytest.approx((1.0, 0.5))
    assert row.tokens_per_cycle == pytest.approx(10 / 4)
    assert row.rows_per_cycle == pytest.approx((4 + 12) / 4)
    assert row.ttft_ms == Percentiles(pytest.approx(400.0), pytest.approx(580.0), pytest.approx(596.0))
    assert row.tpot_ms.p50 == pytest.approx(1000 * (0.8 + 2.4) / 4 / 2)
    assert row.request_ms.p99 == pytest.approx(2980.0)
    plain = rows["code", "plain"]
    assert plain.speedup is not None
    assert plain.speedup.value == 1.0
    assert plain.acceptance_rate is None
    assert plain.acceptance_by_position == ()
    assert (plain.tokens_per_cycle, plain.rows_per_cycle) == (1.0, 1.0)


def test_the_row_of_all_classes_sums_up_the_others() -> None:
    code = turn(plain=answer(seconds=4.0), default=answer(seconds=1.0))
    chat = turn(unit("chat"), plain=answer(seconds=2.0), default=answer(seconds=2.0))
    rows = rows_of(measured(code, chat))
    assert [name for name, drafter in rows if drafter == "default"] == ["code", "chat", "all"]
    total = rows["all", "default"]
    assert total.speedup is not None
    assert total.speedup.value == pytest.approx(2.0)
    assert total.tokens_per_s == pytest.approx(10 / 3)


def test_conditions_are_kept_apart() -> None:
    slow = turn(unit(temperature=1.0), plain=answer(), default=answer(seconds=4.0))
    many = turn(unit(concurrency=4), plain=answer(), default=answer(seconds=0.5))
    found = [(row.temperature, row.concurrency) for row in map(row_of, groups(measured(slow, many), ARMS))]
    assert found == [(1.0, 1)] * 4 + [(0.0, 4)] * 4


@pytest.mark.parametrize("other", [{"text": "ac"}, {"token_ids": (0, 1, 2, 3, 5)}, {"finish_reason": "length"}])
def test_any_difference_is_one(other: dict[str, object]) -> None:
    same = turn(plain=answer(), default=answer())
    different = turn(unit(number=1), plain=answer(), default=answer(**other))  # type: ignore[arg-type]
    rows = rows_of(measured(same, different))
    assert not rows["code", "default"].identical
    assert not rows["all", "default"].identical
    assert rows["code", "plain"].identical


def test_a_baseline_that_does_not_repeat_itself_is_told() -> None:
    first, second = (turn(unit(number=n), plain=answer(text), default=answer(text)) for n, text in enumerate("ab"))
    rows = rows_of(measured(first, second))
    assert not rows["code", "plain"].identical
    assert rows["code", "default"].identical, "each time it said what the baseline said"
    other = unit(number=1, questions=(question("code-1"),))
    another_question = turn(other, plain=answer("b"), default=answer("b"))
    assert rows_of(measured(first, another_question))["code", "plain"].identical


def test_without_a_baseline_there_is_no_speedup() -> None:
    row = rows_of(measured(turn(default=answer(counts=None))), (DEFAULT,))["code", "default"].describe()
    assert row["speedup"] is row["speedup_low"] is row["speedup_high"] is None
    assert row["acceptance_rate"] is row["tokens_per_cycle"] is row["rows_per_cycle"] is None
    assert row["tokens_per_s"] == 5.0


def test_nothing_measured_is_no_row() -> None:
    assert list(groups(Measured(), ARMS)) == []


def test_where_the_time_went() -> None:
    served = Served([answer(seconds=10.0)], StepTime(3, 1.0, 6.0, 2.0))
    (group, *_) = groups(measured(Turn(unit(), {"plain": served})), (PLAIN,))
    value = cycle_time_of(group)
    assert value is not None
    assert value == {
        "class": "code",
        "drafter": "plain",
        "temperature": 0.0,
        "concurrency": 1,
        "num_steps": 3,
        "draft_s": pytest.approx(1 / 3),
        "forward_s": 2.0,
        "sample_s": pytest.approx(2 / 3),
        "other_s": pytest.approx(1 / 3),
        "hidden_s": 0.0,
    }
    (group, *_) = groups(measured(turn(plain=answer())), (PLAIN,))
    assert cycle_time_of(group) is None


def test_what_the_host_did_behind_a_pass_is_told() -> None:
    """Two steps of 3 s each: half a second of drafting, 2 s of the pass, and 1.5 s of the host's, 1 s of it hidden."""
    served = Served([answer(seconds=6.0)], StepTime(2, 1.0, 4.0, 3.0))
    (group, *_) = groups(measured(Turn(unit(), {"plain": served})), (PLAIN,))
    value = cycle_time_of(group)
    assert value is not None
    assert (value["sample_s"], value["hidden_s"], value["other_s"]) == (1.5, 1.0, 0.0)


def test_bandwidth_by_hand() -> None:
    """Five passes over 3 GB of weights and 500 tokens of 2 MB in all, in 4 s."""
    arm = replace(PLAIN, pass_bytes=PassBytes(weights=3 * 10**9, per_key=2 * 10**6))
    turns = [
        Turn(unit(number=n), {"plain": Served([answer()], StepTime(steps, 0.1, seconds, 0.1, keys))})
        for n, (steps, seconds, keys) in enumerate([(2, 1.0, 100), (3, 3.0, 400)])
    ]
    row = rows_of(measured(*turns), (arm,))["code", "plain"]
    assert row.bandwidth_gb_s == pytest.approx((5 * 3 + 500 * 0.002) / 4)
    assert row.describe()["bandwidth_gb_s"] == 4.0
    assert rows_of(measured(*turns), (PLAIN,))["code", "plain"].bandwidth_gb_s is None, "a server does not tell"
    assert rows_of(measured(turn(plain=answer())), (arm,))["code", "plain"].bandwidth_gb_s is None, "no pass"


def test_samples_are_the_single_requests() -> None:
    (group, *_) = groups(measured(turn(plain=answer(seconds=1.0)), turn(plain=answer(num_tokens=1))), (PLAIN,))
    samples = samples_of(group)
    assert samples["ttft_ms"] == [200.0, 200.0]
    assert samples["tpot_ms"] == [200.0]
    assert samples["request_ms"] == [1000.0, 1000.0]

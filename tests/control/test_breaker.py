from __future__ import annotations

from understudy.control.breaker import Breaker, Tally
from understudy.control.classes import Line


def cycle(*, right: int = 0, drafted: int = 4, rows: int = 4, row_s: float = 0.1, asking_s: float = 0.0) -> Tally:
    """One text that drafted: a plain step takes a second."""
    saved = min(right, rows)
    return Tally(
        drafted=drafted,
        accepted=right,
        num_rows=rows,
        num_saved=saved,
        cost_s=rows * row_s + asking_s,
        saved_s=float(saved),
        plain_s=1.0,
    )


def until_it_changes(breaker: Breaker, tally: Tally, most: int = 200) -> int:
    """Feed the same cycle until the state changes; how many it took."""
    for count in range(1, most + 1):
        if breaker.observe(Tally(**{name: getattr(tally, name) for name in Tally.__dataclass_fields__})):
            return count
    raise AssertionError(f"still {breaker.state} after {most}")


def steps_until_asked(breaker: Breaker, most: int = 5000) -> int:
    for count in range(1, most + 1):
        if breaker.asks():
            return count
    raise AssertionError("it is never asked again")


def test_who_gains_stays_on_whatever_the_rule_says() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    for _ in range(200):
        assert not breaker.observe(cycle(right=1)), "a quarter is right, and it gains all the same"
    assert breaker.state == "on"


def test_loss_switches_off_and_the_first_look_waits() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    assert until_it_changes(breaker, cycle(right=0)) == 15
    assert (breaker.state, breaker.rest_steps) == ("off", 16)
    assert "lost 40.0% of the plain time" in breaker.reason
    assert steps_until_asked(breaker) == 24


def test_who_had_the_words_that_another_was_credited_for_stays_on() -> None:
    """Where a free drafter has the same words, one that costs time seems to lose it; it is not worse for that."""
    breaker = Breaker(Line("code", 0), "block")
    for _ in range(200):
        tally = cycle(right=4, rows=0, asking_s=0.3)
        tally.num_shared, tally.shared_s = 4, 4.0
        assert not breaker.observe(tally)
    assert breaker.state == "on"
    alone = Breaker(Line("code", 0), "block")
    assert until_it_changes(alone, cycle(right=4, rows=0, asking_s=0.3)) < 20, "nobody said any of its words"


def test_under_forty_percent_without_a_gain_is_off() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    until_it_changes(breaker, cycle(right=0, rows=0))
    assert "under 40%" in breaker.reason
    assert breaker.rest_steps == 0, "it lost nothing"


def test_look_that_shows_nothing_changes_nothing() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    breaker.trip("by hand")
    for _ in range(20):
        assert steps_until_asked(breaker) == 8
        assert not breaker.observe(cycle(rows=0))
    assert (breaker.state, breaker.reason) == ("off", "by hand")


def test_look_that_takes_long_is_rare() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    breaker.trip("by hand")
    steps_until_asked(breaker)
    breaker.observe(cycle(rows=0, asking_s=0.5))
    steps_until_asked(breaker)
    waited = steps_until_asked(breaker)
    assert 0.5 / waited <= 0.0051, "looks take half a percent of the plain time"
    breaker.observe(cycle(rows=0, asking_s=1000.0))
    assert steps_until_asked(breaker) <= 1024 + 8, "but there is always another"


def test_probe_that_gains_brings_it_back() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    breaker.trip("by hand")
    assert not breaker.observe(cycle(right=4)), "what was under way when it went off is no look"
    assert breaker.state == "off"
    steps_until_asked(breaker)
    assert breaker.observe(cycle(right=4))
    assert breaker.state == "probing"
    assert until_it_changes(breaker, cycle(right=4)) == 7
    assert (breaker.state, breaker.rest_steps) == ("on", 0)
    assert "gained" in breaker.reason


def test_probes_that_lose_double_the_rest() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    breaker.trip("by hand")
    rests = []
    for _ in range(9):
        steps_until_asked(breaker)
        breaker.observe(cycle(right=0))
        until_it_changes(breaker, cycle(right=0))
        rests.append(breaker.rest_steps)
    assert rests == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_probe_without_anything_worth_a_row_ends() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    assert breaker.probe("try it")
    assert not breaker.probe("again"), "it is probed already"
    assert until_it_changes(breaker, cycle(right=0, rows=0)) <= 15
    assert (breaker.state, breaker.rest_steps) == ("off", 0)


def test_chance_does_not_switch_off() -> None:
    """A draft that pays by one word in five looks like a loss for a while, and often."""
    breaker = Breaker(Line("chat", 0), "ngram")
    for number in range(600):
        breaker.observe(cycle(right=number % 5 == 0, drafted=1, rows=1))
    assert breaker.state == "on"


def test_what_is_kept_and_shown() -> None:
    breaker = Breaker(Line("chat", 0), "ngram")
    until_it_changes(breaker, cycle(right=0))
    view, learned = breaker.view(), breaker.learned()
    assert (view.workload_class, view.drafter, view.state, view.acceptance) == ("chat", "ngram", "off", 0.0)
    assert (learned.state, learned.reason, learned.rest_steps) == ("off", breaker.reason, 16)

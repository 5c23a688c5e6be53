import pytest

from understudy.bench.arrivals import Closed, Poisson, Recorded, Timed, TraceLine
from understudy.bench.prompts import Prompt
from understudy.bench.workloads import MIXED, Plan, choose, follow_trace
from understudy.errors import ConfigError

PROMPTS = [Prompt(name, text=f"{name} {i}") for name in ("code", "chat") for i in range(3)]


def encode(prompt: Prompt) -> tuple[int, ...] | None:
    """Three letters of text are one token; too long is what has more than nine."""
    return None if len(prompt.text) > 9 else tuple(range(len(prompt.text) // 3))


def questions(**options: object) -> dict[str, list[str]]:
    chosen = choose(PROMPTS, encode, max_tokens=8, seed=5, **options)  # type: ignore[arg-type]
    return {name: [q.prompt.text for q in row] for name, row in chosen.by_class.items()}


def test_prompts_are_chosen_by_class() -> None:
    assert questions() == {"code": ["code 0", "code 1", "code 2"], "chat": ["chat 0", "chat 1", "chat 2"]}
    assert questions(classes=("chat",), per_class=2) == {"chat": ["chat 0", "chat 1"]}
    with pytest.raises(ConfigError, match="no prompts of class 'law'"):
        questions(classes=("law",))


def test_what_does_not_fit_is_counted() -> None:
    prompts = [*PROMPTS, Prompt("code", text="far too long"), Prompt("math", text="far too long")]
    chosen = choose(prompts, encode, max_tokens=8, seed=5)
    assert chosen.num_left_out == 2
    assert list(chosen.by_class) == ["code", "chat"]
    with pytest.raises(ConfigError, match="No prompt fits"):
        choose(prompts, encode, max_tokens=8, seed=5, classes=("math",))


def test_a_question_has_a_seed_of_its_own_that_does_not_change() -> None:
    row = choose(PROMPTS, encode, max_tokens=8, seed=5).by_class["code"]
    assert [question.seed for question in row] == [5, 6, 7]
    sampling = row[1].sampling(0.7)
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.7, 8, 6)


def plan(**options: object) -> Plan:
    chosen = choose(PROMPTS, encode, max_tokens=8, seed=5)
    return Plan(questions=chosen.by_class, temperatures=(0.0, 1.0), **options)  # type: ignore[arg-type]


def test_a_round_has_every_class_under_every_condition() -> None:
    units = list(plan(concurrencies=(1, 2)).round(0))
    assert [(u.temperature, u.concurrency, u.prompt_class) for u in units] == [
        (temperature, concurrency, name)
        for temperature in (0.0, 1.0)
        for concurrency in (1, 2)
        for name in ("code", "chat")
    ]
    assert [unit.place for unit in units] == list(range(8))
    assert [len(unit.questions) for unit in units] == [1, 1, 6, 6] * 2, "places are filled again where several run"
    assert units[2].arrivals == Closed(2)


def test_rounds_go_on_to_the_next_questions_and_begin_again() -> None:
    pairs = plan(concurrencies=(2,))
    texts = [[q.prompt.text for q in next(iter(pairs.round(number))).questions] for number in range(3)]
    assert texts == [
        ["code 0", "code 1", "code 2"] * 2,
        ["code 1", "code 2", "code 0"] * 2,
        ["code 2", "code 0", "code 1"] * 2,
    ]
    assert [unit.number for unit in pairs.round(2)] == [8, 9, 10, 11]


def test_the_first_answers_of_a_loop_end_at_random_and_are_not_timed() -> None:
    units = [next(iter(plan(concurrencies=(4,)).round(number))) for number in range(30)]
    limits = [[q.max_tokens for q in unit.questions] for unit in units]
    assert all(len(line) == 12 and line[4:] == [8] * 8 and units[0].num_starting == 4 for line in limits)
    assert {limit for line in limits for limit in line[:4]} == set(range(1, 9))
    assert limits == [
        [q.max_tokens for q in next(iter(plan(concurrencies=(4,)).round(number))).questions] for number in range(30)
    ], "every run draws the same"
    alone = next(iter(plan(concurrencies=(1,)).round(0)))
    assert [q.max_tokens for q in alone.questions] == [8]
    assert alone.num_starting == 0


def test_more_at_once_than_questions_repeats_them() -> None:
    unit = next(iter(plan(concurrencies=(5,)).round(0)))
    assert [q.prompt.text[-1] for q in unit.questions] == ["0", "1", "2"] * 5


def test_in_an_open_loop_a_unit_is_a_sequence() -> None:
    opened = plan(arrival_times=Poisson(2.0, 4, 0))
    units = [unit for number in range(2) for unit in opened.round(number)]
    assert [len(unit.questions) for unit in units] == [4] * 8
    assert all(unit.concurrency is None for unit in units)
    assert len({tuple(unit.arrivals.times_s) for unit in units if isinstance(unit.arrivals, Timed)}) == 8
    assert opened.most_at_once == 4


def test_a_trace_is_followed() -> None:
    chosen = choose(PROMPTS, encode, max_tokens=8, seed=5)
    lines = [
        TraceLine(0.0),
        TraceLine(0.5, "chat", max_tokens=3),
        TraceLine(1.0, "chat"),
        TraceLine(1.5, "law", "hi you"),
        TraceLine(2.0),
    ]
    followed = follow_trace(lines, chosen, encode)
    (row,) = followed.by_class.values()
    assert list(followed.by_class) == [MIXED]
    assert [q.prompt.text for q in row] == ["code 0", "chat 0", "chat 1", "", "code 1"]
    assert row[3].prompt.messages[0]["content"] == "hi you"
    assert [q.max_tokens for q in row] == [8, 3, 8, 8, 8]
    assert len({q.name for q in row}) == 5
    whole = Plan(questions=followed.by_class, temperatures=(0.0,), arrival_times=Recorded([0.0] * 5))
    assert [unit.questions for unit in whole.round(3)] == [tuple(row)]


def test_a_trace_of_one_class_is_of_that_class() -> None:
    chosen = choose(PROMPTS, encode, max_tokens=8, seed=5)
    assert list(follow_trace([TraceLine(0.0, "chat")] * 5, chosen, encode).by_class) == ["chat"]


def test_what_a_trace_cannot_ask() -> None:
    chosen = choose(PROMPTS, encode, max_tokens=8, seed=5)
    with pytest.raises(ConfigError, match="asks for class 'law'"):
        follow_trace([TraceLine(0.0, "law")], chosen, encode)
    with pytest.raises(ConfigError, match="Request 0 of the trace does not fit"):
        follow_trace([TraceLine(0.0, "law", "too long")], chosen, lambda prompt: None)

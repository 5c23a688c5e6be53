"""Units and answers made by hand, for tests of what is done with them."""

from __future__ import annotations

from understudy.bench.alternate import Measured, Turn
from understudy.bench.arrivals import Closed
from understudy.bench.prompts import Prompt
from understudy.bench.served import Answer, Served
from understudy.bench.workloads import Plan, Question, Unit
from understudy.core.request import SpeculationCounts


def question(name: str = "code-0") -> Question:
    prompt = Prompt(name.partition("-")[0], text="the cat and the dog")
    return Question(name=name, prompt=prompt, prompt_ids=(3, 4, 5), seed=0, max_tokens=4)


def plan(*classes: str, **options: object) -> Plan:
    questions = {name: [question(f"{name}-{i}") for i in range(2)] for name in classes or ("code",)}
    return Plan(questions=questions, temperatures=(0.0,), **options)  # type: ignore[arg-type]


def unit(prompt_class: str = "code", number: int = 0, **values: object) -> Unit:
    given: dict[str, object] = {
        "number": number,
        "round_number": number,
        "place": 0,
        "prompt_class": prompt_class,
        "temperature": 0.0,
        "concurrency": 1,
        "questions": (question(f"{prompt_class}-0"),),
        "arrivals": Closed(1),
        **values,
    }
    return Unit(**given)  # type: ignore[arg-type]


def answer(
    text: str = "ab", *, seconds: float = 1.0, start_s: float = 0.0, num_tokens: int = 5, **values: object
) -> Answer:
    """Five tokens, of which the first comes after a fifth of the time."""
    given: dict[str, object] = {
        "text": text,
        "token_ids": tuple(range(num_tokens)),
        "finish_reason": "stop",
        "num_tokens": num_tokens,
        "arrived_s": start_s,
        "first_s": start_s + seconds / 5,
        "last_s": start_s + seconds,
        "ended_s": start_s + seconds,
        "counts": SpeculationCounts(cycles=num_tokens),
        **values,
    }
    return Answer(**given)  # type: ignore[arg-type]


def turn(where: Unit | None = None, **answers: Answer) -> Turn:
    return Turn(where or unit(), {name: Served([value]) for name, value in answers.items()})


def measured(*turns: Turn) -> Measured:
    return Measured(list(turns), num_rounds=len(turns))

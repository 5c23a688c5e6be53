"""Which questions are asked, in which order.

A *unit* is what the arms do in turn: at a concurrency of c, c questions of one class; in an open loop one whole
sequence of arrivals. A *round* has one unit of every class under every temperature and concurrency, so a run that
ends early has still seen them all. Later rounds go on to the next questions, and begin again when all were asked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from understudy.bench.arrivals import Arrivals, Closed, Timed, TraceLine
from understudy.bench.prompts import Prompt
from understudy.bench.served import ALL
from understudy.core.request import SamplingParams
from understudy.errors import ConfigError

MIXED = "mixed"
"""The class of a trace whose requests are of several."""

Encode = Callable[[Prompt], tuple[int, ...] | None]
"""Token ids of a prompt; empty for a server that has its own tokenizer; None if the model's context cannot hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt with all that its answer depends on, but for the temperature."""

    name: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int

    def sampling(self, temperature: float) -> SamplingParams:
        """How its words are drawn. Every repetition has the same seed, so repetitions can be compared."""
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Questions that are served together."""

    number: int
    round_number: int
    place: int
    """Which unit of its round."""
    prompt_class: str
    temperature: float
    concurrency: int | None
    """None in an open loop."""
    questions: tuple[Question, ...]
    arrivals: Arrivals

    @property
    def num_starting(self) -> int:
        """Questions that only get a closed loop going; nobody's latency is that of a server that just began."""
        return self.concurrency if self.concurrency is not None and self.concurrency > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All rounds that could be run."""

    questions: Mapping[str, Sequence[Question]]
    """By class."""
    temperatures: Sequence[float]
    concurrencies: Sequence[int] = (1,)
    arrival_times: Callable[[int], Sequence[float]] | None = None
    """Of a unit by its number, in an open loop; None in a closed one."""

    @property
    def all_questions(self) -> list[Question]:
        """Those of every class."""
        return [question for questions in self.questions.values() for question in questions]

    @property
    def units_per_round(self) -> int:
        """Units of a round."""
        return len(self.questions) * len(self.temperatures) * len(self._at_once)

    @property
    def most_at_once(self) -> int:
        """Most requests that a unit can have unanswered."""
        if self.arrival_times is None:
            return max(self.concurrencies)
        return len(self.arrival_times(0))

    @property
    def _at_once(self) -> Sequence[int | None]:
        return (None,) if self.arrival_times is not None else self.concurrencies

    def round(self, round_number: int) -> Iterator[Unit]:
        """Yield the units of a round, the classes in turn under each temperature and concurrency."""
        conditions = [(t, c) for t in self.temperatures for c in self._at_once]
        for index, (temperature, concurrency) in enumerate(conditions):
            for which, (prompt_class, questions) in enumerate(self.questions.items()):
                place = index * len(self.questions) + which
                number = round_number * self.units_per_round + place
                arrivals = self._arrivals(number, concurrency)
                count = len(arrivals.times_s) if isinstance(arrivals, Timed) else _closed_count(arrivals.concurrency)
                # where a closed loop asks them all every time, another one begins; a trace is followed as it is
                asks_all = isinstance(arrivals, Closed) and count >= len(questions)
                first = round_number * (1 if asks_all else count)
                yield Unit(
                    number=number,
                    round_number=round_number,
                    place=place,
                    prompt_class=prompt_class,
                    temperature=temperature,
                    concurrency=concurrency,
                    questions=_staggered(
                        [questions[(first + i) % len(questions)] for i in range(count)], arrivals, number
                    ),
                    arrivals=arrivals,
                )

    def _arrivals(self, number: int, concurrency: int | None) -> Closed | Timed:
        if self.arrival_times is not None:
            return Timed(self.arrival_times(number))
        assert concurrency is not None
        return Closed(concurrency)


def _staggered(questions: Sequence[Question], arrivals: Closed | Timed, number: int) -> tuple[Question, ...]:
    """Cut the first answers of a closed loop short at random: a loop that has been running for a while.

    Answers that all begin together and have one limit would end together, and be followed by prompts that are all read
    together. No server sees that, and it hides from plain decoding what prompts cost those who are being answered.
    Nor may they end at even distances: plain decoding would keep these, and no prompt ever wait for another's.
    """
    if isinstance(arrivals, Timed) or arrivals.concurrency == 1:
        return tuple(questions)
    draw = random.Random(number)
    return tuple(
        replace(question, max_tokens=draw.randint(1, question.max_tokens)) if place < arrivals.concurrency else question
        for place, question in enumerate(questions)
    )


def _closed_count(concurrency: int) -> int:
    """Questions of a closed loop's unit: one, or enough to fill every place twice after those that start it."""
    return 1 if concurrency == 1 else 3 * concurrency


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions by class, and how many prompts no context could hold."""

    by_class: Mapping[str, Sequence[Question]]
    num_left_out: int = 0


def wanted_classes(prompts: Sequence[Prompt], classes: Sequence[str] = ()) -> list[str]:
    """Name the classes to ask: the given ones, or all that the prompts have. No model is needed for it."""
    known = list(dict.fromkeys(prompt.prompt_class for prompt in prompts))
    missing = [name for name in classes if name not in known]
    if missing:
        raise ConfigError(f"There are no prompts of class {missing[0]!r}.", f"Choose from {', '.join(known)}.")
    wanted = list(classes) or known
    if ALL in wanted:
        raise ConfigError(f"A class of prompts is called {ALL!r}, as is the sum of all classes.", "Rename the class.")
    return wanted


def choose(
    prompts: Sequence[Prompt],
    encode: Encode,
    *,
    max_tokens: int,
    seed: int,
    classes: Sequence[str] = (),
    per_class: int | None = None,
) -> Questions:
    """Take the first `per_class` prompts of each class (all if None), of the named classes (all if none is named)."""
    by_class: dict[str, list[Question]] = {}
    num_left_out = 0
    for name in wanted_classes(prompts, classes):
        chosen = [prompt for prompt in prompts if prompt.prompt_class == name][:per_class]
        encoded = [(prompt, encode(prompt)) for prompt in chosen]
        fitting = [
            Question(name=f"{name}-{i}", prompt=prompt, prompt_ids=ids, seed=seed + i, max_tokens=max_tokens)
            for i, (prompt, ids) in enumerate(encoded)
            if ids is not None
        ]
        num_left_out += len(chosen) - len(fitting)
        if fitting:
            by_class[name] = fitting
    if not by_class:
        raise ConfigError("No prompt fits in the model's context.", "Give shorter prompts.")
    return Questions(by_class, num_left_out)


def follow_trace(lines: Sequence[TraceLine], questions: Questions, encode: Encode) -> Questions:
    """Make one sequence, a question for each line: its own prompt, the next of its class, or the next of all."""
    known = [question for row in questions.by_class.values() for question in row]
    pools = {None: itertools.cycle(known)} | {name: itertools.cycle(row) for name, row in questions.by_class.items()}
    chosen: list[Question] = []
    for number, line in enumerate(lines):
        if line.prompt is not None:
            base = _own_question(line, number, known[0], encode)
        elif line.prompt_class in pools:
            base = next(pools[line.prompt_class])
        else:
            raise ConfigError(
                f"The trace asks for class {line.prompt_class!r}, of which there are no prompts.",
                f"Choose from {', '.join(questions.by_class)}.",
            )
        chosen.append(replace(base, name=f"trace-{number}", max_tokens=line.max_tokens or base.max_tokens))
    classes = {question.prompt.prompt_class for question in chosen}
    name = classes.pop() if len(classes) == 1 and ALL not in classes else MIXED
    return Questions({name: chosen}, questions.num_left_out)


def _own_question(line: TraceLine, number: int, example: Question, encode: Encode) -> Question:
    prompt = Prompt(line.prompt_class or "other", messages=({"role": "user", "content": line.prompt},))
    ids = encode(prompt)
    if ids is None:
        raise ConfigError(f"Request {number} of the trace does not fit in the model's context.", "Shorten it.")
    return replace(example, prompt=prompt, prompt_ids=ids)

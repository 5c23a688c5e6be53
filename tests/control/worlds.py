"""Worlds with a known truth: the engine's step without an engine, on a clock of its own.

A world says how often each class's drafter is right, what it states of itself, what asking it takes, and what a pass
takes in truth, which may be something else than the cost model that the controller was given. `Run` drives the real
`Drafting`, and so the whole control plane, through it. Whether a word is foreseen depends on the text and its place
alone, so the same words can be spoken again with any fixed depth (`fixed_s`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from understudy.control.classes import Line
from understudy.control.controller import ENGINE
from understudy.control.cost import PROFILED_ROWS, CostModel, Load
from understudy.core.control import Policy
from understudy.core.draft import Draft
from understudy.core.events import Event
from understudy.core.request import Request, SamplingParams
from understudy.drafters.base import Budget, Context
from understudy.engine.drafting import Drafting
from understudy.engine.proposal import Proposal
from understudy.engine.sequence import Sequence as Text

VOCAB_SIZE = 1000
PROMPT = (1, 2, 3, 4)
MOST_FIXED_DEPTH = 16
MAX_ROWS = 256

Factor = Callable[[int], float]
"""Something that changes with time: a number by cycle."""


def always(value: float) -> Factor:
    """It never changes."""
    return lambda cycle: value


def suddenly(before: float, after: float, *, at: int, until: int = 10**9) -> Factor:
    """It changes at one cycle, and back at another."""
    return lambda cycle: after if at <= cycle < until else before


def slowly(before: float, after: float, *, over: int) -> Factor:
    """It changes a little with each cycle."""
    return lambda cycle: before + (after - before) * min(1.0, cycle / over)


@dataclass(frozen=True)
class Class:
    """The truth of one class of texts."""

    name: str
    acceptance: Factor
    """How often a drafted word is right, given that those before it were."""
    decay: float = 1.0
    """By which each further position is right less often."""
    states: Callable[[float, random.Random], float] = lambda rate, rng: rate
    """What the drafter states of a word that is right at this rate."""
    temperature: float = 0.0
    num_words: int = 200

    def rate(self, cycle: int, position: int) -> float:
        """How often the word at a position of a draft (from 1) is right."""
        return self.acceptance(cycle) * self.decay ** (position - 1)


@dataclass(frozen=True)
class World:
    """All that is true."""

    classes: tuple[Class, ...]
    seed: int = 0
    num_texts: int = 20
    concurrency: int = 1
    plain_s: float = 0.02
    """A pass of one row, without drift."""
    row_cost: float = 0.02
    """What each further row adds, as a share of that."""
    padding: int = 1
    """Rows are computed in groups of this many."""
    drift: Factor = field(default_factory=lambda: always(1.0))
    drafted_factor: Factor = field(default_factory=lambda: always(1.0))
    """How much dearer a pass with drafted rows is than its rows say."""
    noise: float = 0.0
    """Spread of a pass's time, as a share of it."""
    hiccups: float = 0.0
    """Share of passes that take ten times as long."""
    asking_s: Factor = field(default_factory=lambda: always(0.0))
    """What asking the drafter takes, for all texts of a step together."""
    draft_cost: float | None = None
    """A pass of the draft model, as a share of a plain step; None where guesses come free."""
    reading_cost: float = 0.01
    """What reading one word takes it, as a share of a plain step."""
    slow_draft: Factor = field(default_factory=lambda: always(1.0))
    """How many times as long as it says the draft model's passes take."""
    first_s: float = 0.0
    """How much longer the first pass of a size takes, where passes are captured; such steps are not written down."""
    believed: Callable[[int], float] = lambda rows: 1.0
    """By which the cost model that the controller is given is wrong, by rows."""

    def pass_s(self, rows: int, drafted: int, cycle: int) -> float:
        """What a pass takes, before noise."""
        padded = -(-rows // self.padding) * self.padding
        seconds = self.plain_s * (1.0 + self.row_cost * (padded - 1)) * self.drift(cycle)
        return seconds * self.drafted_factor(cycle) if drafted else seconds

    def cost_model(self) -> CostModel:
        """What the controller believes at first."""
        return CostModel({rows: self.pass_s(rows, 0, 0) * self.believed(rows) for rows in PROFILED_ROWS})

    def luck(self, text: int) -> list[float]:
        """By place: a word is foreseen if its number is below the rate."""
        rng = random.Random(self.seed * 7919 + text)
        return [rng.random() for _ in range(len(PROMPT) + self.class_of(text).num_words + 64)]

    def class_of(self, text: int) -> Class:
        """Texts of all classes take turns."""
        return self.classes[text % len(self.classes)]


def word_at(place: int) -> int:
    """Every text says the same."""
    return 10 + place % 400


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Guessing:
    """A drafter whose truth is known, and which costs nothing but the asking."""

    name: ClassVar[str] = "guessing"

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        self._clock = clock
        self._rng = random.Random(world.seed)
        self._luck: dict[int, list[float]] = {}
        self._sizes: set[tuple[str, int]] = set()
        self.cycle = 0

    @property
    def num_firsts(self) -> int:
        """Passes that were the first of their size."""
        return len(self._sizes)

    def first_s(self, whose: str, rows: int) -> float:
        """How much longer a pass takes if it is the first of its size."""
        size = whose, rows.bit_length()
        is_first = self._world.first_s > 0.0 and size not in self._sizes
        self._sizes |= {size} if is_first else set()
        return self._world.first_s if is_first else 0.0

    def start(self, context: Context) -> None:
        """Foresee which of the text's words are easy."""
        self._luck[context.sequence_id] = self._world.luck(context.sequence_id)

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a text."""
        del self._luck[context.sequence_id]

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Guess for each."""
        self._clock.now += self._world.asking_s(self.cycle)
        return [self.guess(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def guess(self, context: Context, budget: Budget) -> Draft:
        """A chain that is right until the first word that was not easy enough."""
        luck, known = self._luck[context.sequence_id], self._world.class_of(context.sequence_id)
        tokens: list[int] = []
        stated: list[float] = []
        place = len(context.tokens)
        for position in range(1, min(budget.max_depth, budget.max_rows) + 1):
            rate = known.rate(self.cycle, position)
            here = place + position - 1
            tokens.append(word_at(here) if luck[here] < rate else word_at(here) + 500)
            stated.append(known.states(rate, self._rng))
            if not self.goes_on(budget, tokens, stated):
                break
        return Draft.chain(tokens, confidence=stated, source=self.name)

    def goes_on(self, budget: Budget, tokens: list[int], stated: list[float]) -> bool:
        """Guesses are free."""
        return True


class Priced(Guessing):
    """A draft model: each guess is a pass, and a text is read before the first."""

    name: ClassVar[str] = "priced"

    def __init__(self, world: World, clock: Clock) -> None:
        super().__init__(world, clock)
        assert world.draft_cost is not None
        self._read: dict[int, int] = {}
        self._pass_s = world.plain_s * world.draft_cost
        self._row_s = world.plain_s * world.reading_cost
        self.cost = CostModel({1: self._pass_s, 32: self._pass_s + 31 * self._row_s})

    def num_unread(self, context: Context) -> int:
        return max(1, len(context.tokens) - self._read.get(context.sequence_id, 0))

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        rows = sum(self.num_unread(context) for context in contexts)
        self._pass(rows)
        drafts = []
        for context, budget in zip(contexts, budgets, strict=True):
            self._read[context.sequence_id] = len(context.tokens)
            drafts.append(self.guess(context, budget))
        for _ in range(max(draft.depth for draft in drafts) - 1):
            self._pass(len(contexts))
        return drafts

    def _pass(self, rows: int) -> None:
        seconds = (self._pass_s + (rows - 1) * self._row_s) * self._world.slow_draft(self.cycle)
        first_s = self.first_s("draft", rows)
        self._clock.now += seconds + first_s
        if not first_s:
            self.cost.observe(Load(rows, 0, 0), seconds)  # as a draft model does

    def goes_on(self, budget: Budget, tokens: list[int], stated: list[float]) -> bool:
        """Ask before each further pass."""
        return bool(budget.goes_on(Draft.chain(tokens, confidence=stated, source=self.name)))


class _Cache:
    """As much of a cache as the load of a step asks for."""

    length = 0


class _Detokenizer:
    stopped = None
    may_stop = False

    def add_all(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def new_text(world: World, number: int) -> Text:
    """A real sequence with nothing behind it."""
    known = world.class_of(number)
    sampling = SamplingParams(temperature=known.temperature, max_tokens=known.num_words, seed=number)
    fakes: dict[str, Any] = {"cache": _Cache(), "detokenizer": _Detokenizer()}
    return Text(
        number,
        Request(request_id=str(number), prompt_ids=PROMPT, sampling=sampling, workload_class=known.name),
        seed=number,
        choice=0,
        eos_ids=(),
        max_context=10**6,
        vocab_size=VOCAB_SIZE,
        **fakes,
    )


@dataclass(frozen=True)
class Step:
    """What came of a step."""

    cycle: int
    texts: int
    num_words: int
    num_rows: int
    plain_s: float
    """A plain step of these texts, in truth."""
    believed_s: float
    """The same, as the controller believed."""
    worst_s: float
    """The longest pass that the controller reckoned with."""
    forward_s: float
    drafting_s: float
    """All that asking took, by whomever it will be paid."""
    unpaid_s: float
    """Reading that no ledger holds yet."""
    cycles_s: Mapping[str, float]
    """The one cycle that each ledger's window was given, before this step was written down."""
    asked_s: Mapping[str, float]
    """What asking took, by class, as it is written down in this step."""
    words: Mapping[str, int]
    rows: Mapping[str, int]
    spoke: Mapping[str, int]
    reason: str
    is_asleep: bool
    """Whether it was slept through: a plain step that no ledger holds."""


class Run:
    """A world, and the control plane in it."""

    def __init__(self, world: World, *, policy: Policy | None = None, control_share: float = 0.0) -> None:
        self.world = world
        self.clock = Clock()
        self.cost = world.cost_model()
        self.events: list[Event] = []
        self.drafter = Guessing(world, self.clock) if world.draft_cost is None else Priced(world, self.clock)
        self.drafting = Drafting(
            [self.drafter],
            cost=self.cost,
            vocab_size=VOCAB_SIZE,
            emit=self.events.append,
            policy=policy,
            control_share=control_share,
            clock=self.clock,
        )
        self.controller = self.drafting.controller
        self._settle = self.controller.settle
        self._asked_s: dict[str, float] = {}
        vars(self.controller)["settle"] = self._spy
        self.running: list[Text] = []
        self.next_text = 0
        self.cycle = 0
        self.began: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        """Cycles, by text."""
        self._rng = random.Random(world.seed + 1)

    def steps(self) -> Iterator[Step]:
        """Serve all texts."""
        while self._admit():
            yield self._step()

    def state(self) -> Speaking:
        """Who stands where now."""
        return Speaking([(t.sequence_id, len(t.tokens)) for t in self.running], self.next_text)

    def when(self, text: int, place: int) -> int:
        """The cycle in which a text stood at a place, about: so that what changes with time is the same for others."""
        began, ended = self.began[text], self.ended[text]
        return began + round((ended - began) * (place - len(PROMPT)) / self.world.class_of(text).num_words)

    def _admit(self) -> bool:
        while len(self.running) < self.world.concurrency and self.next_text < self.world.num_texts:
            text = new_text(self.world, self.next_text)
            self.began[self.next_text] = self.cycle
            self.next_text += 1
            self.running.append(text)
            self.drafting.start(text)
        return bool(self.running)

    def _step(self) -> Step:
        """As Engine.step does it."""
        self._asked_s = {}  # a step that is slept through is not written down, and asks nobody
        world, texts, cycle = self.world, self.running, self.cycle
        self.drafter.cycle = cycle
        base = Load.of((1, 0) for _ in texts)
        ready = [] if any(not text.num_generated for text in texts) else texts
        started, num_firsts = self.clock(), self.drafter.num_firsts
        found, reason = self.drafting.propose(ready, base, max_rows=MAX_ROWS, num_emitting=len(texts))
        drafting_s = self.clock() - started
        proposals = found if ready else [Proposal()] * len(texts)
        rows = by_name((t, len(p.bought) + len(p.scouts)) for t, p in zip(texts, proposals, strict=True))
        num_rows = sum(rows.values())
        load = Load(base.rows + num_rows, base.keys, base.reads)
        forward_s = world.pass_s(load.rows, num_rows, cycle) * self._disturbance()
        forward_s += self.drafter.first_s("target", load.rows)
        self.clock.now += forward_s
        believed_s, predicted_s = self.cost.step_s(base), self.cost.step_s(load, base)
        worst_s = self.controller._worst.of(num_rows, predicted_s)
        ledgers = {ENGINE: self.controller._engine, **self.controller._classes}
        cycles_s = {name: known.ledger.cycle_s for name, known in ledgers.items()}
        words: dict[int, int] = {}
        time = self.drafting.take_time()
        unpaid_s = sum(reading.seconds for reading in time.readings)
        for text, proposal in zip(texts, proposals, strict=True):
            said, path = speak(text, proposal.bought)
            words[text.sequence_id] = len(said)
            if not self.drafting.is_asleep:
                self.drafting.observe(text, proposal, said, path)
            unpaid_s += text.unpaid_s
            if text.finish_reason is not None:
                self.ended[text.sequence_id] = cycle
                self.drafting.stop(text)
            text.ledger.add(plain_step_s=believed_s, step_s=predicted_s + drafting_s, num_words=len(said))
        if self.drafting.is_asleep:
            pass  # nothing of it is written down
        elif self.drafter.num_firsts == num_firsts:
            self.drafting.settle(texts, base=base, load=load, forward_s=forward_s, drafting=time)
            self.cost.observe(load, forward_s, base)
        else:
            self.drafting.forget_step()
        self.cycle += 1
        step = Step(
            cycle=cycle,
            texts=len(texts),
            num_words=sum(words.values()),
            num_rows=num_rows,
            plain_s=world.pass_s(base.rows, 0, cycle),
            believed_s=believed_s,
            worst_s=worst_s,
            forward_s=forward_s,
            drafting_s=drafting_s,
            unpaid_s=unpaid_s,
            cycles_s=cycles_s,
            asked_s=self._asked_s,
            words=by_name((t, words[t.sequence_id]) for t in texts),
            rows=rows,
            spoke=by_name((t, 1) for t in texts),
            reason=reason,
            is_asleep=self.drafting.is_asleep,
        )
        self.running = [text for text in texts if text.finish_reason is None]
        return step

    def _spy(self, texts: Mapping[Line, int], **numbers: Any) -> None:
        """See what asking is written down with, by class, and pass it on."""
        self._asked_s = {}
        for by_line in numbers["drafting_s"].values():
            for line, seconds in by_line.items():
                self._asked_s[line.workload_class] = self._asked_s.get(line.workload_class, 0.0) + seconds
        self._settle(texts, **numbers)

    def _disturbance(self) -> float:
        factor = 1.0 + self.world.noise * self._rng.uniform(-1.0, 1.0)
        return factor * (10.0 if self._rng.random() < self.world.hiccups else 1.0)


def speak(text: Text, draft: Draft) -> tuple[list[int], list[int]]:
    """Say the words of a step: along the draft as far as it is right, and one more. Also the nodes that were right."""
    said: list[int] = []
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        word = word_at(len(text.tokens))
        said.append(word)
        goes_on = text.append(word)
        node = draft.child(node, word)
        if node is not None:
            path.append(node)
        if not goes_on:
            break
    return said, path[: len(said)]


def by_name(pairs: Iterator[tuple[Text, int]]) -> dict[str, int]:
    """Numbers added up by class."""
    sums: dict[str, int] = {}
    for text, number in pairs:
        name = text.request.workload_class
        sums[name] = sums.get(name, 0) + number
    return sums


@dataclass
class Speaking:
    """Texts and where they stand, and the next one to come."""

    places: list[tuple[int, int]]
    next_text: int


def fixed_s(
    world: World, state: Speaking, depths: Mapping[str, int], *, when: Callable[[int, int], int]
) -> dict[str, float]:
    """What the rest of a world takes if every step of a class drafts to one depth: seconds by class.

    `when`: the cycle of a text's place, which tells how things stand then.
    """
    places, next_text = list(state.places), state.next_text
    luck: dict[int, list[float]] = {}
    spent: dict[str, float] = dict.fromkeys(depths, 0.0)
    while True:
        while len(places) < world.concurrency and next_text < world.num_texts:
            places.append((next_text, len(PROMPT)))
            next_text += 1
        if not places:
            return spent
        is_plain = any(place == len(PROMPT) for _, place in places)
        cycle = when(*places[0])
        num_rows, after = 0, []
        for text, place in places:
            known = world.class_of(text)
            if text not in luck:
                luck[text] = world.luck(text)
            left = len(PROMPT) + known.num_words - place
            depth = 0 if is_plain else min(depths[known.name], left - 1)
            rate = known.acceptance(cycle)
            position = 1
            while position <= depth and luck[text][place + position - 1] < rate * known.decay ** (position - 1):
                position += 1
            num_rows += depth
            if position < left:
                after.append((text, place + position))
        seconds = world.pass_s(len(places) + num_rows, num_rows, cycle)
        if num_rows:
            seconds += world.asking_s(cycle) + (world.draft_cost or 0.0) * world.plain_s * max(depths.values())
        for text, _ in places:
            spent[world.class_of(text).name] += seconds / len(places)
        places = after

"""Random cases: questions with their plain answers, and engines that must give the same ones.

A `Question` is a prompt with sampling settings, answered once, alone, by an engine without a drafter. A `Case` asks
some of them at once of an engine with any drafter, little room, late arrivals and aborts. `play` runs a case and
raises an AssertionError where anything differs from the plain answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.engine import scripted
from tests.engine.engines import MOST_STEPS, PAGE, Answer, FixedCost, new_engine, run_alone
from tests.engine.scripted import Book
from understudy.assembly import Target, built_in_drafters, with_draft
from understudy.core.events import Cycle, Event, Preempted
from understudy.core.request import Grammar, Request, SamplingParams, Speculation
from understudy.drafters.base import Drafter
from understudy.drafters.lookahead import LookaheadDrafter
from understudy.drafters.model import ModelDrafter
from understudy.drafters.ngram import NgramDrafter
from understudy.drafters.suffix import SuffixDrafter
from understudy.engine.engine import Engine
from understudy.runtime.runner import Runner

LONGEST_PROMPT = 110
FREE_TOKENS = 30
"""How far the book goes: beyond any answer, so that drafts run on past a stop."""
_SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["other", "index", "print"],
 "properties": {"other": {"type": "string", "maxLength": 5}, "index": {"enum": [10, 11]}, "print": {"const": 0}}}"""
GRAMMARS = (
    Grammar("json_schema", _SCHEMA),
    Grammar("regex", "the (cat|dog|other one) (and the (cat|dog) )*went there[.]"),
    Grammar("regex", "[a-z ]+"),
    Grammar("lark", 'start: "(" start ")" | /[0-9]{1,6}/ | "return a + b"'),
)
"""Texts of which most is forced, of which some is and that may have no end, and of which nothing is."""


@dataclass(frozen=True)
class Question:
    """A prompt, how to continue it, and how the plain engine did, one answer for each choice."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str
    answers: list[Answer]
    prediction_ids: tuple[int, ...] = ()

    def request(self, request_id: str, speculation: Speculation | None = None) -> Request:
        """Ask it."""
        return Request(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            speculation=speculation or Speculation(),
            tenant=self.tenant,
            prediction_ids=self.prediction_ids,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that it needs when it runs alone."""
        return -(-(len(self.prompt_ids) + self.sampling.max_tokens) // PAGE)

    @property
    def grows(self) -> bool:
        """Whether an answer needs a block that the prompt did not."""
        longest = max(len(answer.token_ids) for answer in self.answers)
        return len(self.prompt_ids) < PAGE < len(self.prompt_ids) + longest


class Library:
    """Makes questions about a few documents, so that prompts share their beginnings, and keeps the book."""

    def __init__(self, target: Target, rng: random.Random, *, max_context: int | None = None) -> None:
        self.target = target
        self.rng = rng
        self.max_context = max_context
        self.book = Book()
        self.vocab_size = target.decoder.config.vocab_size
        self._plain = new_engine(target, prefix_cache=False, max_context=max_context)
        self._documents = [[self._any_token() for _ in range(LONGEST_PROMPT)] for _ in range(3)]

    def question(self) -> Question:
        """Make one up and answer it plainly, alone."""
        prompt_ids = self._prompt()
        sampling = self._sampling()
        free = self._run(prompt_ids, self._without_end(sampling))
        for choice, answer in enumerate(free):
            self.book.write(_seed(sampling), choice, [*prompt_ids, *answer.token_ids])
        sampling = self._with_end(sampling, self.rng.choice(free))
        tenant = self.rng.choice(("", "", "", "ann"))
        prediction_ids = self._prediction(self.rng.choice(free)) if self.rng.random() < 0.3 else ()
        return Question(prompt_ids, sampling, tenant, self._run(prompt_ids, sampling), prediction_ids)

    def _prediction(self, free: Answer) -> tuple[int, ...]:
        """What the answer may be: with a token replaced, left out or put in here and there, or something else."""
        if self.rng.random() < 0.2:
            return tuple(self._any_token() for _ in range(20))
        changed: list[int] = []
        for token in free.token_ids:
            changed += self.rng.choice(([token],) * 8 + ([self._any_token()], [], [token, self._any_token()]))
        return tuple(changed)

    def _run(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> list[Answer]:
        return run_alone(self._plain, Request(request_id="plain", prompt_ids=prompt_ids, sampling=sampling))

    def _prompt(self) -> tuple[int, ...]:
        longest = min(LONGEST_PROMPT, (self.max_context or LONGEST_PROMPT + 1) - 1)
        near_page = self.rng.choice((20, 25, 31, 32, 33, 50, 64, 65))
        length = self.rng.choice((self.rng.randint(1, 20), self.rng.randint(1, longest), near_page))
        if self.max_context is not None and self.rng.random() < 0.15:
            length = longest - self.rng.randint(0, 20)
        document = self.rng.choice(self._documents)
        tail = [self._any_token() for _ in range(self.rng.choice((0, 0, 1, 5)))]
        return tuple((document[: max(0, length - len(tail))] + tail)[:length])

    def _sampling(self) -> SamplingParams:
        """The settings that change how a word is drawn."""
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 1.7)),
            top_k=rng.choice((0, 0, 0, 1, 5, 40, 1000)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.5, 0.1)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.7)),
            presence_penalty=rng.choice((0.0, 0.0, 1.5, -1.0)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.8, -0.5)),
            logit_bias={self._any_token(): rng.uniform(-5, 5) for _ in range(rng.choice((0, 0, 0, 6)))},
            max_tokens=rng.choice((1, 2, rng.randint(3, 24), 24, 24, 24)),
            seed=rng.getrandbits(64),
            n=rng.choice((1, 1, 1, 2, 3)),
            logprobs=rng.choice((None, None, 0, 3)),
            prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
            grammar=rng.choice((None, None, None, rng.choice(GRAMMARS))),
        )

    def _without_end(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, max_tokens=FREE_TOKENS, ignore_eos=True, logprobs=None, prompt_logprobs=None)

    def _with_end(self, sampling: SamplingParams, free: Answer) -> SamplingParams:
        """Choose stop conditions that the free text runs into."""
        rng = self.rng
        stop: list[str] = []
        stop_ids: list[int] = []
        if free.text and rng.random() < 0.4:
            start = rng.randrange(len(free.text))
            stop.append(free.text[start : start + rng.randint(1, 5)])
        if rng.random() < 0.1:
            stop += ["the", "\n", "a"]
        if rng.random() < 0.25:
            stop_ids.append(rng.choice(free.token_ids))
        return replace(
            sampling,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_ids),
            ignore_eos=rng.random() < 0.4,
            min_tokens=rng.choice((0, 0, 0, rng.randint(0, sampling.max_tokens))),
        )

    def _any_token(self) -> int:
        return self.rng.randrange(self.vocab_size)


def _seed(sampling: SamplingParams) -> int:
    assert sampling.seed is not None
    return sampling.seed


@dataclass
class Tally:
    """What happened over many cases: proof that they were not empty."""

    cases: int = 0
    steps: int = 0
    """Steps that computed something."""
    accepted: int = 0
    rejected: int = 0
    off_line: int = 0
    """Accepted paths that did not lie in line in the cache."""
    stops_inside: int = 0
    """Ends that fell on a drafted token with more of the draft below it."""
    preemptions: int = 0
    prefix_hits: int = 0
    aborted: int = 0
    ends_of_text: int = 0
    stop_ids: int = 0
    stop_strings: int = 0
    full_lengths: int = 0
    full_contexts: int = 0
    forced: int = 0
    """Accepted tokens that a grammar had forced."""
    predicted: int = 0
    """Accepted tokens that the caller had expected."""
    scored: int = 0
    """Answers that came with the log probabilities of their prompts."""

    def add(self, other: Tally) -> None:
        """Count another's cases as well."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)

    def see(self, event: Event) -> None:
        """Count events of the engine."""
        self.preemptions += isinstance(event, Preempted)
        self.steps += isinstance(event, Cycle)

    def watch(self, engine: Engine) -> None:
        """Look over the shoulder of an engine's verify."""
        verify = engine._verify

        def watched(share: Any, proposal: Any, logits: Any) -> Any:
            verdict = verify(share, proposal, logits)
            path = verdict.path
            self.accepted += verdict.num_accepted
            self.rejected += verdict.num_rejected
            self.off_line += path != list(range(len(path)))
            self.forced += sum(verdict.draft.sources[node] == "forced" for node in path)
            self.predicted += sum(verdict.draft.sources[node] == "prediction" for node in path)
            self.stops_inside += verdict.cut and bool(path) and path[-1] in verdict.draft.parents
            return verdict

        engine._verify = watched  # type: ignore[method-assign]

    def count_end(self, question: Question, answer: Answer, max_context: int | None) -> None:
        """Count why an answer ended."""
        length = len(question.prompt_ids) + len(answer.token_ids)
        self.full_contexts += answer.finish_reason == "length" and length == max_context
        self.full_lengths += answer.finish_reason == "length" and len(answer.token_ids) == question.sampling.max_tokens
        self.ends_of_text += answer.finish_reason == "stop" and answer.stop_reason is None
        self.stop_ids += isinstance(answer.stop_reason, int)
        self.stop_strings += isinstance(answer.stop_reason, str)
        self.scored += bool(answer.prompt_logprobs)

    def empty(self) -> list[str]:
        """What never happened."""
        return [name for name, count in vars(self).items() if not count]


@dataclass(frozen=True)
class Entry:
    """One request of a case."""

    question: Question
    speculation: Speculation
    arrival: int
    """The step before which it arrives."""
    abort: int | None
    """The step before which it is aborted."""


@dataclass(frozen=True)
class Case:
    """Some questions at once, of one engine."""

    entries: list[Entry]
    drafters: list[Drafter]
    num_blocks: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        names = [type(drafter).__name__ for drafter in self.drafters]
        return f"{names}, {self.num_blocks} blocks, {self.settings}, {self.entries}"


DRAFTERS: tuple[Callable[[Book, random.Random, int], list[Drafter]], ...] = (
    lambda *script: [scripted.Mixed(*script)],
    lambda *script: [scripted.Mixed(*script), scripted.RandomTrees(*script)],
    lambda *script: [scripted.Mixed(*script), NgramDrafter(min_n=1), SuffixDrafter(min_match=1)],
    lambda *script: [scripted.Right(*script)],
    lambda *script: [scripted.Wrong(*script)],
    lambda *script: [scripted.RandomTrees(*script)],
    lambda *script: [scripted.OutOfVocabulary(*script)],
    lambda *script: [scripted.OverLong(*script)],
    lambda *script: [scripted.Duplicates(*script)],
    lambda *script: [scripted.SometimesRaising(*script), scripted.Raising(*script)],
    lambda *script: [SuffixDrafter(min_match=1), NgramDrafter(min_n=1)],
    lambda *script: [LookaheadDrafter()],
    lambda *script: [scripted.Mixed(*script), LookaheadDrafter(num_columns=3, num_levels=2)],
)


def random_case(library: Library, questions: Sequence[Question], rng: random.Random) -> Case:
    """Draw a case: who asks what when, of what engine."""
    script = (library.book, rng, library.vocab_size)
    max_rows = rng.choice((1, 2, 3, 7, 16, 16, 40, 40, 256, 256))
    pool = [question for question in questions if max_rows > 3 or len(question.prompt_ids) <= 20]
    growing = [question for question in pool if question.grows]
    is_crowd = bool(growing) and rng.random() < 0.3
    asked = rng.choices(growing, k=rng.randint(3, 6)) if is_crowd else _guests(pool, rng)
    needed = max(question.num_blocks for question in asked)
    drafters = rng.choice(DRAFTERS[:3] if rng.random() < 0.4 else DRAFTERS)(*script)
    if rng.random() < 0.5:
        drafters = [*built_in_drafters(), *drafters]
    if rng.random() < 0.1:
        drafters.append(_draft_model(library.target, num_blocks=rng.choice((2, 5, 64))))
    return Case(
        entries=[_entry(question, [drafter.name for drafter in drafters], rng) for question in asked],
        drafters=drafters,
        # a crowd of these finds room at first, when each needs one block, and not enough of it later
        num_blocks=max(needed, rng.choice((3, 5, 7))) if is_crowd else rng.choice((needed, needed + 1, needed + 3, 64)),
        settings={
            "prefix_cache": rng.random() < 0.7,
            "max_rows_per_step": max_rows,
            "max_sequences": 64 if is_crowd else rng.choice((1, 2, 8, 64)),
            "max_context": library.max_context,
        },
    )


def _draft_model(target: Target, *, num_blocks: int) -> Drafter:
    """The target's own first layer as its draft, at times with too little room for everybody."""
    draft = with_draft(target, "layers:1").draft
    assert draft is not None
    runner = Runner(draft.decoder, num_blocks=num_blocks, page_tokens=PAGE)
    return ModelDrafter(runner, draft.vocabulary, cost=FixedCost({1: 0.1}))


def _guests(pool: Sequence[Question], rng: random.Random) -> list[Question]:
    """Any questions; at times the same document again, for the prefix cache."""
    asked = rng.choices(pool, k=rng.randint(1, 6))
    if rng.random() < 0.4:
        asked += [question for question in pool if question.prompt_ids[:PAGE] == asked[0].prompt_ids[:PAGE]][:2]
    return asked


def _entry(question: Question, drafters: Sequence[str], rng: random.Random) -> Entry:
    return Entry(
        question,
        _speculation(drafters, rng),
        arrival=rng.choice((0, 0, 1, 5, 15)),
        abort=rng.choice((0, 3, 8, 20)) if rng.random() < 0.1 else None,
    )


def _speculation(drafters: Sequence[str], rng: random.Random) -> Speculation:
    return Speculation(
        enabled=rng.random() < 0.95,
        max_depth=rng.choice((0, 1, 3, 16, 16, 64)),
        max_rows=rng.choice((1, 4, 12, 32, 32)),
        drafter=rng.choice(drafters) if rng.random() < 0.2 else None,
        forced=rng.random() < 0.8,
    )


def play(target: Target, case: Case, tally: Tally, on_step: Callable[[Engine], None] = lambda engine: None) -> None:
    """Run a case to its end and compare every answer with the plain one."""
    engine = new_engine(
        target, drafters=case.drafters, emit=tally.see, num_blocks=case.num_blocks, **case.settings
    )  # fmt: skip
    tally.watch(engine)
    answers = _run_entries(engine, case.entries, tally, on_step)
    engine.check()
    assert engine.num_free_blocks == case.num_blocks, "idle, but not all blocks are back"
    for index, entry in enumerate(case.entries):
        for choice, plain in enumerate(entry.question.answers):
            _compare(answers[str(index), choice], plain, may_be_cut=entry.abort is not None)
            tally.count_end(entry.question, plain, case.settings["max_context"])
    tally.cases += 1


def _run_entries(
    engine: Engine, entries: Sequence[Entry], tally: Tally, on_step: Callable[[Engine], None]
) -> dict[tuple[str, int], Answer]:
    answers = {(str(i), choice): Answer() for i, e in enumerate(entries) for choice in range(e.question.sampling.n)}
    sequences = []
    last_arrival = max(entry.arrival for entry in entries)
    step = 0
    while engine.has_work or step <= last_arrival:
        for index in _due(entries, step, lambda entry: entry.arrival):
            sequences += engine.submit(entries[index].question.request(str(index), entries[index].speculation))
        for index in _due(entries, step, lambda entry: entry.abort):
            engine.abort(str(index))
            tally.aborted += 1
        for output in engine.step():
            answers[output.request_id, output.choice].extend(output)
        on_step(engine)
        step += 1
        assert step < MOST_STEPS, "the engine does not come to an end"
    tally.prefix_hits += sum(sequence.cached_tokens > 0 for sequence in sequences)
    return answers


def _due(entries: Sequence[Entry], step: int, when: Callable[[Entry], int | None]) -> Iterable[int]:
    return [index for index, entry in enumerate(entries) if when(entry) == step]


def _compare(answer: Answer, plain: Answer, *, may_be_cut: bool) -> None:
    if may_be_cut and answer.finish_reason == "abort":
        assert answer.begins(plain), f"aborted: {answer} does not begin {plain}"
    else:
        assert answer == plain, f"{answer}\nis not the plain answer\n{plain}"

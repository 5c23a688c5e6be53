"""Suffix drafting: what followed the longest piece of text that ends like this one.

Prompt lookup copies from one place. Here every earlier place counts: an automaton (automaton.py) knows each
substring of the request so far and how often each token came after it, so the draft is a tree whose branches are
weighed by how often they were taken. The same is kept of the tenant's finished answers, since the next request of
a program with tools, a form or a template says much of what the last one said.

    own request      one automaton per sequence over prompt and answer, extended as tokens are committed
    tenant history   generations of finished answers; the youngest learns, the oldest is dropped first

The source with the longest match wins; of equals the request itself, then the youngest generation. Tenants never
see each other's text. Everything that depends on the length of the text is incremental: a sequence keeps a cursor
per source, and a proposal costs its new tokens and the rows of its tree.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from understudy.core.draft import EMPTY, Draft
from understudy.drafters.automaton import ROOT, Automaton, Ints, grow
from understudy.drafters.base import Budget, Context
from understudy.errors import ConfigError
from understudy.sampling.noise import NoiseKey

_HEADROOM_TOKENS = 512
"""Room for an answer beside the prompt, so that the arrays of a short answer never double while it is written."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A stretch of a tenant's history. The serial is never used again, so that old cursors cannot be mistaken."""

    serial: int
    automaton: Automaton


class History:
    """Finished answers, per tenant. Whole generations are dropped, the oldest first, and so are idle tenants."""

    def __init__(self, *, generation_tokens: int, max_generations: int, max_tenants: int) -> None:
        self._generation_tokens = generation_tokens
        self._max_tenants = max_tenants
        self._max_generations = max_generations
        self._serials = itertools.count()
        self._tenants: OrderedDict[str, deque[Generation]] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        """Return the number of tenants remembered."""
        return len(self._tenants)

    def generations(self, tenant: str) -> Iterable[Generation]:
        """Return what is remembered of a tenant, the youngest generation first, and count it as used."""
        generations = self._tenants.get(tenant)
        if generations is None:
            return ()
        self._tenants.move_to_end(tenant)
        return generations

    def learn(self, tenant: str, answer: Sequence[int]) -> None:
        """Add an answer; of one that no generation could hold, its end."""
        tokens = np.array(answer[-self._generation_tokens :], np.int32)
        if not len(tokens):
            return
        generations = self._tenants.setdefault(tenant, deque(maxlen=self._max_generations))
        self._tenants.move_to_end(tenant)
        # A deque that is full drops its other end, the oldest.
        if not generations or generations[0].automaton.num_tokens + len(tokens) > self._generation_tokens:
            generations.appendleft(Generation(next(self._serials), Automaton(capacity_tokens=len(tokens))))
        generations[0].automaton.learn(tokens)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Match:
    """A place in an automaton: the last `length` tokens of the sequence are a string of `state`."""

    automaton: Automaton
    state: int
    length: int


@dataclass(slots=True)
class _Sequence:
    """What is known of a running request."""

    own: Automaton
    num_read: int = 0
    """Tokens that `own` and every cursor have read."""
    cursors: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Serial of a generation -> its version then, state, length."""


class SuffixDrafter:
    """Drafts a tree of what followed the longest earlier match, in this request or in the tenant's past answers."""

    name: ClassVar[str] = "suffix"

    def __init__(
        self,
        *,
        min_match: int = 1,
        max_match: int = 64,
        max_width: int = 3,
        min_survival: float = 0.02,
        generation_tokens: int = 65536,
        max_generations: int = 4,
        max_tenants: int = 64,
    ) -> None:
        counts = (min_match, max_width, generation_tokens, max_generations, max_tenants)
        if min(counts) < 1 or max_match < min_match or not 0.0 < min_survival <= 1.0:
            raise ConfigError(
                "suffix: a limit is out of range.",
                "Give counts of at least 1, max_match >= min_match and 0 < min_survival <= 1.",
            )
        self._min_match = min_match
        self._max_match = max_match
        self._max_width = max_width
        self._min_survival = min_survival
        self._sequences: dict[int, _Sequence] = {}  # by sequence id
        self.history = History(
            generation_tokens=generation_tokens, max_generations=max_generations, max_tenants=max_tenants
        )
        self._compile()

    def start(self, context: Context) -> None:
        """Do nothing yet: the prompt is read when a draft is asked for, not while its first word is awaited."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one tree for each context, empty where its end is new."""
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget the sequence; a whole answer goes into its tenant's history."""
        self._sequences.pop(context.sequence_id, None)
        if finished:
            self.history.learn(context.tenant, context.tokens[context.num_prompt_tokens :])

    def _propose(self, context: Context, budget: Budget) -> Draft:
        if budget.max_rows <= 0 or budget.max_depth <= 0:
            return EMPTY
        match = self._longest_match(context)
        if match.length < self._min_match:
            return EMPTY
        tokens, parents, confidence = grow(
            match.automaton.states,
            match.automaton.edges,
            match.state,
            match.length,
            len(context.tokens),
            budget.max_rows,
            budget.max_depth,
            self._max_width,
            self._min_survival,
            float(context.temperature),
            np.uint64(context.noise.seed),
            context.noise.choice,
        )
        sources = (self.name,) * len(tokens)
        return Draft(tuple(tokens.tolist()), tuple(parents.tolist()), tuple(confidence.tolist()), sources)

    def _longest_match(self, context: Context) -> _Match:
        """Bring every cursor of the sequence to the end of its context; return the longest match."""
        sequence = self._sequences.get(context.sequence_id)
        if sequence is None:
            own = Automaton(capacity_tokens=len(context.tokens) + _HEADROOM_TOKENS)
            sequence = self._sequences[context.sequence_id] = _Sequence(own)
        assert len(context.tokens) >= sequence.num_read, "a context never shrinks"
        unread = np.array(context.tokens[sequence.num_read :], np.int32)
        longest = _Match(sequence.own, *sequence.own.read(unread, self._max_match))
        for generation in self.history.generations(context.tenant):
            match = self._follow(sequence, generation, unread, context.tokens)
            if match.length > longest.length:
                longest = match
        sequence.num_read = len(context.tokens)
        return longest

    def _follow(self, sequence: _Sequence, generation: Generation, unread: Ints, tokens: list[int]) -> _Match:
        """Move the sequence's cursor in a generation over its unread tokens.

        A generation that is new or has learned since may hold a longer match than the cursor can know, so the
        last tokens are read again from the root; a match reaches no further back than `max_match` anyway.
        """
        automaton = generation.automaton
        version, state, length = sequence.cursors.get(generation.serial, (-1, ROOT, 0))
        if version != automaton.num_tokens:
            state, length, unread = ROOT, 0, np.array(tokens[-self._max_match :], np.int32)
        state, length = automaton.follow(state, length, unread, self._max_match)
        sequence.cursors[generation.serial] = (automaton.num_tokens, state, length)
        return _Match(automaton, state, length)

    def _compile(self) -> None:
        """Draft once from made-up text, so that no user's request waits for the compiler."""
        text = Context(
            sequence_id=-1, tokens=[0, 1, 0, 1], num_prompt_tokens=4, tenant="", temperature=1.0, noise=NoiseKey(0)
        )
        past = Automaton()
        past.learn(np.array(text.tokens, np.int32))
        past.follow(ROOT, 0, np.array(text.tokens, np.int32), self._max_match)
        self._propose(text, Budget(max_depth=1, max_rows=1))
        self._sequences.clear()

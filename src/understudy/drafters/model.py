"""A smaller model that speaks ahead: it has read the same text, and guesses with the same dice.

Its state is lengths, as the target's is. For each sequence it keeps the ids that its cache holds; what of them agrees
with the text as it came out is kept, and the rest is forgotten by setting a length. So a rejection, a prefix that the
target found in its cache and a preemption of the target are all the same thing: some tokens that it has not read yet.

    text        t0 t1 ... t9 | a b        what was said, and the target's two new words
    its cache   t0 t1 ... t9   a c d      what it read, and its own guesses of the last cycle
                             ^ length     "a" was right: b is all there is to read

A long text is read in pieces, one in each cycle, so that nobody waits for it. It is read only when a guess is asked
for, which is after the target's first word. Rows of all sequences share a pass; so do their next guesses.

The guess at a position is the largest of its own scores plus the target's noise there, under the request's own filters
(temperature, top-k, top-p, min-p). Nothing here needs to be exact: a worse guess is a slower one, never another word.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from understudy.control.cost import CostModel, Load
from understudy.control.planning import MOST_READ_ROWS
from understudy.core.dice import Dice
from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import PrefixCache
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner
from understudy.sampling.noise import gumbel
from understudy.sampling.processors import filtered_weights
from understudy.text.vocabulary import VocabularyMap

Floats = NDArray[np.float32]

_LEAST_WEIGHT = 1e-4
"""Tokens this much less likely than the best do not enter the draft's race: they would hardly ever win it."""


@dataclass(slots=True, eq=False)
class Text:
    """What the draft model knows of one sequence."""

    cache: SequenceCache
    ids: list[int] = field(default_factory=list)
    """The committed text in the draft's own ids."""
    num_translated: int = 0
    """Tokens of the target's text that `ids` spells."""
    computed: list[int] = field(default_factory=list)
    """The ids whose keys and values lie in the cache, guesses included."""
    num_agreed: int = 0
    """How many of them, from the front, were found to be those of the text."""
    dice: Dice | None = None
    """How guesses are drawn where a device does that."""
    num_guesses: int = 0
    """Guesses that were wanted for it, and computed, the last time it was asked about."""

    def agreement(self) -> int:
        """How many ids at the beginning of its cache are those of the text as it came out."""
        count = min(len(self.computed), len(self.ids))
        agreed = min(self.num_agreed, count)
        while agreed < count and self.computed[agreed] == self.ids[agreed]:
            agreed += 1
        self.num_agreed = agreed
        return agreed


class ModelDrafter:
    """Drafts chains with a model of its own."""

    name: ClassVar[str] = "model"

    def __init__(self, runner: Runner, vocabulary: VocabularyMap, *, cost: CostModel) -> None:
        self.cost = cost
        self._runner = runner
        self._vocabulary = vocabulary
        self._max_positions = runner.decoder.config.max_positions
        self._pool = BlockPool(runner.num_blocks)
        self._prefix = PrefixCache(self._pool, runner.page_tokens)
        self._texts: OrderedDict[int, Text] = OrderedDict()  # by sequence id, the least recently drafted first
        self._batch: list[Text] = []  # those of the present call: nobody takes their blocks
        self._draft_ids = np.flatnonzero(vocabulary.target_ids >= 0)  # what the target could say, in draft ids
        self._target_ids = vocabulary.target_ids[self._draft_ids].astype(np.int64)  # and in its own
        count = len(self._draft_ids)
        is_front = bool(np.array_equal(self._draft_ids, np.arange(count)))
        self._sayable: slice | NDArray[np.int64] = slice(count) if is_front else self._draft_ids

    def prepare(self) -> Iterator[None]:
        """Make usual passes ready."""
        return self._runner.prepare()

    def start(self, context: Context) -> None:
        """Read nothing yet: the first word must not wait for a draft."""

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget the text; whole blocks of it stay for texts that begin alike."""
        text = self._texts.pop(context.sequence_id, None)
        if text is not None:
            text.cache.release()

    def num_unread(self, context: Context) -> int:
        """Tokens that it must read before it can guess; texts that begin alike may have read some of them for it."""
        text = self._texts.get(context.sequence_id)
        if text is None:
            return len(context.tokens)
        self._translate(text, context)
        return max(1, len(text.ids) - text.agreement())

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one chain for each context; none for a text that is still being read."""
        drafts: list[list[int]] = [[] for _ in contexts]
        confidence: list[list[float]] = [[] for _ in contexts]
        texts = self._batch = [self._caught_up(context) for context in contexts]
        pending = self._read(texts, [b.max_depth > 0 and b.max_rows > 0 for b in budgets])
        while pending:
            ids = {index: self._guess(contexts[index], logits, drafts[index], confidence[index])
                   for index, logits in pending.items()}  # fmt: skip
            going = [
                index
                for index in ids
                if len(drafts[index]) < min(budgets[index].max_depth, budgets[index].max_rows)
                and budgets[index].goes_on(self._chain(drafts[index], confidence[index]))
            ]
            pending = self._step({index: (texts[index], ids[index]) for index in going})
        return [self._chain(*pair) for pair in zip(drafts, confidence, strict=True)]

    def _chain(self, tokens: list[int], confidence: list[float]) -> Draft:
        return Draft.chain(tokens, confidence=confidence, source=self.name) if tokens else EMPTY

    def _caught_up(self, context: Context) -> Text:
        """The sequence's text, brought to what was said: guesses that were wrong are forgotten."""
        text = self._texts.get(context.sequence_id)
        if text is None:
            cache = SequenceCache(self._pool, self._runner.page_tokens, self._prefix, context.tenant)
            text = self._texts[context.sequence_id] = Text(cache)
        self._texts.move_to_end(context.sequence_id)
        self._translate(text, context)
        if not text.cache.blocks:
            text.computed = text.ids[: text.cache.adopt_prefix(text.ids)]
        text.cache.length = min(text.agreement(), max(0, len(text.ids) - 1))
        del text.computed[text.cache.length :]
        return text

    def _translate(self, text: Text, context: Context) -> None:
        """Spell the words that came since the last look in the draft's ids."""
        for token in context.tokens[text.num_translated :]:
            text.ids.extend(self._vocabulary.to_draft(token))
        text.num_translated = len(context.tokens)

    def _read(self, texts: Sequence[Text], wanted: Sequence[bool]) -> dict[int, Floats]:
        """Read what is unread, as far as the rows of a cycle go; return the logits of texts that are read up."""
        room = MOST_READ_ROWS
        works: dict[int, Work] = {}
        for index, text in enumerate(texts):
            unread = text.ids[text.cache.length : text.cache.length + room]
            fits = len(text.ids) < self._max_positions  # beyond its own context it has nothing to say
            if wanted[index] and fits and unread and self._reserve(text, len(unread)):
                done = text.cache.length + len(unread) == len(text.ids)
                works[index] = Work(text.cache, unread, EMPTY, wants_logits=done)
                room -= len(unread)
        if not works:
            return {}
        logits = self._forward(list(works.values()))
        for index, work in works.items():
            texts[index].cache.commit(len(work.known), texts[index].ids)
            texts[index].computed.extend(work.known)
        return {
            index: found[0] for (index, work), found in zip(works.items(), logits, strict=True) if work.wants_logits
        }

    def _step(self, guesses: dict[int, tuple[Text, int]]) -> dict[int, Floats]:
        """One pass over the last guess of each text; return the logits that follow it."""
        works: dict[int, Work] = {}
        for index, (text, draft_id) in guesses.items():
            if text.cache.length < self._max_positions and self._reserve(text, 1):
                works[index] = Work(text.cache, [draft_id], EMPTY, wants_logits=True)
        if not works:
            return {}
        logits = self._forward(list(works.values()))
        for index, work in works.items():
            text = guesses[index][0]
            text.cache.length += 1  # a guess: not committed, so that no other text can find it
            text.computed.extend(work.known)
        return {index: found[0] for index, found in zip(works, logits, strict=True)}

    def _forward(self, works: list[Work]) -> list[Floats]:
        """One pass, which also keeps the cost model fresh."""
        load = Load.of((len(work.known), work.cache.length) for work in works)
        started = time.perf_counter()
        logits = self._runner.forward(works)
        self.cost.observe(load, time.perf_counter() - started)
        return logits

    def _reserve(self, text: Text, num_rows: int) -> bool:
        """Make room; the texts that were not drafted for longest give theirs up, and will be read again."""
        while not text.cache.reserve(num_rows):
            others = (other for other in self._texts.values() if other.cache.blocks and other not in self._batch)
            idle = next(others, None)
            if idle is None:
                return False
            idle.cache.release()
            idle.computed, idle.num_agreed = [], 0
        return True

    def _guess(self, context: Context, logits: Floats, tokens: list[int], confidence: list[float]) -> int:
        """Add the guess after these logits to the draft; return its draft id."""
        place, sureness = guess(
            logits[self._sayable], self._target_ids, context, position=len(context.tokens) + len(tokens)
        )
        tokens.append(int(self._target_ids[place]))
        confidence.append(sureness)
        return int(self._draft_ids[place])


def guess(scores: Floats, ids: NDArray[np.int64], context: Context, *, position: int) -> tuple[int, float]:
    """Return the place of the guess among scores [count] of the target's tokens ids [count], and how sure it is.

    Greedy: the largest score, and its probability. Sampled: the largest of score + noise, and how far it is ahead of
    the second: the gap of a race among equals is exponential, which 1 - exp(-gap) turns into a number from 0 to 1.
    """
    sampling = context.sampling
    best = int(scores.argmax())
    if context.temperature == 0.0:
        return best, 1.0 / float(np.exp(scores - scores[best]).sum())
    scaled = (scores - scores[best]) / np.float32(max(context.temperature, 1e-4))
    weights = filtered_weights(scaled, sampling)
    racing = np.flatnonzero(weights >= _LEAST_WEIGHT)
    totals = scaled[racing] + gumbel(context.noise, position, ids[racing])
    winner = int(totals.argmax())
    if len(racing) == 1:
        return int(racing[winner]), 1.0
    first, second = np.partition(totals, -2)[[-1, -2]]
    return int(racing[winner]), 1.0 - math.exp(-(float(first) - float(second)))

"""The draft model on a device that draws words by itself: a pass begins before the guess of the last one is seen.

    launch    read what is unread                guess 1 is drawn at its end
    launch    the row of guess 1, unseen         guess 2
    look at   guess 1: is a third one worth it?
    launch    the row of guess 2, unseen         guess 3
    look at   guess 2, and so on

So the device never waits for the host between two guesses. The price is that a chain is cut one guess late. The words
themselves stay on the device from pass to pass; the host only learns of them. The last guess is not waited for at all:
the draft names the place where it will be, and the target's pass is on its way before it is there.

The first pass may begin before anybody asks (`begin`), and the second behind it if there was one last time: the host
plans the next cycle while the device reads. A text that is not asked about after all has been read, and its guesses
are forgotten. One that is asked about and was not begun with, since it is new, is read beside the next guesses of the
others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from understudy.control.cost import Load
from understudy.control.planning import MOST_DEPTH, MOST_READ_ROWS
from understudy.core.dice import Dice
from understudy.core.draft import EMPTY, Draft
from understudy.drafters.base import Budget, Context, always
from understudy.drafters.model import ModelDrafter, Text
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Flight

_UNSEEN_CONFIDENCE = 0.7
"""What a first guess is believed before anybody has seen one."""
_RIVAL_SHARE = 0.5
"""How often the second is right where the first is not, until that is known."""
_ROWS_PER_GUESS = 2
"""Its own, and its rival's."""
_FEW_UNREAD = MOST_DEPTH + 1
"""After a draft a few words are unread, whatever became of it: more than that is read when it is asked for."""
_BLIND_DEPTH = 2
"""Guesses that are begun before anybody asks for them."""
_NOTHING = Budget(0, 0)


@dataclass(slots=True, eq=False)
class _Chain:
    """The draft of one text while it grows."""

    text: Text
    dice: Dice
    num_tokens: int
    """Of the text when its first guess was asked for."""
    index: int = -1
    """Its place among the contexts, and how far it may go: nobody has asked yet."""
    budget: Budget = _NOTHING
    tokens: list[int] = field(default_factory=list)
    """Guesses that were looked at."""
    confidence: list[float] = field(default_factory=list)
    rivals: list[int] = field(default_factory=list)
    """Who came second behind each of them; -1 for nobody."""
    num_launched: int = 0
    """Guesses that were asked for."""
    is_broken: bool = False
    """The model had nothing to say."""

    @property
    def most_guesses(self) -> int:
        """How many its budget has room for.

        The last one may do without a rival; a deeper one would take the place of one that is worth more.
        """
        return min(self.budget.max_depth, -(-self.budget.max_rows // _ROWS_PER_GUESS))

    @property
    def is_wanted(self) -> bool:
        """Whether anybody has asked for it."""
        return self.budget.max_depth > 0 and self.budget.max_rows > 0

    def goes_on(self, source: str) -> bool:
        """Whether one more guess is worth it, as far as the ones that were looked at can tell."""
        if self.is_broken or self.num_launched >= self.most_guesses:
            return False
        return not self.tokens or self.budget.goes_on is always or self.budget.goes_on(self.draft(source))

    def draft(self, source: str) -> Draft:
        """What was guessed, and looked at."""
        return Draft.chain(self.tokens, confidence=self.confidence, source=source) if self.tokens else EMPTY

    def tree(self, source: str, unseen: tuple[int, int] | None) -> Draft:
        """The guesses in line and, behind them all, their rivals: a row costs far less than a pass of the draft.

        `unseen` stands for one guess more, and its rival.
        """
        tokens, confidence, rivals = list(self.tokens), list(self.confidence), list(self.rivals)
        if unseen is not None:
            tokens.append(unseen[0])
            rivals.append(unseen[1])
            confidence.append(sum(confidence) / len(confidence) if confidence else _UNSEEN_CONFIDENCE)
        if not tokens:
            return EMPTY
        depth = len(tokens)
        # a number below -1 stands for a word that nobody has seen
        beside = [place for place, rival in enumerate(rivals) if rival != -1]
        return Draft(
            tokens=(*tokens, *(rivals[place] for place in beside)),
            parents=(*range(-1, depth - 1), *(place - 1 for place in beside)),
            confidence=(*confidence, *((1.0 - confidence[place]) * _RIVAL_SHARE for place in beside)),
            sources=(source,) * (depth + len(beside)),
        )


@dataclass(slots=True)
class _Pass:
    """A pass under way, and the chains that it draws a guess for, in order of their places."""

    flight: Flight
    chains: list[_Chain]
    num_going: int
    """Of the chains, from the front, those whose row is a guess; of the others what was unread is read."""
    load: Load
    launched_s: float
    """Or, behind one that was just begun, when that is expected to be over."""
    was_over: bool = False
    """Before anybody waited for it: nobody knows when."""
    is_timed: bool = True
    """Whether it is known when it began, and when it was over."""


class AheadModelDrafter(ModelDrafter):
    """Drafts chains with a model of its own, whose vocabulary is the target's."""

    rows_per_guess: ClassVar[int] = _ROWS_PER_GUESS
    _landed_s = 0.0
    _begun: tuple[_Pass, ...] = ()
    _last: _Pass | None = None
    unseen: frozenset[int] = frozenset()
    ready_s = 0.0
    _num_firsts = 0

    def begin(self, contexts: Sequence[Context]) -> bool:
        """Read what was said last, where that is little: the first guesses are on their way when they are asked for."""
        self._begun = ()
        self._num_firsts = self._runner.num_firsts
        met = [context for context in contexts if context.sequence_id in self._texts]
        chains = [self._new_chain(context) for context in met]
        self._batch = [chain.text for chain in chains]
        few = [chain for chain in chains if len(chain.text.ids) - chain.text.cache.length <= _FEW_UNREAD]
        first = self._launch_next(None, few)
        if first is None:
            return False
        # as far as last time, but for what is better seen first; all of them: whoever has no row cannot go on
        depth = min(_BLIND_DEPTH, max((chain.text.num_guesses for chain in first.chains), default=0))
        for chain in first.chains:
            chain.budget = Budget(depth, _ROWS_PER_GUESS * depth)
        second = self._launch_next(first, ())
        for chain in first.chains:
            chain.budget = _NOTHING  # nobody has asked
        self.ready_s = first.launched_s + self.cost.step_s(first.load)
        self._begun = (first,)
        if second is not None:
            second.launched_s = max(second.launched_s, self.ready_s)
            self.ready_s = second.launched_s + self.cost.step_s(second.load)
            self._begun = (first, second)
        return True

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one chain for each context; none for a text that is still being read."""
        passes, self._begun = self._begun, ()
        underway = passes[-1] if passes else None
        if underway is None:
            self._num_firsts = self._runner.num_firsts
        is_known = True
        for one in passes:  # if all are over the device rests: the next pass begins when it is launched
            one.was_over = one.flight.is_over
            one.is_timed, is_known = is_known and not one.was_over, not one.was_over
        for one, second in pairwise(passes):
            self._look(one, second)
        begun = {chain.text: chain for one in passes for chain in one.chains}
        chains = [self._chain_of(context, budget, begun) for context, budget in zip(contexts, budgets, strict=True)]
        for index, chain in enumerate(chains):
            chain.index = index
        self._batch = [chain.text for chain in chains]
        unread = [chain for chain in chains if chain.is_wanted and not chain.num_launched]
        while (following := self._launch_next(underway, unread)) is not None:
            if underway is not None:
                self._look(underway, following)
            underway, unread = following, []
        for chain in chains:
            chain.text.num_guesses = min(chain.num_launched, chain.most_guesses)
        self._last = underway
        if underway is not None:
            self.ready_s = max(underway.launched_s, self._landed_s) + self.cost.step_s(underway.load)
        names = {} if underway is None else {c.index: pair for c, pair in self._names(underway) if c.is_wanted}
        self.unseen = frozenset(number for pair in names.values() for number in pair)
        return [chain.tree(self.name, names.get(chain.index)) for chain in chains]

    def _chain_of(self, context: Context, budget: Budget, begun: Mapping[Text, _Chain]) -> _Chain:
        """The chain that was begun for a text as it stands, or a new one."""
        text = self._texts.get(context.sequence_id)
        chain = None if text is None else begun.get(text)
        if chain is None or chain.num_tokens != len(context.tokens):
            chain = self._new_chain(context)
        chain.budget = budget
        return chain

    def _new_chain(self, context: Context) -> _Chain:
        text = self._caught_up(context)
        if text.dice is None:
            text.dice = _dice(context)
        return _Chain(text, text.dice, len(context.tokens))

    def take_words(self) -> dict[int, tuple[int, float]]:
        """Look at the last guesses."""
        last, self._last = self._last, None
        if last is None:
            return {}
        drawn = last.flight.drawn()
        self._landed_s = time.perf_counter()
        words: dict[int, tuple[int, float]] = {}
        for (_, (guess, rival)), token, sureness, second in zip(self._names(last), *drawn, strict=True):
            words[guess] = (token, sureness)
            words[rival] = (second, (1.0 - sureness) * _RIVAL_SHARE)
        return words

    def _names(self, underway: _Pass) -> list[tuple[_Chain, tuple[int, int]]]:
        """The chains of a pass, with the numbers that stand for the guess that it draws for each, and its rival."""
        first, rival = self._runner.first_place, self._runner.first_rival
        return [(chain, (-1 - first - place, -1 - rival - place)) for place, chain in enumerate(underway.chains)]

    def _launch_next(self, underway: _Pass | None, unread: Sequence[_Chain]) -> _Pass | None:
        """Compute the rows of the guesses that are being drawn, of the chains that go on, and read what is unread."""
        works: list[Work] = []
        going: list[_Chain] = []
        first = self._runner.first_place
        for place, chain in enumerate(underway.chains if underway is not None else (), first):
            cache = chain.text.cache
            if chain.goes_on(self.name) and cache.length < self._max_positions and self._reserve(chain.text, 1):
                works.append(Work(cache, [-1 - place], EMPTY, wants_logits=True, dice=chain.dice))
                going.append(chain)
        reading = self._reading(unread) if unread else []
        works += [work for _, work in reading]
        if not works:
            return None
        load = Load.of((len(work.known), work.cache.length) for work in works)
        launched_s = time.perf_counter()
        flight = self._runner.launch(works)
        for chain in going:
            chain.text.cache.length += 1  # a guess: not committed, so that no other text can find it
        for chain, work in reading:
            chain.text.cache.commit(len(work.known), chain.text.ids)
            chain.text.computed.extend(work.known)
        chains = going + [chain for chain, work in reading if work.wants_logits]
        for chain in chains:
            chain.num_launched += 1
        return _Pass(flight, chains, len(going), load, launched_s)

    def _reading(self, chains: Sequence[_Chain]) -> list[tuple[_Chain, Work]]:
        """What is unread, as far as the rows of a cycle go; texts that are read up get a guess."""
        room = MOST_READ_ROWS
        reading: list[tuple[_Chain, Work]] = []
        for chain in chains:
            text = chain.text
            unread = text.ids[text.cache.length : text.cache.length + room]
            fits = len(text.ids) < self._max_positions  # beyond its own context it has nothing to say
            if fits and unread and self._reserve(text, len(unread)):
                done = text.cache.length + len(unread) == len(text.ids)
                reading.append((chain, Work(text.cache, unread, EMPTY, wants_logits=done, dice=chain.dice)))
                room -= len(unread)
        return reading

    def _look(self, underway: _Pass, following: _Pass) -> None:
        """Learn what was guessed; the next pass computes the rows of some of the guesses."""
        drawn = underway.flight.drawn()
        landed = time.perf_counter()
        if underway.is_timed and self._runner.num_firsts == self._num_firsts:
            self.cost.observe(underway.load, landed - max(underway.launched_s, self._landed_s))
        if not underway.was_over:
            self._landed_s = landed
        for chain, token, sureness, rival in zip(underway.chains, *drawn, strict=True):
            chain.is_broken = chain.is_broken or token < 0
            if not chain.is_broken:
                chain.tokens.append(token)
                chain.confidence.append(sureness)
                chain.rivals.append(rival)
        for chain in following.chains[: following.num_going]:
            chain.text.computed.append(chain.tokens[-1] if not chain.is_broken else -1)


def _dice(context: Context) -> Dice:
    """The guess is drawn with the target's dice; what else its words hang on is not known ahead."""
    sampling, noise = context.sampling, context.noise
    return Dice(context.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise.seed, noise.choice)

"""Trained drafts beside a target on a GPU: hidden states and guesses stay there, and one launch is a whole draft.

    target's pass   leaves hidden states of its rows on the device
    see             which of them are part of the text now: nothing is copied to the host
    propose         one launch: new hidden states become context, and all guesses of a tree are drawn
    target's pass   names the guesses by their places: it is on its way before anybody has seen one

Which guess follows which is therefore fixed (core/static_tree.py); a budget chooses among them.

Its state is lengths, as the target's is: keys and values of the positions that were shown, in pages of its own.
Positions that were never shown are not attended to. The rows that guess lie behind them and are overwritten by the next
context.

Where one text is served alone the draft is launched as soon as its words are known, before anybody has asked: the host
plans the next pass while the device guesses.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from understudy.control.cost import CostModel, Load
from understudy.core.dice import Dice
from understudy.core.draft import EMPTY, Draft
from understudy.core.static_tree import Form, Guess
from understudy.drafters.base import Budget, Context
from understudy.kernels.cuda_blocks import MOST_CONTEXT, BlockLaunched, BlockPasses, BlockWork
from understudy.kernels.interface import ShownRows
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache

_FIRST_CONFIDENCE = 0.7
"""What a guess is believed before anybody has seen one."""
_CONFIDENCE_WEIGHT = 0.05
_MOST_PIECES = 32
"""Of what a text was shown and nobody read; more are joined."""
_RIVAL_SHARE = 0.5
"""How often the second is right where the first is not, until that is known."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Hidden states of positions that follow each other."""

    first: int
    """The first position"""
    states: Any
    """[rows, layers, hidden], of a whole pass, cut only when they are read: for most words nobody asks"""
    start: int
    count: int

    def part(self, start: int, count: int) -> _Piece:
        return _Piece(self.first + start, self.states, self.start + start, count)

    def cut(self) -> Any:
        return self.states[self.start : self.start + self.count]


@dataclass(slots=True, eq=False)
class _Text:
    """What the draft knows of one sequence."""

    cache: SequenceCache
    num_seen: int = 0
    """Where the next position that it will be shown stands, if none is left out."""
    pending: list[_Piece] = field(default_factory=list)
    """What was shown and not read"""
    num_pending: int = 0
    """Its positions"""
    last: _Piece | None = None
    """The last position that was read"""

    def add(self, piece: _Piece) -> None:
        """Take what is shown. Many pieces become one: each holds the states of a whole pass."""
        self.pending.append(piece)
        self.num_pending += piece.count
        if len(self.pending) > _MOST_PIECES:
            self.pending = _joined(self.pending)

    def take(self, most: int) -> tuple[list[int], list[Any]]:
        """The first positions that are pending, and their states."""
        positions: list[int] = []
        taken: list[Any] = []
        while self.pending and len(positions) < most:
            piece = self.pending.pop(0)
            count = min(piece.count, most - len(positions))
            if count < piece.count:
                self.pending.insert(0, piece.part(count, piece.count - count))
            positions += range(piece.first, piece.first + count)
            taken.append(piece.part(0, count).cut())
            self.last = piece.part(count - 1, 1)
        self.num_pending -= len(positions)
        return positions, taken

    def go_back(self) -> None:
        """Let the last position that was read be read again: guesses begin from it."""
        if not self.pending and self.last is not None:
            self.add(self.last)
            self.cache.length = max(0, self.cache.length - 1)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A draft under way: for which texts, in order of their places."""

    launched: BlockLaunched
    keys: tuple[tuple[int, int], ...]
    """Of each text its number, and its length"""
    launched_s: float
    load: Load


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a drafter must know of its draft and of the target, besides what its passes know."""

    feature_layers: tuple[int, ...]
    page_tokens: int
    max_positions: int
    is_coupled: bool


class DeviceHeadDrafter(ABC):
    """Drafts chains or trees out of one launch for all texts."""

    name: ClassVar[str]
    reads_on_device: ClassVar[bool] = True

    def __init__(self, passes: BlockPasses, pool: BlockPool, facts: DraftFacts, *, cost: CostModel) -> None:
        self.feature_layers = facts.feature_layers
        self.cost = cost
        self.unseen: frozenset[int] = frozenset()
        self.ready_s = 0.0
        self._passes = passes
        self._pool = pool
        self._facts = facts
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # by sequence id, the least recently drafted first
        self._flight: _Flight | None = None
        self._told: dict[int, tuple[Guess, ...]] = {}  # by place among the flight's texts: what was named
        self._alone: int | None = None  # the only sequence of the last draft
        self._usual = [_FIRST_CONFIDENCE] * len(passes.tree.expanded)  # how sure words behind each node were of late

    def prepare(self) -> Iterator[None]:
        """Make usual passes ready."""
        return self._passes.prepare()

    def start(self, context: Context) -> None:
        """Make ready for what there is to see, which comes with the first pass."""
        cache = SequenceCache(self._pool, self._facts.page_tokens, None, context.tenant)
        self._texts[context.sequence_id] = _Text(cache)

    def see(self, context: Context, first: int, features: ShownRows) -> None:
        """Remember which rows to read; where this text was the only one, draft at once."""
        text, states = self._texts[context.sequence_id], features.states
        if features.columns != tuple(range(states.shape[1])):
            states = states[:, list(features.columns)]
        for offset, start, count in _runs(features.rows):
            text.add(_Piece(first + offset, states, start, count))
        text.num_seen = first + len(features)
        if text.num_pending >= MOST_CONTEXT:
            self._read(text, context, [text])
        if self._alone == context.sequence_id and self._can_guess(context):
            self._alone = None  # until somebody asks again
            self._flight = self._launch([context])

    def num_unread(self, context: Context) -> int:
        """Positions whose hidden states were not read yet."""
        text = self._texts.get(context.sequence_id)
        return max(1, text.num_pending if text else 0)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """A tree for each context whose last computed row was seen; nobody has seen a guess yet."""
        wanted = [i for i, budget in enumerate(budgets) if min(budget.max_depth, budget.max_rows) > 0]
        ready = [i for i in wanted if self._can_guess(contexts[i])][: self._passes.most_texts]
        drafts = [EMPTY] * len(contexts)
        self.unseen, self._told = frozenset(), {}
        self._alone = contexts[ready[0]].sequence_id if len(ready) == 1 else None
        flight = self._flight_of([contexts[i] for i in ready]) if ready else None
        if flight is None:
            return drafts
        self.ready_s = flight.launched_s + self._passes.rows_each * self.cost.step_s(flight.load)
        unseen: list[int] = []
        places = {sequence_id: place for place, (sequence_id, _) in enumerate(flight.keys)}
        forms: dict[tuple[int, int], Form] = {}  # most texts have the same budget
        for index in ready:
            place = places.get(contexts[index].sequence_id)
            if place is not None:
                room = budgets[index].max_depth, budgets[index].max_rows
                form = forms.get(room) or forms.setdefault(room, self._form(*room))
                self._told[place] = form.guesses
                drafts[index] = form.draft(flight.launched.names(place))
                unseen += drafts[index].tokens
        self.unseen = frozenset(unseen)
        return drafts

    def take_words(self) -> dict[int, tuple[int, float]]:
        """What was guessed in the last draft."""
        flight, told = self._flight, self._told
        self._told = {}
        words: dict[int, tuple[int, float]] = {}
        if flight is None:
            return words
        for place, guesses in told.items():
            drawn, names = flight.launched.guesses(place), flight.launched.names(place)
            for guess in guesses:
                word, sureness, rival = drawn[guess.behind]
                said = rival if guess.is_rival else word
                words[names[guess.is_rival][guess.behind]] = said, _believed(guess, sureness)
                if not guess.is_rival:
                    self._usual[guess.behind] += _CONFIDENCE_WEIGHT * (sureness - self._usual[guess.behind])
        return words

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a sequence."""
        text = self._texts.pop(context.sequence_id, None)
        if text is not None:
            text.cache.release()

    def _can_guess(self, context: Context) -> bool:
        """Whether the hidden states at the last computed row are at hand."""
        text, length = self._texts.get(context.sequence_id), len(context.tokens)
        return text is not None and text.num_seen == length - 1 and length < self._facts.max_positions

    def _flight_of(self, contexts: Sequence[Context]) -> _Flight | None:
        """A draft for these texts: the one that is on its way, or one that begins now."""
        flight = self._flight
        if flight is None or flight.keys != tuple((c.sequence_id, len(c.tokens)) for c in contexts):
            flight = self._flight = self._launch(contexts)
        return flight

    def _launch(self, contexts: Sequence[Context]) -> _Flight | None:
        """Read what is pending of these texts, and guess."""
        batch = [self._texts[context.sequence_id] for context in contexts]
        for context in contexts:
            self._texts.move_to_end(context.sequence_id)
        self._make_fit(contexts, batch)
        works: list[BlockWork] = []
        features: list[Any] = []
        served: list[tuple[Context, _Text, int]] = []
        for context, text in zip(contexts, batch, strict=True):
            text.go_back()
            num_pending, cache = text.num_pending, text.cache
            if not self._reserve(text, num_pending + self._passes.rows_each, batch):
                continue
            positions, states = text.take(num_pending)
            features += states
            slots = cache.slots(num_pending + self._passes.rows_each)
            works.append(
                BlockWork(
                    context_positions=positions,
                    context_slots=slots[:num_pending],
                    context_tokens=[context.tokens[position + 1] for position in positions],
                    blocks=cache.blocks,
                    **self._rows(len(context.tokens), cache.length + num_pending, slots[num_pending:]),
                    token=context.tokens[-1],
                    position=len(context.tokens) - 1,
                    dice=_dice(context) if self._facts.is_coupled else None,
                )
            )
            served.append((context, text, num_pending))
        if not works:
            return None
        launched_s = time.perf_counter()
        launched = self._passes.launch(works, features)
        for _, text, count in served:
            text.cache.length += count
        keys = sum(max(work.row_keys) for work in works)
        numbered = tuple((context.sequence_id, len(context.tokens)) for context, _, _ in served)
        return _Flight(launched, numbered, launched_s, Load(len(works), keys, keys))

    @abstractmethod
    def _rows(self, length: int, num_held: int, slots: list[int]) -> dict[str, list[int]]:
        """Slots, positions and keys of the rows that guess behind a text.

        `num_held` keys are in its cache then, and `slots` are the next ones.
        """

    def _make_fit(self, contexts: Sequence[Context], batch: Sequence[_Text]) -> None:
        """Read beforehand what one pass cannot hold, from whom most is pending.

        One position of each text is left to the pass: guesses begin from it.
        """
        assert len(batch) <= MOST_CONTEXT
        while sum(max(1, text.num_pending) for text in batch) > MOST_CONTEXT:
            longest = max(range(len(batch)), key=lambda index: batch[index].num_pending)
            self._read(batch[longest], contexts[longest], batch, most=batch[longest].num_pending - 1)

    def _read(self, text: _Text, context: Context, batch: Sequence[_Text], *, most: int = MOST_CONTEXT) -> None:
        """Read what is pending of a text, as far as one pass goes; where there is no room it is never read.

        Texts of the same batch keep theirs.
        """
        positions, states = text.take(min(most, MOST_CONTEXT))
        if not self._reserve(text, len(positions), batch):
            return
        slots = text.cache.slots(len(positions))
        tokens = [context.tokens[position + 1] for position in positions]
        self._passes.launch([BlockWork(positions, slots, tokens, text.cache.blocks)], states)
        text.cache.length += len(positions)

    def _reserve(self, text: _Text, num_rows: int, batch: Sequence[_Text]) -> bool:
        """Make room; the texts that were not drafted for longest give theirs up, and what they had read is gone."""
        while not text.cache.reserve(num_rows):
            idle = next((other for other in self._texts.values() if other.cache.blocks and other not in batch), None)
            if idle is None:
                return False
            idle.cache.release()
        return True

    def _form(self, max_depth: int, max_rows: int) -> Form:
        """What a draft within a budget looks like, by what is usual for its words."""
        guesses = self._passes.tree.within(max_depth, max_rows)
        return Form(
            guesses,
            self._passes.tree.parents(guesses),
            tuple(_believed(guess, self._usual[guess.behind]) for guess in guesses),
            (self.name,) * len(guesses),
        )


class DeviceBlockDrafter(DeviceHeadDrafter):
    """A block: one pass over all its rows."""

    name: ClassVar[str] = "block"

    def _rows(self, length: int, num_held: int, slots: list[int]) -> dict[str, list[int]]:
        """All rows see the context and each other; the first one holds the last token."""
        count = len(slots)
        return {
            "row_slots": slots,
            "row_positions": list(range(length - 1, length - 1 + count)),
            "row_keys": [num_held + count] * count,
        }


class DeviceEagleDrafter(DeviceHeadDrafter):
    """Eagle: one layer, again for every guess, all in one launch."""

    name: ClassVar[str] = "eagle"

    def _rows(self, length: int, num_held: int, slots: list[int]) -> dict[str, list[int]]:
        """The first guess comes from the last row of the context; each further row sees those before it."""
        count = len(slots)
        return {
            "row_slots": [slots[0], *slots[: count - 1]],
            "row_positions": list(range(length - 2, length - 2 + count)),
            "row_keys": list(range(num_held, num_held + count)),
        }


def _believed(guess: Guess, sureness: float) -> float:
    """How likely a guess is right, by how sure the word is that was drawn there."""
    return (1.0 - sureness) * _RIVAL_SHARE if guess.is_rival else sureness


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The same states in as few pieces as positions were left out between them, and one."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        if runs and piece.first == runs[-1][-1].first + runs[-1][-1].count:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [
        _Piece(run[0].first, torch.cat([piece.cut() for piece in run]), 0, sum(piece.count for piece in run))
        for run in runs
    ]


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rows that follow each other: (place of the first among the rows, the first, how many)."""
    runs: list[tuple[int, int, int]] = []
    for place, row in enumerate(rows):
        if runs and row == runs[-1][1] + runs[-1][2]:
            offset, start, count = runs[-1]
            runs[-1] = offset, start, count + 1
        else:
            runs.append((place, row, 1))
    return runs


def _dice(context: Context) -> Dice:
    """Guesses are drawn with the target's dice; what else its words hang on is not known ahead."""
    sampling, noise = context.sampling, context.noise
    return Dice(context.temperature, sampling.top_k, sampling.top_p, sampling.min_p, noise.seed, noise.choice)

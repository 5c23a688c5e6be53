"""Passes of a trained draft that guesses a whole block at once: captured once for each size and then replayed.

A pass reads hidden states of the target that are new (the context), and guesses behind the last of them. It goes from
numbers to words without the host, as passes of a decoder do (cuda_passes.py). Its guesses are those of a tree with a
fixed shape (core/static_tree.py). What it draws lies where the target's next pass, and the draft itself, can name it:
what follows the expanded node n of text b at place n * texts + b, texts rounded up. Rows that are only padding write to
a slot that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.dice import Dice
from understudy.core.static_tree import StaticTree
from understudy.kernels import cuda_sample
from understudy.kernels.cuda_graphs import (
    LEAST_KEYS,
    USUAL_KEYS,
    Answer,
    Captured,
    Home,
    Places,
    has_room,
    rounded,
    write_dice,
)
from understudy.kernels.cuda_rows import GROUP_ROWS, PAGE, PlacedRows
from understudy.kernels.rows import MOST_PLACES

MOST_TEXTS = 32
MOST_CONTEXT = 256
"""Rows of hidden states that one pass reads"""
_CONTEXTS = (8, 32, MOST_CONTEXT)
"""What a context is rounded up to: few sizes, since every one is captured. Eight rows and a block fill a tile."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What one text wants of a pass. Slots, and the place among a text's keys, are those of the draft's own cache."""

    context_positions: Sequence[int]
    """Of the new hidden states, in order"""
    context_slots: Sequence[int]
    context_tokens: Sequence[int]
    """The tokens that follow those positions"""
    blocks: Sequence[int]
    """Of its cache: the context of the pass and, behind it, the rows that guess, have room there"""
    row_slots: Sequence[int] = ()
    """Where the rows that guess lie; empty if nothing is to be guessed"""
    row_positions: Sequence[int] = ()
    """What they are turned by"""
    row_keys: Sequence[int] = ()
    """How many keys each of them sees, from the first one of the text's cache on"""
    token: int = 0
    """The last token of the text; the first guess is about the one that follows"""
    position: int = 0
    """Where it stands"""
    dice: Dice | None = None


@dataclass(frozen=True, slots=True)
class BlockSize:
    """What a graph is captured for."""

    texts: int
    rows_each: int
    nodes_each: int
    """Expanded nodes of a text's tree"""
    context: int
    keys: int
    draws: bool
    """Whether any text has a temperature above 0"""

    @property
    def rows(self) -> int:
        """Rows that guess."""
        return self.texts * self.rows_each

    @property
    def lines(self) -> int:
        """Places where something is drawn."""
        return self.texts * self.nodes_each

    @property
    def groups_each(self) -> int:
        """Groups of rows of one text that read keys together."""
        return -(-self.rows_each // GROUP_ROWS)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The arrays of a pass, all of 32 bits, as they lie one after the other in memory."""
        return {
            "how": (cuda_sample.INTS_PER_ROW * self.lines,),
            "before": (self.lines,),
            "context_tokens": (self.context,),
            "last_rows": (self.texts,),
            "positions": (self.rows + self.context,),
            "slots": (self.rows + self.context,),
            "tables": (self.texts, self.keys // PAGE),
            "group_starts": (self.texts * self.groups_each + 1,),
            "group_tables": (self.texts * self.groups_each,),
            "prefix_lens": (self.rows,),
            "tail_starts": (self.rows + 1,),
        }


@dataclass(frozen=True, slots=True)
class PlacedBlocks:
    """A pass on the device."""

    size: BlockSize
    features: Tensor
    """[context, layers, hidden] fp32"""
    before: Tensor
    """[lines] int32, node by node: the last tokens of the texts, then names of what is drawn for the nodes above"""
    context_tokens: Tensor
    """[context] int32"""
    last_rows: Tensor
    """[texts] int32, which row of the context is the last of each text"""
    rows: PlacedRows
    """Positions and slots of the rows that guess, then of the context; what the former see"""
    how: cuda_sample.DrawnRows
    """[lines] node by node"""
    drawn: Tensor
    """[3, places] int32: words, how sure they are (bits of fp32), rivals"""

    @property
    def tokens(self) -> Tensor:
        """The last tokens of the texts."""
        return self.before[: self.size.texts]


Compute = Callable[[PlacedBlocks], None]
"""A pass, from hidden states to what is drawn."""


class BlockPasses:
    """Runs passes of one draft, one after the other."""

    def __init__(
        self,
        compute: Compute,
        *,
        places: Places,
        device: torch.device,
        rows_each: int,
        tree: StaticTree,
        feature_shape: tuple[int, int],
        most_positions: int,
        scratch_slot: int,
        use_graphs: bool,
        by_steps: bool = False,
    ) -> None:
        """`feature_shape` is [layers, hidden]; `scratch_slot` a slot of the draft's cache that no text owns.

        Rows that guess lie text by text, or step by step.
        """
        self.compute = compute
        self.by_steps = by_steps
        self.rows_each = rows_each
        self.tree = tree
        self.most_texts = 1
        while 2 * self.most_texts <= min(MOST_TEXTS, MOST_PLACES // len(tree.expanded)):
            self.most_texts *= 2
        self.features = torch.zeros((MOST_CONTEXT, *feature_shape), dtype=torch.float32, device=device)
        number = places.take()
        self.first_place = number * 3 * MOST_PLACES
        self.first_rival = self.first_place + 2 * MOST_PLACES
        pool = torch.cuda.graph_pool_handle() if use_graphs else None
        self.home = Home(device, places, places.numbers[number], pool)
        self.most_positions = most_positions
        self.scratch_slot = scratch_slot
        self._captured: dict[BlockSize, _Captured] = {}

    def size_of(self, works: Sequence[BlockWork]) -> BlockSize:
        """The size that a pass is rounded up to."""
        num_context = sum(len(work.context_slots) for work in works)
        return BlockSize(
            texts=rounded(max(1, sum(bool(work.row_slots) for work in works))),
            rows_each=self.rows_each,
            nodes_each=len(self.tree.expanded),
            context=next(count for count in _CONTEXTS if count >= num_context),
            keys=rounded(max(max(work.row_keys, default=1) for work in works), LEAST_KEYS),
            draws=any(work.dice is not None and work.dice.temperature > 0.0 for work in works),
        )

    def prepare(self) -> Iterator[None]:
        """Capture the usual sizes, one with each `next`, over rows that are all padding. Nothing is under way then."""
        texts = [1 << index for index in range(self.most_texts.bit_length())]
        for keys, draws, count, context in product(USUAL_KEYS, (False, True), texts, _CONTEXTS):
            size = BlockSize(count, self.rows_each, len(self.tree.expanded), context, keys, draws)
            if not has_room(self.home):
                return
            if size not in self._captured and count <= context:  # of each text one position is read at least
                self._launch(size, ())
                yield

    def launch(self, works: Sequence[BlockWork], features: Sequence[Tensor]) -> BlockLaunched:
        """Begin a pass; `features`, one below the other, are those of all works' contexts [rows, layers, hidden]."""
        num_context = sum(len(work.context_slots) for work in works)
        assert num_context <= MOST_CONTEXT
        if num_context:
            torch.cat(list(features), out=self.features[:num_context])  # one launch, however many there are
        return self._launch(self.size_of(works), works)

    def _launch(self, size: BlockSize, works: Sequence[BlockWork]) -> BlockLaunched:
        captured = self._captured.pop(size, None) or _Captured(size, self)
        captured.write(works)
        launched = BlockLaunched(captured.launch(), captured)
        self._captured[size] = captured  # but for one that has failed
        return launched


class _Captured(Captured):
    """A pass of one size."""

    def __init__(self, size: BlockSize, passes: BlockPasses) -> None:
        super().__init__(size.shapes(), passes.home, num_places=size.lines)
        views = dict(self.views)
        nothing = torch.zeros(0, dtype=torch.int32, device=passes.home.device)
        how = cuda_sample.DrawnRows.within(views.pop("how"))
        before, context_tokens, last_rows = (views.pop(name) for name in ("before", "context_tokens", "last_rows"))
        places = np.arange(size.lines, dtype=np.int32).reshape(size.nodes_each, size.texts)
        # the numbers that stand for words and for rivals, [2, nodes, texts], and those that stand before the nodes
        names = np.stack([-1 - passes.first_place - places, -1 - passes.first_rival - places])
        self.names_of: list[list[list[int]]] = names.transpose(2, 0, 1).tolist()
        """By text, the names of the words behind each expanded node, and those of their rivals"""
        above = [guess for guess in passes.tree.expanded if guess is not None]
        self._names_before = np.array([names[int(guess.is_rival), guess.behind] for guess in above], np.int32).ravel()
        rows = PlacedRows(
            **views,
            token_ids=nothing,
            tail_slots=nothing,
            logit_rows=nothing,
            words=passes.home.places.numbers.view(-1),
            most_keys=size.keys,
        )
        features = passes.features[: size.context]
        drawn = passes.home.drawn
        self._placed = PlacedBlocks(size, features, before, context_tokens, last_rows, rows, how, drawn)
        self._passes = passes
        self.size = size

    def compute(self) -> None:
        """A pass, and its guesses."""
        self._passes.compute(self._placed)

    def write(self, works: Sequence[BlockWork]) -> None:
        """Write down the numbers of the next pass, padded."""
        size, passes, to = self.size, self._passes, self.letters[self.next_turn()]
        for name in ("positions", "before", "context_tokens", "last_rows", "group_tables", "prefix_lens"):
            to[name][:] = 0
        to["slots"][:] = passes.scratch_slot
        guessing = [work for work in works if work.row_slots]
        to["before"][size.texts :] = self._names_before
        starts, each = to["group_starts"], size.rows_each
        shape = (each, size.texts) if passes.by_steps else (size.texts, each)
        rows = {name: to[name][: size.rows].reshape(shape) for name in ("positions", "slots", "prefix_lens")}
        if passes.by_steps:
            rows = {name: array.T for name, array in rows.items()}
        count, num_groups = len(guessing), len(guessing) * size.groups_each
        if guessing:  # all of them at once: one by one they would take the host longer than the device
            to["before"][:count] = [work.token for work in guessing]
            positions = np.array([work.row_positions for work in guessing])
            rows["positions"][:count] = np.minimum(positions, passes.most_positions - 1)
            rows["slots"][:count] = [work.row_slots for work in guessing]
            rows["prefix_lens"][:count] = [work.row_keys for work in guessing]
            first_rows = each * np.arange(count)[:, None]
            starts[:num_groups] = (first_rows + GROUP_ROWS * np.arange(size.groups_each)).ravel()
            to["group_tables"][:num_groups] = np.arange(num_groups) // size.groups_each
        for index, work in enumerate(guessing):
            to["tables"][index, : len(work.blocks)] = work.blocks
        starts[num_groups:] = count * each  # what is padded belongs to no group
        self._write_context(to, works, size)
        if size.draws:
            self._write_dice(to, guessing)

    def _write_dice(self, to: dict[str, NDArray[Any]], guessing: Sequence[BlockWork]) -> None:
        size = self.size
        dice = [work.dice for work in guessing] + [None] * (size.texts - len(guessing))
        first = [work.position + 1 for work in guessing] + [0] * (size.texts - len(guessing))
        depths = np.array(self._passes.tree.depths, np.int32)[:, None]  # nodes of one depth draw with the same noise
        write_dice(to, dice * size.nodes_each, (np.array(first, np.int32) + depths).ravel())

    def _write_context(self, to: dict[str, NDArray[Any]], works: Sequence[BlockWork], size: BlockSize) -> None:
        """Write where the rows of the context stand, and which of them is the last of each text."""
        ends = list(accumulate(len(work.context_slots) for work in works))
        last = size.rows + (ends[-1] if ends else 0)
        to["positions"][size.rows : last] = [position for work in works for position in work.context_positions]
        to["slots"][size.rows : last] = [slot for work in works for slot in work.context_slots]
        to["context_tokens"][: last - size.rows] = [token for work in works for token in work.context_tokens]
        last_rows = [max(0, end - 1) for work, end in zip(works, ends, strict=True) if work.row_slots]
        to["last_rows"][: len(last_rows)] = last_rows


class BlockLaunched:
    """A pass under way."""

    def __init__(self, answer: Answer, captured: _Captured) -> None:
        self._answer = answer
        self._names = captured.names_of
        self._num_texts = captured.size.texts
        self._drawn: tuple[list[int], list[float], list[int]] | None = None

    def names(self, text: int) -> list[list[int]]:
        """The numbers that stand for the words behind each expanded node of one text, and those for their rivals."""
        return self._names[text]

    def guesses(self, text: int) -> list[tuple[int, float, int]]:
        """What follows each expanded node of one text: the word, how sure it is, and who came second (-1: nobody).

        Waits for the GPU.
        """
        if self._drawn is None:
            words, sureness, rivals = self._answer.drawn()
            self._drawn = words.tolist(), sureness.tolist(), rivals.tolist()
        return list(zip(*[line[text :: self._num_texts] for line in self._drawn], strict=True))

    def wait(self) -> None:
        """Wait for the GPU."""
        self._answer.wait()

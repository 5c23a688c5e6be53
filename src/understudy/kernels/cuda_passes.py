"""Passes of one decoder over one cache on a GPU: from rows to words, captured once for each size and then replayed.

A pass is some 250 launches, and launching them one by one takes the host longer than the GPU needs for all of them. So
a pass is captured as a graph once for each size, in buffers that stay where they are: sizes are rounded up, and what is
padded belongs to no group of rows, writes to a slot that nobody reads, and is not looked at. What a draft looks like,
how deep it is and whether there is one at all are numbers in those buffers: there is no graph for any of them.

Nothing here waits for the GPU but `Launched`. Words are drawn on the device and stay there until the same decoder draws
again. A pass may name them before anybody has seen them: a token id of -1 - n is the word at place n. Each decoder has
places of its own, so a target can name what its draft has just guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.dice import Dice
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
from understudy.kernels.interface import Drawn, FeatureBuffer
from understudy.kernels.rows import MOST_PLACES, NO_ROWS, Ints, Rows

Floats = NDArray[np.float32]

_EVEN_ROWS, _ROWS_APART = 256, 128
"""Beyond so many rows arithmetic takes the time, not reading the weights: sizes lie closer than powers of two."""
_PROMPT_ROWS = (32, 64, 128, 256, 384, 512)
"""Sizes that a prompt alone, or a part of it, is rounded up to."""
_TAILS_EACH = 8
"""Room for tails of each row, used or not: most trees need less, and share a size with chains and with no draft."""
_FEW_LOGITS = 16
"""So many logits take as long as one: the output layer's tile has sixteen rows."""

Compute = Callable[..., Tensor]
"""A pass over placed rows: the logits of those that are wanted, on the device. Given a `FeatureBuffer` as well, it
shows hidden states."""


class Size(NamedTuple):
    """What a graph is captured for; a pass fits if it has no more of anything."""

    rows: int
    groups: int
    logits: int
    keys: int
    tails: int
    draws: bool
    """Whether any place has a temperature above 0"""
    shown: tuple[int, ...] = ()
    """The layers whose hidden states are shown"""

    @classmethod
    def of(cls, rows: Rows, dice: Sequence[Dice | None], shown: tuple[int, ...] = ()) -> Size:
        """The size that a pass is rounded up to."""
        return cls.holding(
            len(rows.token_ids),
            num_groups=len(rows.group_tables),
            num_logits=len(rows.logit_rows),
            num_keys=rows.tables.shape[1] * PAGE,
            num_tails=len(rows.tail_slots),
            draws=any([one is not None and one.temperature for one in dice]),  # noqa: C419 - of hundreds, it is faster
            shown=shown,
        )

    @classmethod
    def holding(
        cls,
        num_rows: int,
        *,
        num_groups: int,
        num_logits: int,
        num_keys: int,
        draws: bool,
        shown: tuple[int, ...],
        num_tails: int = 0,
    ) -> Size:
        """The smallest size that has so many of everything."""
        rows = rounded(num_rows) if num_rows <= _EVEN_ROWS else -(-num_rows // _ROWS_APART) * _ROWS_APART
        return cls(
            rows=rows,
            groups=rounded(num_groups),
            logits=rounded(num_logits, _FEW_LOGITS) if num_logits else 0,
            keys=rounded(num_keys, LEAST_KEYS),
            tails=rounded(num_tails, _TAILS_EACH * rows),
            draws=draws,
            shown=shown,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The arrays of a pass of this size, all of 32 bits, as they lie one after the other in memory."""
        rows, groups, logits = self.rows, self.groups, self.logits
        return {
            "how": (cuda_sample.INTS_PER_ROW * logits,),
            "tables": (groups, self.keys // PAGE),
            "token_ids": (rows,),
            "positions": (rows,),
            "slots": (rows,),
            "group_starts": (groups + 1,),
            "group_tables": (groups,),
            "prefix_lens": (rows,),
            "tail_starts": (rows + 1,),
            "tail_slots": (self.tails,),
            "logit_rows": (logits,),
        }


def usual_sizes(shown: tuple[int, ...]) -> list[Size]:
    """What texts need while they are written, with drafts and without, and a prompt alone, or a part of it."""
    sizes: dict[Size, None] = {}  # in order
    for num_keys, draws in product(USUAL_KEYS, (False, True)):
        of_this = partial(Size.holding, num_keys=num_keys, draws=draws, shown=shown)
        for rows, each in product(range(_EVEN_ROWS.bit_length()), range(GROUP_ROWS.bit_length())):
            num_rows = 1 << rows
            sizes[of_this(num_rows, num_groups=-(-num_rows >> each), num_logits=num_rows)] = None
        for num_rows, num_logits in product(_PROMPT_ROWS, (1, 0)):
            if num_rows <= num_keys:
                sizes[of_this(num_rows, num_groups=num_rows // GROUP_ROWS, num_logits=num_logits)] = None
    return list(sizes)


class CudaPasses:
    """Runs passes of one decoder over one cache, one after the other."""

    draws = True
    features_stay = True

    def __init__(
        self,
        compute: Compute,
        *,
        places: Places,
        device: torch.device,
        scratch_slot: int,
        vocab_size: int,
        use_graphs: bool = True,
    ) -> None:
        """`scratch_slot` is a slot of the cache that no text owns: padded rows write there."""
        self.compute = compute
        self.paddings = [scratch_slot if name == "slots" else padding for name, padding in _PADDING.items()]
        """What the lines of a pass end with"""
        self.vocab_size = vocab_size
        self._captured: dict[Size, _Captured] = {}
        number = places.take()
        self.first_place = number * 3 * MOST_PLACES
        self.first_rival = self.first_place + 2 * MOST_PLACES
        pool = torch.cuda.graph_pool_handle() if use_graphs else None
        self._home = Home(device, places, places.numbers[number], pool)
        self.scratch = cuda_sample.DrawScratch.new(MOST_PLACES, num_sayable=vocab_size, device=device)
        self.features: dict[tuple[int, ...], Tensor] = {}
        """By layers: where graphs leave hidden states"""

    @property
    def num_firsts(self) -> int:
        """Passes, of all decoders here, that took longer because they were the first of their size."""
        return self._home.places.num_firsts

    def launch(self, rows: Rows, dice: Sequence[Dice | None]) -> CudaLaunched:
        """Begin a pass; `dice` are those of each row whose logits are wanted, None where the host draws."""
        return self._launch(Size.of(rows, dice), rows, dice)

    def new_features(self, shape: tuple[int, int, int]) -> Tensor:
        """Room for hidden states."""
        return torch.empty(shape, dtype=torch.float32, device=self._home.device)

    def launch_showing(self, rows: Rows, dice: Sequence[Dice | None], shown: FeatureBuffer) -> CudaLaunched:
        """As `launch`; hidden states are copied on the device, from where the graph leaves those of every pass."""
        count, _, hidden_size = shown.into.shape
        left = self._make_room(shown.layers, hidden_size)
        launched = self._launch(Size.of(rows, dice, shown.layers), rows, dice)
        shown.into.copy_(left[:count])
        return launched

    def prepare(self, shown: tuple[int, ...], hidden_size: int) -> Iterator[None]:
        """Capture the usual sizes, one with each `next`, over rows that are all padding. Nothing is under way then."""
        if shown:
            self._make_room(shown, hidden_size)
        for size in dict.fromkeys([*usual_sizes(shown), *usual_sizes(())]):  # nothing is shown while drafts are off
            if not has_room(self._home):
                return
            if size not in self._captured:
                self._launch(size, NO_ROWS, ())
                yield

    def _make_room(self, layers: tuple[int, ...], hidden_size: int) -> Tensor:
        """Where graphs leave hidden states."""
        if layers not in self.features:
            self.features[layers] = self.new_features((MOST_PLACES, len(layers), hidden_size))
        return self.features[layers]

    def _launch(self, size: Size, rows: Rows, dice: Sequence[Dice | None]) -> CudaLaunched:
        captured = self._captured.pop(size, None) or _Captured(size, self, self._home)
        captured.write(rows, dice)
        launched = CudaLaunched(captured.launch(), num_places=len(dice))
        self._captured[size] = captured  # but for one that has failed
        return launched


class _Captured(Captured):
    """A pass of one size."""

    def __init__(self, size: Size, passes: CudaPasses, home: Home) -> None:
        shapes = size.shapes()
        super().__init__(shapes, home, num_places=size.logits)
        how, *placed = self.views.values()
        self._how = cuda_sample.DrawnRows.within(how)
        self._rows = PlacedRows(**dict(zip(list(shapes)[1:], placed, strict=True)), words=home.places.numbers.view(-1),
                                most_keys=size.keys)  # fmt: skip
        self._size = size
        self._passes = passes
        self._shown = FeatureBuffer(size.shown, passes.features[size.shown][: size.rows]) if size.shown else None
        lengths = [shapes[name][0] for name in _PADDING]
        self._paddings = [
            (length, None if padding is _LAST else np.full(length, padding, np.int32))
            for length, padding in zip(lengths, passes.paddings, strict=True)
        ]
        first = int(np.prod(shapes["how"]) + np.prod(shapes["tables"]))
        self._lines: list[Ints] = [letter[first : first + sum(lengths)].numpy() for letter in self._letters]
        """Of each turn, all arrays but the first two, one after the other"""

    def write(self, rows: Rows, dice: Sequence[Dice | None]) -> None:
        """Write down the numbers of the next pass, padded."""
        turn = self.next_turn()
        to = self.letters[turn]
        pieces: list[NDArray[Any]] = []
        for line, (length, padding) in zip(_LINES_OF(rows), self._paddings, strict=True):
            pieces.append(line)
            if missing := length - len(line):
                pieces.append(np.repeat(line[-1:], missing) if padding is None else padding[:missing])
        np.concatenate(pieces, out=self._lines[turn], casting="unsafe")
        num_tables, width = rows.tables.shape
        to["tables"][:num_tables, :width] = rows.tables[:, : to["tables"].shape[1]]
        if self._size.draws:
            write_dice(to, dice, rows.positions[rows.logit_rows] + 1)

    def compute(self) -> Tensor:
        """A pass, and its words; returns the logits."""
        compute = self._passes.compute
        logits = compute(self._rows) if self._shown is None else compute(self._rows, self._shown)
        if self._size.logits:
            words, sureness, rivals = self._home.drawn
            cuda_sample.draw(
                logits,
                self._how,
                words=words,
                sureness=sureness.view(torch.float32),
                rivals=rivals,
                scratch=self._passes.scratch,
                num_sayable=self._passes.vocab_size,
                is_greedy=not self._size.draws,
            )
        return logits


class CudaLaunched:
    """A pass under way. Its logits are there until the next pass of the same decoder begins."""

    def __init__(self, answer: Answer, *, num_places: int) -> None:
        self._answer = answer
        self._num_places = num_places

    def drawn(self) -> Drawn:
        """The words of all places; waits for the GPU."""
        count = self._num_places
        return Drawn(*[line[:count].tolist() for line in self._answer.drawn()])

    @property
    def is_over(self) -> bool:
        """Whether the GPU has done it."""
        return self._answer.is_there

    def logits(self, first: int, last: int) -> Floats:
        """The logits of some places; waits for the GPU."""
        logits = self._answer.result
        assert logits is not None
        on_host: Floats = logits[first:last].cpu().numpy()
        return on_host


_LAST = None
"""In place of a padding: the last number once more."""
_PADDING = {"token_ids": 0, "positions": 0, "slots": 0, "group_starts": _LAST, "group_tables": 0, "prefix_lens": 1,
            "tail_starts": _LAST, "tail_slots": 0, "logit_rows": 0}  # fmt: skip
"""The lines, in the order of `Size.shapes`, and what they end with."""
_LINES_OF = attrgetter(*_PADDING)

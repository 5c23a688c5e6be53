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

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.dice import Dice
from understudy.kernels import cuda_sample
from understudy.kernels.cuda_rows import PAGE, PlacedRows
from understudy.kernels.interface import Drawn, FeatureBuffer
from understudy.kernels.rows import MOST_PLACES, Ints, Rows

Floats = NDArray[np.float32]

MOST_DECODERS = 16
_LEAST_KEYS = 256
_EVEN_ROWS, _ROWS_APART = 256, 128
"""Beyond so many rows arithmetic takes the time, not reading the weights: sizes lie closer than powers of two."""
_FEW_LOGITS = 16
"""So many logits take as long as one: the output layer's tile has sixteen rows."""
_NUM_STAGES = 12
"""Passes whose numbers may be on their way to the GPU at once."""
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)

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
    shown: tuple[int, ...] = ()
    """The layers whose hidden states are shown"""

    @classmethod
    def of(cls, rows: Rows, shown: tuple[int, ...] = ()) -> Size:
        """The size that a pass is rounded up to."""
        num_rows, num_logits = len(rows.token_ids), len(rows.logit_rows)
        return cls(
            rows=rounded(num_rows) if num_rows <= _EVEN_ROWS else -(-num_rows // _ROWS_APART) * _ROWS_APART,
            groups=rounded(len(rows.group_tables)),
            logits=rounded(num_logits, _FEW_LOGITS) if num_logits else 0,
            keys=rounded(int(rows.positions.max()) + 1, _LEAST_KEYS),
            tails=rounded(len(rows.tail_slots)) if len(rows.tail_slots) else 0,
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


def rounded(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


class Places:
    """Where the words of all decoders of a device lie: for each its words, how sure they are, and their rivals."""

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros((MOST_DECODERS, 3, MOST_PLACES), dtype=torch.int32, device=device)
        self.num_firsts = 0
        """Passes that were the first of their size, and took a hundred times as long for it."""
        self._num_taken = 0

    def take(self) -> int:
        """The number of one more decoder; the last one is shared by all who come late, who must not draw ahead."""
        taken = min(self._num_taken, MOST_DECODERS - 1)
        self._num_taken += 1
        return taken


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
        self._compute = compute
        self._device = device
        self.paddings = [scratch_slot if name == "slots" else padding for name, padding in _PADDING.items()]
        """What the lines of a pass end with"""
        self._vocab_size = vocab_size
        self._use_graphs = use_graphs
        self._captured: dict[Size, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if use_graphs else None
        number = places.take()
        self.first_place = number * 3 * MOST_PLACES
        self.first_rival = self.first_place + 2 * MOST_PLACES
        self._shared = places
        self._places = places.numbers.view(-1)
        self._drawn = places.numbers[number]  # words, and how sure they are
        self._scratch = cuda_sample.DrawScratch.new(MOST_PLACES, num_sayable=vocab_size, device=device)
        self._stages = [_Stage(device) for _ in range(_NUM_STAGES)]
        self._num_launched = 0
        self._features: dict[tuple[int, ...], Tensor] = {}  # by layers: where graphs leave hidden states

    @property
    def num_firsts(self) -> int:
        """Passes, of all decoders here, that took longer because they were the first of their size."""
        return self._shared.num_firsts

    def launch(self, rows: Rows, dice: Sequence[Dice | None]) -> CudaLaunched:
        """Begin a pass; `dice` are those of each row whose logits are wanted, None where the host draws."""
        return self._launch(Size.of(rows), rows, dice)

    def new_features(self, shape: tuple[int, int, int]) -> Tensor:
        """Room for hidden states."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def launch_showing(self, rows: Rows, dice: Sequence[Dice | None], shown: FeatureBuffer) -> CudaLaunched:
        """As `launch`; hidden states are copied on the device, from where the graph leaves those of every pass."""
        count, num_layers, hidden_size = shown.into.shape
        if shown.layers not in self._features:
            self._features[shown.layers] = self.new_features((MOST_PLACES, num_layers, hidden_size))
        launched = self._launch(Size.of(rows, shown.layers), rows, dice)
        shown.into.copy_(self._features[shown.layers][:count])
        return launched

    def _launch(self, size: Size, rows: Rows, dice: Sequence[Dice | None]) -> CudaLaunched:
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = _Captured(size, self)
        stage = self._stages[self._num_launched % _NUM_STAGES]
        self._num_launched += 1
        stage.fill(captured, rows, dice)
        logits = captured.run()
        stage.fetch(self._drawn)
        return CudaLaunched(stage, logits, num_places=len(dice))


@contextlib.contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is launched within.

    The collector rests meanwhile: should it come upon a graph that nobody needs, to end that would end the capture.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield graph
    finally:
        if was_enabled:
            gc.enable()


class _Captured:
    """A pass of one size: its buffers on the device, and the graph over them once it was captured."""

    def __init__(self, size: Size, passes: CudaPasses) -> None:
        self.size = size
        self.shapes = size.shapes()
        self.num_numbers = sum(int(np.prod(shape)) for shape in self.shapes.values())
        self.paddings = [
            (size, None if padding is _LAST else np.full(size, padding, np.int32))
            for (size,), padding in zip(list(self.shapes.values())[2:], passes.paddings, strict=True)
        ]
        """Of the lines: the length of each, and what its end is filled with."""
        self.numbers = torch.zeros(self.num_numbers, dtype=torch.int32, device=passes._device)
        views = dict(zip(self.shapes, cut(self.numbers, self.shapes), strict=True))
        self._how = cuda_sample.DrawnRows.within(views.pop("how"))
        self._rows = PlacedRows(**views, words=passes._places, most_keys=size.keys)
        self._passes = passes
        self._shown = FeatureBuffer(size.shown, passes._features[size.shown][: size.rows]) if size.shown else None
        self._is_new = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor

    def run(self) -> Tensor:
        """Replay the graph; the first time a size comes up, launch it as it is, and capture it for the next time."""
        if self._graph is not None:
            self._graph.replay()
            return self._logits
        logits = self._launch()
        self._passes._shared.num_firsts += self._is_new
        self._is_new = False
        if self._passes._use_graphs:
            with capture(self._passes._pool) as graph:
                self._logits = self._launch()
            self._graph = graph
        return logits

    def _launch(self) -> Tensor:
        passes = self._passes
        logits = passes._compute(self._rows) if self._shown is None else passes._compute(self._rows, self._shown)
        if self.size.logits:
            words, sureness, rivals = passes._drawn
            cuda_sample.draw(
                logits,
                self._how,
                words=words,
                sureness=sureness.view(torch.float32),
                rivals=rivals,
                scratch=passes._scratch,
                num_sayable=passes._vocab_size,
            )
        return logits


class _Views(NamedTuple):
    """Where the numbers of a pass of one size are written."""

    how: dict[str, NDArray[Any]]
    """By `how.` and the name of `DrawnRows`"""
    tables: Ints
    lines: Ints
    """All others of `Rows`, one after the other"""
    sent: Tensor
    """All of them"""


class _Stage:
    """The numbers of one pass in the host's memory, on their way to the GPU and back."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._numbers = torch.empty(0, dtype=torch.int32)
        self._views: dict[_Captured, _Views] = {}
        self._drawn = torch.empty((3, MOST_PLACES), dtype=torch.int32, pin_memory=self._is_pinned)
        self.words: Ints = self._drawn[0].numpy()
        self.sureness: Floats = self._drawn[1].numpy().view(np.float32)
        self.rivals: Ints = self._drawn[2].numpy()
        self._arrived = torch.cuda.Event() if self._is_pinned else None  # type: ignore[no-untyped-call]

    def fill(self, captured: _Captured, rows: Rows, dice: Sequence[Dice | None]) -> None:
        """Write a pass's numbers down, padded, and send them off."""
        self.wait()  # what was sent from here before has arrived
        to = self._views_of(captured)
        pieces: list[NDArray[Any]] = []
        for line, (length, padding) in zip(_LINES_OF(rows), captured.paddings, strict=True):
            pieces.append(line)
            if missing := length - len(line):
                pieces.append(np.repeat(line[-1:], missing) if padding is None else padding[:missing])
        np.concatenate(pieces, out=to.lines, casting="unsafe")
        num_tables, width = rows.tables.shape
        to.tables[:num_tables, :width] = rows.tables[:, : to.tables.shape[1]]
        if captured.size.logits:
            write_dice(to.how, dice, lambda: rows.positions[rows.logit_rows] + 1)
        captured.numbers.copy_(to.sent, non_blocking=True)

    def fetch(self, drawn: Tensor) -> None:
        """Send the words back when they are there."""
        self._drawn.copy_(drawn, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def has_words(self) -> bool:
        """Whether the words are there."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the words are there."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _views_of(self, captured: _Captured) -> _Views:
        if captured.num_numbers > self._numbers.numel():
            self._numbers = torch.zeros(rounded(captured.num_numbers), dtype=torch.int32, pin_memory=self._is_pinned)
            self._views = {}
        found = self._views.get(captured)
        if found is None:
            sent = self._numbers[: captured.num_numbers]
            how, tables, *_ = cut(sent, captured.shapes)
            drawn = cuda_sample.DrawnRows.within(how)
            found = self._views[captured] = _Views(
                how={f"how.{part.name}": getattr(drawn, part.name).numpy() for part in fields(drawn)},
                tables=tables.numpy(),
                lines=sent[how.numel() + tables.numel() :].numpy(),
                sent=sent,
            )
        return found


class CudaLaunched:
    """A pass under way. Its logits are there until the next pass of the same decoder begins."""

    def __init__(self, stage: _Stage, logits: Tensor, *, num_places: int) -> None:
        self._stage = stage
        self._logits = logits
        self._num_places = num_places

    def drawn(self) -> Drawn:
        """The words of all places; waits for the GPU."""
        self._stage.wait()
        stage, count = self._stage, self._num_places
        return Drawn(stage.words[:count].tolist(), stage.sureness[:count].tolist(), stage.rivals[:count].tolist())

    @property
    def is_over(self) -> bool:
        """Whether the GPU has done it."""
        return self._stage.has_words

    def logits(self, first: int, last: int) -> Floats:
        """The logits of some places; waits for the GPU."""
        on_host: Floats = self._logits[first:last].cpu().numpy()
        return on_host


_LAST = None
"""In place of a padding: the last number once more."""
_PADDING = {"token_ids": 0, "positions": 0, "slots": 0, "group_starts": _LAST, "group_tables": 0, "prefix_lens": 1,
            "tail_starts": _LAST, "tail_slots": 0, "logit_rows": 0}  # fmt: skip
"""The lines, in the order of `Size.shapes`, and what they end with."""
_LINES_OF = attrgetter(*_PADDING)


def cut(numbers: Tensor, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """Arrays that lie one after the other."""
    views, first = [], 0
    for shape in shapes.values():
        count = int(np.prod(shape))
        views.append(numbers[first : first + count].view(shape))
        first += count
    return views


_GREEDY = Dice(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0)


def write_dice(to: dict[str, NDArray[Any]], dice: Sequence[Dice | None], positions: Callable[[], Ints]) -> None:
    """Write how each place is drawn. What is greedy does not even ask for its position.

    Places whose words are drawn on the host are greedy here: that is cheapest, and nobody looks at them.
    """
    temperatures = to["how.temperatures"]
    temperatures.fill(0.0)
    if not any([one is not None and one.temperature for one in dice]):  # noqa: C419 - of hundreds, faster
        return  # nothing else is looked at
    known = [one or _GREEDY for one in dice]
    count = len(known)
    temperatures[:count] = [max(one.temperature, _LEAST_TEMPERATURE) if one.temperature else 0.0 for one in known]
    to["how.top_ps"][:count] = [one.top_p for one in known]
    to["how.min_ps"][:count] = [one.min_p for one in known]
    to["how.top_ks"][:count] = [one.top_k for one in known]
    seeds = np.array([one.seed for one in known], np.uint64).view(np.int32).reshape(-1, 2)
    to["how.seeds_low"][:count], to["how.seeds_high"][:count] = seeds[:, 0], seeds[:, 1]
    to["how.positions"][:count] = positions()
    to["how.choices"][:count] = [one.choice for one in known]

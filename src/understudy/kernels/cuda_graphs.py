"""Launches that are captured as a graph once, then replayed, and how they and the host write to each other.

A graph reads its numbers, and draws its words, where it did when it was captured. The host writes the numbers of the
next replay while one still runs, so it writes them by turns, to its own memory that the device can reach:

    host      letters[turn] = numbers      replay        wait for it       read answers[turn]
    device                                 numbers = letters[turn] ... answers[turn] = what was drawn, turn += 1

Both count turns for themselves. A copy before and one after each replay would do as well, but the device waits between
two graphs then, and launching a copy takes the host longer than replaying the graph.
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.dice import Dice
from understudy.kernels import cuda_ops, cuda_sample
from understudy.kernels.rows import MOST_PLACES, Ints

MOST_DECODERS = 16
_GREEDY = Dice(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0)
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
TURNS = 8
"""Launches of one size of which the answers are kept: more than are ever on their way at once"""

_LEAST_FREE_BYTES = 1 << 30
LEAST_KEYS = 256
"""Shorter texts are computed as if they had so many keys."""
USUAL_KEYS = (LEAST_KEYS, 512, 1024)
"""Texts of these lengths are made ready for."""

Shapes = dict[str, tuple[int, ...]]
"""The arrays of a pass, all of 32 bits, as they lie one after the other in memory."""


Told = tuple[Ints, NDArray[np.float32], Ints]
"""The words of all places, how sure they are, and their rivals"""


class Places:
    """Where the words of all decoders of a device lie: for each its words, how sure they are, and their rivals."""

    def __init__(self, device: torch.device) -> None:
        self.numbers = torch.zeros((MOST_DECODERS, 3, MOST_PLACES), dtype=torch.int32, device=device)
        self.num_firsts = 0
        """Launches that were the first of their size, and took a hundred times as long for it."""
        self._num_taken = 0

    def take(self) -> int:
        """The number of one more decoder; the last one is shared by all who come late, who must not draw ahead."""
        taken = min(self._num_taken, MOST_DECODERS - 1)
        self._num_taken += 1
        return taken


class Home(NamedTuple):
    """Where launches are captured."""

    device: torch.device
    places: Places
    drawn: Tensor
    """int32 [3, MOST_PLACES], the decoder's own of the places; of any, where nothing is drawn"""
    pool: Any = None
    """The memory of all graphs of a decoder; None where nothing is captured"""


class Captured(ABC):
    """What is launched for one size: its numbers, and the graph over them once it was captured."""

    def __init__(self, shapes: Shapes, home: Home, *, num_places: int) -> None:
        """Words are drawn at the first `num_places` of the decoder's places."""
        count = -(-sum(int(np.prod(shape)) for shape in shapes.values()) // 4) * 4  # the next letter is aligned, too
        is_gpu = home.device.type == "cuda"
        self._home = home
        self._numbers = torch.zeros(count, dtype=torch.int32, device=home.device)
        self._letters = torch.zeros((TURNS, count), dtype=torch.int32, pin_memory=is_gpu)
        self._answers = torch.zeros((TURNS, 3, max(1, num_places)), dtype=torch.int32, pin_memory=is_gpu)
        self._told = [(words, sureness.view(np.float32), rivals) for words, sureness, rivals in self._answers.numpy()]
        self._arrived = [torch.cuda.Event() for _ in range(TURNS)] if is_gpu else []  # type: ignore[no-untyped-call]
        self._turn = torch.zeros(1, dtype=torch.int32, device=home.device)
        self._num_launched = 0
        self._is_sound = True
        self._num_places = num_places
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None  # where the graph leaves what `compute` returned
        self.views = dict(zip(shapes, cut(self._numbers, shapes), strict=True))
        """The numbers on the device, as the launches read them."""
        self.letters = [_on_host(letter, shapes) for letter in self._letters]
        """The same on the host, for each turn; those of the dice by name behind `how.`"""

    @abstractmethod
    def compute(self) -> Tensor | None:
        """Launch all there is to compute. What is returned is there until the next launch of the same pool."""

    def next_turn(self) -> int:
        """Whose letter is to be written; waits until the last one of that turn has been read."""
        assert self._is_sound, "a launch has failed: the device's turn may be another one"
        turn = self._num_launched % TURNS
        self.wait(turn)
        return turn

    def launch(self) -> Answer:
        """Compute with the letter of this turn.

        The first time it is launched as it is, and captured for the next time. Who fails here cannot be used again.
        """
        turn = self._num_launched % TURNS
        self._is_sound = False
        if self._graph is not None:
            self._graph.replay()
            result = self._result
        else:
            result = self._launch_all()
            self._home.places.num_firsts += not self._num_launched
            if self._home.pool is not None:
                with _capture(self._home.pool) as graph:
                    left = self._launch_all()
                self._result = None if left is None else _borrowed(left)
                self._graph = graph
        self._num_launched += 1
        if self._arrived:
            self._arrived[turn].record()
        self._is_sound = True
        return Answer(self, self._num_launched, result)

    def _launch_all(self) -> Tensor | None:
        cuda_ops.fetch_letter(self._letters, self._numbers, self._turn)
        result = self.compute()
        cuda_ops.tell_answer(self._home.drawn, self._answers, self._turn, count=self._num_places)
        return result

    def has_answered(self, turn: int) -> bool:
        """Whether the device has done what it was asked last on this turn."""
        return not self._arrived or bool(self._arrived[turn].query())  # type: ignore[no-untyped-call]

    def wait(self, turn: int) -> None:
        """Wait until it has."""
        if self._arrived:
            self._arrived[turn].synchronize()

    def told(self, number: int) -> Told:
        """What launch `number` has drawn; whoever asks has waited for it."""
        assert self._num_launched - number < TURNS, "what is looked at so late is there no more"
        return self._told[(number - 1) % TURNS]


class Answer:
    """What a launch will have drawn."""

    def __init__(self, captured: Captured, number: int, result: Tensor | None) -> None:
        self._captured = captured
        self._number = number
        self.result = result
        """What `compute` returned: it is there until the next launch of the same pool begins"""

    @property
    def is_there(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._captured.has_answered((self._number - 1) % TURNS)

    def wait(self) -> None:
        """Wait for the device."""
        self._captured.wait((self._number - 1) % TURNS)

    def drawn(self) -> Told:
        """What was drawn; waits for the device."""
        self.wait()
        return self._captured.told(self._number)


def has_room(home: Home) -> bool:
    """Whether anything is captured here, and a few more graphs would leave memory for whatever else comes."""
    return home.pool is not None and torch.cuda.mem_get_info(home.device)[0] >= _LEAST_FREE_BYTES


def cut(numbers: Tensor, shapes: Shapes) -> list[Tensor]:
    """Arrays that lie one after the other."""
    views, first = [], 0
    for shape in shapes.values():
        count = int(np.prod(shape))
        views.append(numbers[first : first + count].view(shape))
        first += count
    return views


def rounded(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


def _on_host(letter: Tensor, shapes: Shapes) -> dict[str, NDArray[Any]]:
    parts = dict(zip(shapes, cut(letter, shapes), strict=True))
    found = {name: part.numpy() for name, part in parts.items()}
    if "how" in parts:
        how = cuda_sample.DrawnRows.within(parts["how"])
        found |= {f"how.{field.name}": getattr(how, field.name).numpy() for field in fields(how)}
    return found


def write_dice(to: dict[str, NDArray[Any]], dice: Sequence[Dice | None], positions: Ints) -> None:
    """Write how each place is drawn; where all are greedy nobody looks.

    Places whose words are drawn on the host are greedy here: that is cheapest, and nobody looks at them.
    """
    temperatures = to["how.temperatures"]
    temperatures.fill(0.0)
    known = [one or _GREEDY for one in dice]
    count = len(known)
    temperatures[:count] = [max(one.temperature, _LEAST_TEMPERATURE) if one.temperature else 0.0 for one in known]
    to["how.top_ps"][:count] = [one.top_p for one in known]
    to["how.min_ps"][:count] = [one.min_p for one in known]
    to["how.top_ks"][:count] = [one.top_k for one in known]
    seeds = np.array([one.seed for one in known], np.uint64).view(np.int32).reshape(-1, 2)
    to["how.seeds_low"][:count], to["how.seeds_high"][:count] = seeds[:, 0], seeds[:, 1]
    to["how.positions"][:count] = positions
    to["how.choices"][:count] = [one.choice for one in known]


_TYPES = {torch.float32: "<f4", torch.int32: "<i4"}


class _Place:
    """Memory of a device, by its address."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _borrowed(tensor: Tensor) -> Tensor:
    """The same numbers, without holding their memory: other graphs of the pool may use it when they run.

    Logits of a few hundred rows are tens of megabytes, and there are hundreds of graphs.
    """
    assert tensor.is_contiguous()
    return torch.as_tensor(_Place(tensor), device=tensor.device) if tensor.numel() else tensor


@contextlib.contextmanager
def _capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
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

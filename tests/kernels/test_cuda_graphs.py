"""A captured launch and the host write to each other by turns: each answer is that of its own letter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cuda_device import DEVICE, needs_gpu
from understudy.kernels import cuda_sample
from understudy.kernels.cuda_graphs import TURNS, Captured, Home, Places
from understudy.kernels.rows import MOST_PLACES

SHAPES = {"how": (2 * cuda_sample.INTS_PER_ROW,), "numbers": (1500,), "more": (3, 7)}
"""More than one program fetches, and no multiple of anything"""


class Sums(Captured):
    """Draws what it was told, plus one, two and three."""

    num_launches = 0

    def compute(self) -> torch.Tensor:
        self.num_launches += 1
        for line in range(3):
            self._home.drawn[line, :5] = self.views["numbers"][-5:] + self.views["more"][2, 6] + 1 + line
        return self.views["numbers"] * 2


def home(*, use_graphs: bool) -> Home:
    places = Places(DEVICE)
    pool = torch.cuda.graph_pool_handle() if use_graphs else None
    return Home(DEVICE, places, places.numbers[1], pool)


def new_sums(*, use_graphs: bool) -> Sums:
    return Sums(SHAPES, home(use_graphs=use_graphs), num_places=5)


both = pytest.mark.parametrize("use_graphs", [False, pytest.param(True, marks=needs_gpu)])


@both
def test_each_answer_is_that_of_its_letter(use_graphs: bool) -> None:
    sums = new_sums(use_graphs=use_graphs)
    answers = []
    for number in range(3 * TURNS):
        letter = sums.letters[sums.next_turn()]
        letter["numbers"][-5:] = range(10 * number, 10 * number + 5)
        letter["more"][2, 6] = number
        answers.append(sums.launch())
        assert int(answers[-1].result[-5]) == 20 * number, "of the first launch, too, which was not replayed"
        if number:  # while the next one is on its way
            words, sureness, rivals = answers[-2].drawn()
            expected = torch.arange(10 * number - 10, 10 * number - 5) + number - 1
            assert words.tolist() == (expected + 1).tolist()
            assert sureness.view("int32").tolist() == (expected + 2).tolist()
            assert rivals.tolist() == (expected + 3).tolist()
    answers[-1].wait()
    assert answers[-1].is_there
    assert sums.num_launches == (2 if use_graphs else 3 * TURNS), "once, and once to capture it"
    assert sums._home.places.num_firsts == 1


@both
def test_what_is_looked_at_too_late_is_not_taken_for_another(use_graphs: bool) -> None:
    sums = new_sums(use_graphs=use_graphs)
    first = sums.launch()
    for _ in range(TURNS - 1):
        sums.next_turn()
        sums.launch()
    assert first.drawn()[0].tolist() == [1] * 5
    sums.next_turn()
    sums.launch()
    with pytest.raises(AssertionError, match="no more"):
        first.drawn()


class Large(Captured):
    """Leaves many numbers behind."""

    def compute(self) -> torch.Tensor:
        return self.views["numbers"].float().expand(1 << 16, -1).contiguous()


@needs_gpu
def test_graphs_of_a_pool_leave_what_they_return_in_the_same_memory() -> None:
    """It is there until the next one is launched, whichever that is."""
    shared = home(use_graphs=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = [Large({"numbers": (length,)}, shared, num_places=0) for length in range(256, 64, -16)]
    for graph in graphs:
        graph.next_turn()
        graph.launch().wait()
    torch.cuda.synchronize()
    largest = 4 * 256 << 16
    assert torch.cuda.memory_reserved() - before < 4 * largest, "all of them together have eight times as much"
    for number, graph in enumerate([*graphs, *reversed(graphs)], 1):
        graph.letters[graph.next_turn()]["numbers"][:] = number
        result = graph.launch().result
        assert result is not None
        assert (result == number).all()


def test_nothing_is_drawn_where_no_place_is() -> None:
    sums = Sums(SHAPES, home(use_graphs=False), num_places=0)
    sums._answers[:] = 77
    for _ in range(TURNS + 1):
        sums.next_turn()
        sums.launch().wait()
    assert (sums._answers == 77).all(), "nobody is told anything"
    assert int(sums._turn) == 1
    assert sums._home.drawn.shape == (3, MOST_PLACES)


def test_who_has_failed_is_not_used_again() -> None:
    """Half a launch may have moved the device's turn, and not the host's."""

    class Failing(Sums):
        def compute(self) -> torch.Tensor:
            raise torch.OutOfMemoryError

    failing = Failing(SHAPES, home(use_graphs=False), num_places=5)
    failing.next_turn()
    with pytest.raises(torch.OutOfMemoryError):
        failing.launch()
    with pytest.raises(AssertionError, match="failed"):
        failing.next_turn()

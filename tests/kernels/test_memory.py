"""Memory in large pages: zeros of one's own, in line with pages, also where a system has no large ones."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.kernels import memory
from understudy.kernels.memory import Shelf, large_zeros


def test_large_zeros_begin_where_a_large_page_does() -> None:
    numbers = large_zeros((3, 5, 7))
    assert numbers.shape == (3, 5, 7)
    assert numbers.dtype == np.float32
    assert not numbers.any()
    assert numbers.ctypes.data % 2**21 == 0
    numbers += 1.0
    assert not large_zeros((3, 5, 7)).any()


@given(st.lists(st.tuples(st.integers(1, 70), st.sampled_from(["uint8", "int8", "float32"])), max_size=40))
def test_a_shelf_gives_everybody_zeros_of_his_own(asked: list[tuple[int, str]]) -> None:
    shelf = Shelf()
    taken = []
    for number, (count, dtype) in enumerate(asked):
        array = shelf.zeros((count, 3), dtype)
        assert array.shape == (count, 3)
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[...] = number
        taken.append(array)
    assert all((array == number).all() for number, array in enumerate(taken))


def test_what_does_not_fit_gets_a_new_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE_BYTES", 1000)
    shelf = Shelf()
    taken = [shelf.zeros((count,), np.uint8) for count in (600, 300, 5000, 999, 2)]
    for number, array in enumerate(taken, 1):
        array[...] = number
    assert [(len(array), set(array.tolist())) for array in taken] == [
        (600, {1}), (300, {2}), (5000, {3}), (999, {4}), (2, {5}),
    ]  # fmt: skip


def test_small_pages_serve_where_there_are_no_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    numbers = large_zeros((1000,))
    numbers[-1] = 2.0
    assert numbers.sum() == 2.0


def test_what_cannot_be_had_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="memory"):
        large_zeros((1 << 48,))

"""Which passes share a graph, and which of them are made ready before anybody asks."""

from __future__ import annotations

import itertools

import pytest

from tests.kernels.cuda_device import DEVICE
from understudy.kernels.cuda_passes import Size, usual_sizes

assert DEVICE  # it says whether these kernels can be imported here

SHOWN = (1, 5)


def size_of(num_rows: int, num_groups: int, *, num_keys: int = 300, num_tails: int = 0, draws: bool = True) -> Size:
    return Size.holding(
        num_rows,
        num_groups=num_groups,
        num_logits=num_rows,
        num_keys=num_keys,
        num_tails=num_tails,
        draws=draws,
        shown=SHOWN,
    )


def test_a_tree_a_chain_and_no_draft_share_a_size() -> None:
    plain = size_of(32, 32)
    assert plain == size_of(29, 32, num_tails=100) == size_of(32, 20, num_tails=256)
    assert size_of(32, 32, num_tails=257).tails == 512, "there is room for any tree"


@pytest.mark.parametrize("num_texts", [1, 3, 8, 31, 64])
@pytest.mark.parametrize("num_each", [1, 2, 4, 5, 8])
def test_texts_that_are_written_find_a_pass_ready(num_texts: int, num_each: int) -> None:
    """In line four rows of a text read keys together; those off it do so alone, each with a tail."""
    usual = set(usual_sizes(SHOWN))
    num_rows = num_texts * num_each
    for num_keys, draws in itertools.product((40, 500, 1024), (False, True)):
        for num_groups in (num_texts * -(-num_each // 4), num_rows):
            wanted = size_of(num_rows, num_groups, num_keys=num_keys, num_tails=2 * num_rows, draws=draws)
            assert (wanted in usual) == (num_rows <= 256)


def test_few_sizes_are_made_ready_and_none_twice() -> None:
    usual = usual_sizes(())
    assert len(usual) == len(set(usual)) < 256

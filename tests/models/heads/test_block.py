"""A block sees its context up to its anchor and itself, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_heads import NUM_DRAFT_IDS, tiny_spec, tiny_teacher
from understudy.models.heads.block import BlockHead, block_mask
from understudy.train.run import new_head


@pytest.fixture(scope="module")
def head() -> BlockHead:
    head = new_head(tiny_spec("block", tiny_teacher().config), seed=1)
    assert isinstance(head, BlockHead)
    return head


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_mask_by_hand() -> None:
    mask = block_mask(torch.tensor([[1, 0]]), num_context=3, num_rows=2)
    rows = ["".join("x" if seen else "." for seen in row) for row in mask[0].tolist()]
    #        context, block of anchor 1, block of anchor 0
    assert rows == ["xx." "xx" "..", "xx." "xx" "..", "x.." ".." "xx", "x.." ".." "xx"]  # fmt: skip


@torch.no_grad()
def test_blocks_side_by_side_are_those_alone(head: BlockHead) -> None:
    context = head.context(drawn(2, 9, 4, 64))
    anchors = torch.tensor([[2, 7, 4], [0, 3, 8]])
    embeddings = drawn(2, 3, 64, seed=1)
    together = head(context, anchors, embeddings)
    assert together.shape == (2, 3, 4, 64)
    for line in range(2):
        for place, anchor in enumerate(anchors[line].tolist()):
            known = context[line : line + 1, : anchor + 1]  # as serving has it: nothing after the anchor exists
            alone = head(known, anchors[line : line + 1, place : place + 1], embeddings[line : line + 1, place, None])
            torch.testing.assert_close(together[line, place], alone[0, 0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_every_row_depends_on_the_context_and_on_the_anchors_token(head: BlockHead) -> None:
    context, anchors, embeddings = head.context(drawn(1, 6, 4, 64)), torch.tensor([[5]]), drawn(1, 1, 64, seed=1)
    rows = head(context, anchors, embeddings)[0, 0]
    other_context = head(head.context(drawn(1, 6, 4, 64, seed=2)), anchors, embeddings)[0, 0]
    other_token = head(context, anchors, drawn(1, 1, 64, seed=3))[0, 0]
    for other in (other_context, other_token):
        assert bool(((rows - other).abs().amax(dim=-1) > 1e-3).all())
    assert len({tuple(row) for row in rows.round(decimals=3).tolist()}) == 4


@torch.no_grad()
def test_bias_is_low_rank_and_unknown_tokens_share_a_line(head: BlockHead) -> None:
    assert torch.equal(head.bias(torch.arange(3)), torch.zeros(3, NUM_DRAFT_IDS))  # nothing until it is trained
    weight = drawn(NUM_DRAFT_IDS, 8)
    trained = new_head(head.spec, seed=1)
    trained.markov_out.weight.copy_(weight)
    before = torch.tensor([-1, 0, 39])
    lines = trained.markov_in.weight[[NUM_DRAFT_IDS, 0, 39]]
    torch.testing.assert_close(trained.bias(before), lines @ weight.T)


@torch.no_grad()
def test_confidence_is_one_number_for_each_row(head: BlockHead) -> None:
    odds = head.confidence(drawn(2, 3, 64), torch.zeros(2, 3, dtype=torch.int64))
    assert odds.shape == (2, 3)
    assert len(set(odds.flatten().tolist())) == 6

"""EAGLE: many anchors unrolled at once compute what serving computes, one anchor and one row at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tiny_heads import tiny_spec, tiny_teacher
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.layers import KeysValues
from understudy.train.run import new_head
from understudy.train.teacher import Reading

NUM_STEPS = 4


@pytest.fixture(scope="module")
def head() -> EagleHead:
    head = new_head(tiny_spec("eagle", tiny_teacher().config), seed=1)
    assert isinstance(head, EagleHead)
    return head


@pytest.fixture(scope="module")
def reading() -> Reading:
    tokens = torch.randint(0, 304, (2, 12), generator=torch.Generator().manual_seed(0))
    return tiny_teacher().read(tokens, (2, 3, 4))


def serve_one(head: EagleHead, reading: Reading, line: int, anchor: int) -> list[Tensor]:
    """True rows up to the anchor into a cache, one by one, then drafted rows behind them: the states of each step."""
    embedding = tiny_teacher().embedding
    past: KeysValues | None = None
    for position in range(anchor + 1):
        fused = head.fusion(reading.features[line, position])[None, None]
        read = embedding[reading.token_ids[line, position + 1]][None, None]
        state, past = head.read(fused, read, torch.tensor([position]), past)
    states = [state]
    for step in range(1, NUM_STEPS):
        read = embedding[reading.token_ids[line, anchor + 1 + step]][None, None]
        state, past = head.read(state, read, torch.tensor([anchor + step]), past)
        states.append(state)
    return [state[0, 0] for state in states]


@torch.no_grad()
def test_unrolled_is_what_serving_computes(head: EagleHead, reading: Reading) -> None:
    embedding = tiny_teacher().embedding
    anchors = torch.tensor([[0, 5, 3, 7], [6, 1, 7, 2]])
    following = embedding[reading.token_ids.roll(-1, dims=1)]
    steps = head.unroll(
        reading.features,
        following,
        anchors,
        embed=lambda step: embedding[reading.token_ids.gather(1, anchors + 1 + step)],
        num_steps=NUM_STEPS,
    )
    unrolled = torch.stack(list(steps))  # [steps, B, A, hidden]
    assert unrolled.shape == (NUM_STEPS, 2, 4, 64)
    for line in range(2):
        for place, anchor in enumerate(anchors[line].tolist()):
            for step, state in enumerate(serve_one(head, reading, line, anchor)):
                torch.testing.assert_close(unrolled[step, line, place], state, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_drafted_rows_differ_from_true_ones(head: EagleHead, reading: Reading) -> None:
    """Were the own states not fed, or drafted rows not seen, the test above could still hold of a simpler network."""
    embedding = tiny_teacher().embedding
    following = embedding[reading.token_ids.roll(-1, dims=1)]
    anchors = torch.tensor([[3, 4], [3, 4]])
    first, second = head.unroll(
        reading.features,
        following,
        anchors,
        embed=lambda step: embedding[reading.token_ids.gather(1, anchors + 1 + step)],
        num_steps=2,
    )
    # position 4 once drafted from anchor 3, once true
    assert not torch.allclose(second[:, 0], first[:, 1], atol=1e-2)


@torch.no_grad()
def test_no_anchor_sees_what_comes_after_it(head: EagleHead, reading: Reading) -> None:
    embedding = tiny_teacher().embedding
    following = embedding[reading.token_ids.roll(-1, dims=1)]
    anchors = torch.tensor([[4], [4]])
    changed, later = reading.features.clone(), following.clone()
    changed[:, 5:] += 1.0
    later[:, 5:] += 1.0

    def states(features: Tensor, embeddings: Tensor) -> Tensor:
        drafted = head.unroll(
            features, embeddings, anchors, embed=lambda step: embedding[torch.tensor([[step], [9]])], num_steps=3
        )
        return torch.stack(list(drafted))

    assert torch.equal(states(reading.features, following), states(changed, later))


def test_its_size_is_what_the_recipe_says() -> None:
    """The embedded model's shape: about 5.1 million weights."""
    config = tiny_teacher(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    ).config
    head = new_head(tiny_spec("eagle", config), seed=0)
    assert 4.9e6 < sum(parameter.numel() for parameter in head.parameters()) < 5.3e6

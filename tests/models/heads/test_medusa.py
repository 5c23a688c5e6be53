"""Medusa: independent heads that begin as nothing."""

from __future__ import annotations

import torch

from tests.tiny_heads import tiny_spec, tiny_teacher
from understudy.models.heads.medusa import MedusaHead
from understudy.train.run import new_head


def test_untrained_heads_change_nothing_and_trained_ones_do() -> None:
    head = new_head(tiny_spec("medusa", tiny_teacher().config, num_layers=2), seed=0)
    assert isinstance(head, MedusaHead)
    states = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(states), states[:, :, None].expand(-1, -1, 4, -1))
    last = head.heads[2][1].linear  # the second block of head 2
    with torch.no_grad():
        last.bias.fill_(1.0)
    changed = head(states)
    expected = states + torch.nn.functional.silu(torch.ones(64))
    torch.testing.assert_close(changed[:, :, 2], expected)
    assert torch.equal(changed[:, :, 1], states)

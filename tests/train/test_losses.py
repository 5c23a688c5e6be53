"""The distance between laws: against sums by hand, and falling when it is followed."""

from __future__ import annotations

import pytest
import torch

from understudy.train.losses import draft_loss, survival_loss, target_laws

IDS = torch.tensor([0, 2, 3])
LOGITS = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 0.0]])
"""The best word of line 0 (1) cannot be drafted, that of line 1 (2) can."""


def test_laws() -> None:
    laws = target_laws(LOGITS, IDS, (0.0, 0.7))
    greedy, warm = (p.scatter(1, laws.places, p) for p in laws.p)  # by place again, the likeliest were first
    assert greedy.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    torch.testing.assert_close(warm, (LOGITS / 0.7).softmax(-1)[:, [0, 2, 3]])
    assert bool((warm.sum(-1) < 1.0).all())  # what cannot be drafted is not given to others


def test_total_variation_by_hand() -> None:
    draft = torch.tensor([[0.3, 0.1, -0.2], [0.0, 1.0, 0.0]])
    laws = target_laws(LOGITS, IDS, (1.0,))
    p, q = LOGITS.softmax(-1), draft.softmax(-1)
    whole_q = torch.zeros(2, 4)
    whole_q[:, IDS] = q
    variation = 0.5 * (p - whole_q).abs().sum(-1)
    loss, accepted = draft_loss(draft, laws, (1.0,), cross_entropy_share=0.0)
    torch.testing.assert_close(loss, variation)
    torch.testing.assert_close(accepted, 1.0 - variation)


def test_the_same_law_has_no_distance() -> None:
    laws = target_laws(LOGITS, torch.arange(4), (0.7, 1.0))
    loss, accepted = draft_loss(LOGITS, laws, (0.7, 1.0), cross_entropy_share=0.0)
    assert loss.abs().max() < 1e-6
    assert accepted.min() > 1.0 - 1e-6


def test_acceptance_at_temperature_0_is_whether_the_best_agree() -> None:
    laws = target_laws(LOGITS, IDS, (0.0,))
    right, wrong = torch.tensor([[0.0, 5.0, 4.9]] * 2), torch.tensor([[5.0, 0.0, 0.0]] * 2)
    assert draft_loss(right, laws, (0.0,), cross_entropy_share=0.1)[1].tolist() == [0.0, 1.0]
    assert draft_loss(wrong, laws, (0.0,), cross_entropy_share=0.1)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_following_it_brings_the_laws_together(share: float) -> None:
    temperatures = (0.0, 0.7, 1.0)
    laws = target_laws(LOGITS[1:], IDS, temperatures)
    draft = torch.zeros(1, 3, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    rates: list[float] = []
    for _ in range(100):
        losses, accepted = draft_loss(draft, laws, temperatures, cross_entropy_share=share)
        rates.append(float(accepted))
        loss = losses.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert rates[-1] > rates[0] + 0.2


def test_survival_is_smallest_at_the_truth() -> None:
    accepted = torch.tensor([0.25, 0.9])
    truth = torch.logit(accepted)
    best = survival_loss(truth, accepted)
    for shift in (-0.5, 0.5):
        assert bool((survival_loss(truth + shift, accepted) > best).all())


def test_unlikely_words_are_left_out_of_a_law_and_hardly_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, draft = (6.0 * torch.randn(4, 50, generator=generator) for _ in range(2))
    ids, temperatures = torch.arange(50), (0.0, 0.7, 1.0)
    whole = draft_loss(draft, target_laws(logits, ids, temperatures), temperatures, cross_entropy_share=0.0)
    monkeypatch.setattr("understudy.train.losses.NUM_LIKELIEST", 16)
    laws = target_laws(logits, ids, temperatures)
    assert laws.places.shape == (4, 16)
    for few, all_of_them in zip(draft_loss(draft, laws, temperatures, cross_entropy_share=0.0), whole, strict=True):
        torch.testing.assert_close(few, all_of_them, atol=2e-3, rtol=0.0)

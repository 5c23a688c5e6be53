"""The distance between laws: against sums by hand, and falling when it is followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from understudy.train.losses import Distance, Laws, draft_loss, survival_loss, target_laws

IDS = torch.tensor([0, 2, 3])
LOGITS = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 0.0]])
"""The best word of line 0 (1) cannot be drafted, that of line 1 (2) can."""


def measured(
    scores: Tensor, laws: Laws, temperatures: tuple[float, ...], *, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of scores, and how likely they are right."""
    distance = Distance(temperatures=temperatures, cross_entropy_share=share)
    losses, accepted, _ = distance.measure(scores, laws, torch.ones(len(scores)))
    return losses, accepted


def plainly(scores: Tensor, laws: Laws, temperatures: tuple[float, ...], share: float) -> Tensor:
    """The losses as they are written down, for torch to find the way back by itself."""
    losses = []
    for p, temperature in zip(laws.p, temperatures, strict=True):
        log_q = (scores / (temperature or 1.0)).log_softmax(-1).gather(-1, laws.places)
        variation = 1.0 - torch.minimum(p, log_q.exp()).sum(-1)
        losses.append((1.0 - share) * variation - share * (p * log_q).sum(-1))
    return torch.stack(losses).mean(0)


@pytest.mark.parametrize("most_scores", [1 << 20, 60])
@pytest.mark.parametrize("has_lines", [False, True])
def test_the_gradient_is_that_of_the_loss(has_lines: bool, most_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's own, for hidden states, lines and their weights, in one piece and in many."""
    monkeypatch.setattr("understudy.train.losses._MOST_SCORES", most_scores)
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    hidden, lines, bias_out = drawn(7, 5), drawn(7, 3), drawn(20, 3)
    output, weights = drawn(20, 5).detach(), torch.rand(7, generator=generator)
    temperatures = (0.0, 0.7, 1.0)
    laws = target_laws(2.0 * drawn(7, 30).detach(), torch.arange(0, 30)[:20], temperatures)
    distance = Distance(temperatures=temperatures, cross_entropy_share=0.3)
    learned = [hidden, lines, bias_out] if has_lines else [hidden]
    scores = hidden @ output.T + (lines @ bias_out.T if has_lines else 0.0)
    expected = (plainly(scores, laws, temperatures, 0.3) * weights).sum()
    their_lines = {"lines": lines, "bias_out": bias_out} if has_lines else {}
    found, accepted = draft_loss(hidden, output, laws, distance, weights=weights, **their_lines)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(accepted, measured(scores.detach(), laws, temperatures)[1])
    for own, theirs in zip(
        torch.autograd.grad(3.0 * found, learned), torch.autograd.grad(expected, learned), strict=True
    ):
        torch.testing.assert_close(own, 3.0 * theirs)


def test_packed_laws_say_the_same() -> None:
    laws = target_laws(LOGITS, IDS, (0.0, 0.7))
    for scores in (LOGITS[:, IDS], -LOGITS[:, IDS]):
        for packed, plain in zip(
            measured(scores, laws.packed(), (0.0, 0.7)), measured(scores, laws, (0.0, 0.7)), strict=True
        ):
            torch.testing.assert_close(packed, plain, atol=1e-3, rtol=0.0)


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
    loss, accepted = measured(draft, laws, (1.0,))
    torch.testing.assert_close(loss, variation)
    torch.testing.assert_close(accepted, 1.0 - variation)


def test_the_same_law_has_no_distance() -> None:
    laws = target_laws(LOGITS, torch.arange(4), (0.7, 1.0))
    loss, accepted = measured(LOGITS, laws, (0.7, 1.0))
    assert loss.abs().max() < 1e-6
    assert accepted.min() > 1.0 - 1e-6


def test_acceptance_at_temperature_0_is_whether_the_best_agree() -> None:
    laws = target_laws(LOGITS, IDS, (0.0,))
    right, wrong = torch.tensor([[0.0, 5.0, 4.9]] * 2), torch.tensor([[5.0, 0.0, 0.0]] * 2)
    assert measured(right, laws, (0.0,))[1].tolist() == [0.0, 1.0]
    assert measured(wrong, laws, (0.0,))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_following_it_brings_the_laws_together(share: float) -> None:
    temperatures = (0.0, 0.7, 1.0)
    laws = target_laws(LOGITS[1:], IDS, temperatures)
    draft = torch.zeros(1, 3, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    rates: list[float] = []
    for _ in range(100):
        distance = Distance(temperatures=temperatures, cross_entropy_share=share)
        loss, accepted = draft_loss(draft, torch.eye(3), laws, distance, weights=torch.ones(1))
        rates.append(float(accepted))
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
    whole = measured(draft, target_laws(logits, ids, temperatures), temperatures)
    monkeypatch.setattr("understudy.train.losses.NUM_LIKELIEST", 16)
    laws = target_laws(logits, ids, temperatures)
    assert laws.places.shape == (4, 16)
    for few, all_of_them in zip(measured(draft, laws, temperatures), whole, strict=True):
        torch.testing.assert_close(few, all_of_them, atol=2e-3, rtol=0.0)

"""The distance between laws: against sums by hand, and falling when it is followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.train.losses import Distance, Laws, draft_loss, survival_loss, target_laws

IDS = torch.tensor([0, 2, 3])
LOGITS = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 0.0]])
"""The best word of line 0 (1) cannot be drafted, that of line 1 (2) can."""


def laws_of(logits: Tensor, ids: Tensor, temperatures: tuple[float, ...]) -> Laws:
    """Laws of a target whose last states are its logits."""
    return target_laws(logits, logits, DraftVocabulary(ids, logits.shape[1]), temperatures)


def measured(
    scores: Tensor, laws: Laws, ids: Tensor, temperatures: tuple[float, ...], *, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses of scores, and how likely they are right."""
    distance = Distance(temperatures=temperatures, cross_entropy_share=share)
    losses, accepted, _ = distance.measure(scores, laws.states[:, ids], laws, torch.ones(len(scores)))
    return losses, accepted


def plainly(scores: Tensor, logits: Tensor, ids: Tensor, temperatures: tuple[float, ...], share: float) -> Tensor:
    """The losses as they are written down, for torch to find the way back by itself."""
    losses = []
    for temperature in temperatures:
        whole = (logits / temperature).softmax(-1) if temperature else one_hot(logits.argmax(-1), logits.shape[1])
        p, log_q = whole[:, ids], (scores / (temperature or 1.0)).log_softmax(-1)
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
    weights = torch.rand(7, generator=generator)
    temperatures = (0.0, 0.7, 1.0)
    ids, whole_output = torch.arange(3, 23), drawn(30, 5).detach()
    output, states = whole_output[ids], 2.0 * drawn(7, 5).detach()
    logits = states @ whole_output.T
    laws = target_laws(states, logits, DraftVocabulary(ids, 30), temperatures)
    assert 0 < int((laws.best < 0).sum()) < 7, "some best words can be drafted, some cannot"
    distance = Distance(temperatures=temperatures, cross_entropy_share=0.3)
    learned = [hidden, lines, bias_out] if has_lines else [hidden]
    scores = hidden @ output.T + (lines @ bias_out.T if has_lines else 0.0)
    expected = (plainly(scores, logits, ids, temperatures, 0.3) * weights).sum()
    their_lines = {"lines": lines, "bias_out": bias_out} if has_lines else {}
    found, accepted = draft_loss(hidden, output, laws, distance, weights=weights, **their_lines)
    torch.testing.assert_close(found, expected)
    again = distance.measure(scores.detach(), logits[:, ids], laws, weights)
    torch.testing.assert_close(accepted, again[1])
    for own, theirs in zip(
        torch.autograd.grad(3.0 * found, learned), torch.autograd.grad(expected, learned), strict=True
    ):
        torch.testing.assert_close(own, 3.0 * theirs)


def test_laws() -> None:
    laws = laws_of(LOGITS, IDS, (0.0, 0.7))
    assert laws.best.tolist() == [-1, 1]
    torch.testing.assert_close(laws.log_totals[1], (LOGITS / 0.7).logsumexp(-1))
    warm = (laws.states[:, IDS] / 0.7 - laws.log_totals[1][:, None]).exp()
    torch.testing.assert_close(warm, (LOGITS / 0.7).softmax(-1)[:, [0, 2, 3]])
    assert bool((warm.sum(-1) < 1.0).all())  # what cannot be drafted is not given to others
    line = laws.at(torch.tensor([1]))
    assert (line.best.tolist(), line.states.shape, line.log_totals.shape) == ([1], (1, 4), (2, 1))


def test_total_variation_by_hand() -> None:
    draft = torch.tensor([[0.3, 0.1, -0.2], [0.0, 1.0, 0.0]])
    laws = laws_of(LOGITS, IDS, (1.0,))
    p, q = LOGITS.softmax(-1), draft.softmax(-1)
    whole_q = torch.zeros(2, 4)
    whole_q[:, IDS] = q
    variation = 0.5 * (p - whole_q).abs().sum(-1)
    loss, accepted = measured(draft, laws, IDS, (1.0,))
    torch.testing.assert_close(loss, variation)
    torch.testing.assert_close(accepted, 1.0 - variation)


def test_the_same_law_has_no_distance() -> None:
    ids = torch.arange(4)
    loss, accepted = measured(LOGITS, laws_of(LOGITS, ids, (0.7, 1.0)), ids, (0.7, 1.0))
    assert loss.abs().max() < 1e-6
    assert accepted.min() > 1.0 - 1e-6


def test_acceptance_at_temperature_0_is_whether_the_best_agree() -> None:
    laws = laws_of(LOGITS, IDS, (0.0,))
    right, wrong = torch.tensor([[0.0, 5.0, 4.9]] * 2), torch.tensor([[5.0, 0.0, 0.0]] * 2)
    assert measured(right, laws, IDS, (0.0,))[1].tolist() == [0.0, 1.0]
    assert measured(wrong, laws, IDS, (0.0,))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_following_it_brings_the_laws_together(share: float) -> None:
    temperatures = (0.0, 0.7, 1.0)
    output = torch.eye(4)[IDS]
    laws = laws_of(LOGITS[1:], IDS, temperatures)
    draft = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    rates: list[float] = []
    for _ in range(100):
        distance = Distance(temperatures=temperatures, cross_entropy_share=share)
        loss, accepted = draft_loss(draft, output, laws, distance, weights=torch.ones(1))
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


def test_a_draft_hears_of_unlikely_words_too() -> None:
    """Of 2,000 words that are equally unlikely it learns to say every one."""
    logits = torch.zeros(1, 2000)
    logits[0, :3] = 8.0
    ids = torch.arange(2000)
    draft = torch.full((1, 2000), 0.0)
    draft[0, :3] = 20.0
    draft.requires_grad_()
    laws, distance = laws_of(logits, ids, (1.0,)), Distance(temperatures=(1.0,), cross_entropy_share=0.1)
    draft_loss(draft, torch.eye(2000), laws, distance, weights=torch.ones(1))[0].backward()  # type: ignore[no-untyped-call]
    assert draft.grad is not None
    assert bool((draft.grad[0, 3:] < 0.0).all())
    assert bool((draft.grad[0, :3] > 0.0).all())

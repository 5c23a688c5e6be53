"""Trained drafts on the CPU guess what the networks of models/heads do, whatever is read when and beside whom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.grown_trees import Path, grow_by_levels
from tests.tiny_heads import greedy_chains, stirred, tiny_decoder, tiny_guesser, trained_head
from tests.tiny_models import tiny_config, tiny_tensors

from understudy.control.cost import CostModel
from understudy.core.draft import EMPTY, Draft
from understudy.core.request import SamplingParams
from understudy.core.weights import WeightType
from understudy.drafters import seen
from understudy.drafters.base import Budget, Context
from understudy.drafters.packed import FEW_ROWS, output_rows
from understudy.drafters.seen import SeeingDrafter
from understudy.drafters.trained import _choose_threads, make_trained_drafter
from understudy.drafters.tree import Guesses, Shape, children
from understudy.kernels.cpu import CpuKernels
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.models.heads import block
from understudy.models.heads.block import BlockHead
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.sampling.noise import NoiseKey
from understudy.train.guesses import Guess, Guesser
from understudy.train.teacher import Reading

Floats = NDArray[np.float32]
CHAIN = Budget(max_depth=4, max_rows=4)
TREE = Budget(max_depth=4, max_rows=14)
LENGTH = 60


class Case:
    """A tiny draft, one text that its target has read, and drafters made of it."""

    def __init__(self, kind: HeadKind, *, seed: int = 0) -> None:
        self.guesser: Guesser = stirred(tiny_guesser(kind, seed=seed), seed=seed + 1)
        self.decoder = tiny_decoder(self.guesser)
        generator = torch.Generator().manual_seed(seed)
        self.tokens: list[int] = torch.randint(0, 300, (LENGTH,), generator=generator).tolist()
        self.reading: Reading = self.guesser.teacher.read(
            torch.tensor([self.tokens]), self.guesser.head.spec.feature_layers
        )
        features = self.reading.features if kind != "medusa" else self.reading.last_hidden[:, :, None]
        self.features: Floats = features[0].contiguous().numpy()  # [positions, layers, hidden]

    def drafter(self, num_children: int = 1, weights: WeightType = "fp32", **shape: Any) -> SeeingDrafter:
        shaped = Shape(num_children, **shape)
        return make_trained_drafter(
            trained_head(self.guesser), self.decoder, shape=shaped, weights=weights, cost=CostModel({1: 1.0})
        )

    def context(self, anchor: int, *, temperature: float = 0.0, sequence_id: int = 1, seed: int = 3) -> Context:
        params = SamplingParams(temperature=temperature)
        tokens = self.tokens[: anchor + 2]
        return Context(sequence_id, tokens, 1, "", temperature, NoiseKey(seed), params)

    def draft(self, drafter: SeeingDrafter, anchor: int, budget: Budget = CHAIN, **context: Any) -> Draft:
        """From one anchor, all rows before it read at once."""
        about = self.context(anchor, **context)
        drafter.see(about, 0, self.features[: anchor + 1])
        (draft,) = drafter.propose([about], [budget])
        drafter.stop(about, finished=True)
        return draft

    def greedy(self, anchors: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = greedy_chains(self.guesser, self.reading, torch.tensor([anchors]))[0].tolist()
        return found

    @torch.no_grad()
    def logits(self, anchor: int, path: Path) -> torch.Tensor:
        """What the network itself says after a path of guesses: [draft ids]."""
        guesser, head = self.guesser, self.guesser.head
        if isinstance(head, EagleHead):
            fed = head.fusion(self.reading.features[:, : anchor + 1])
            following = guesser.teacher.embedding[torch.tensor([self.tokens[1 : anchor + 2]])]
            states, past = head.read(fed, following, torch.arange(anchor + 1))
            for depth, token in enumerate(path, 1):
                embedding = guesser.teacher.embedding[torch.tensor([[token]])]
                states, past = head.read(states[:, -1:], embedding, torch.tensor([anchor + depth]), past)
            return Guess(head.output_norm(states[0, -1]), guesser._output).logits
        words = [self.tokens[anchor + 1], *path]

        def before(k: int, logits: object) -> torch.Tensor:
            return torch.tensor([[words[k]]])

        guesses = guesser.after(self.reading, torch.tensor([[anchor]]), before)
        return next(guess.logits[0, 0] for k, guess in enumerate(guesses) if k == len(path))

    def guesses(self, anchor: int, path: Path) -> Guesses:
        log_q = self.logits(anchor, path).log_softmax(dim=-1)
        return Guesses(self.guesser.vocabulary.ids.numpy(), log_q.numpy())


@pytest.fixture(scope="module", params=HEAD_KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


ANCHORS = [0, 1, 2, 7, 30, 31, 32, 33, 50]


def test_a_chain_is_the_network_s_own_greedy_guesses(case: Case) -> None:
    drafter = case.drafter()
    drafts = [case.draft(drafter, anchor) for anchor in ANCHORS]
    assert [list(draft.tokens) for draft in drafts] == case.greedy(ANCHORS)
    assert len({draft.tokens for draft in drafts}) > len(drafts) // 2, "the case says the same everywhere"
    assert all(draft.parents == (-1, 0, 1, 2) for draft in drafts)
    assert drafter.num_texts == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_children", [1, 3])
def test_a_tree_is_the_one_that_the_network_s_guesses_grow(case: Case, temperature: float, num_children: int) -> None:
    """Without trained confidence, which belongs to blocks alone, every node and number is that of `grow_by_levels`."""
    drafter = case.drafter(num_children)
    for anchor in ANCHORS[-3:]:
        context = case.context(anchor, temperature=temperature)
        draft = case.draft(drafter, anchor, TREE, temperature=temperature)
        if isinstance(case.guesser.head, BlockHead):
            check_nodes(case, draft, context, anchor, num_children)
            continue
        wanted = grow_by_levels(
            lambda paths, anchor=anchor: [case.guesses(anchor, path) for path in paths],  # type: ignore[misc]
            context, TREE, shape=Shape(num_children), width=seen.WIDTH, source=drafter.name,
        )  # fmt: skip
        assert draft.parents == wanted.parents
        assert draft.tokens == wanted.tokens
        np.testing.assert_allclose(draft.confidence, wanted.confidence, rtol=2e-3)
        assert set(draft.sources) == {drafter.name}
        assert len(draft) == (TREE.max_rows if num_children > 1 else TREE.max_depth)


def check_nodes(case: Case, draft: Draft, context: Context, anchor: int, num_children: int) -> None:
    """Every node is one of the children that the network's guesses have there; a better sibling stands before it."""
    assert len(draft) == (TREE.max_rows if num_children > 1 else TREE.max_depth)
    for node, parent in enumerate(draft.parents):
        path = tuple(draft.tokens[place] for place in draft.path(parent)) if parent >= 0 else ()
        found = children(
            case.guesses(anchor, path), context, position=anchor + 2 + len(path), shape=Shape(num_children)
        )
        siblings = [draft.tokens[other] for other, of in enumerate(draft.parents) if of == parent]
        assert siblings == [child.token for child in found[: len(siblings)]]
        assert draft.tokens[node] in siblings


def test_a_block_says_how_sure_it_was_trained_to_be() -> None:
    case = Case("block")
    head = case.guesser.head
    assert isinstance(head, BlockHead)
    anchor = 40
    guesses = case.guesser.after(case.reading, torch.tensor([[anchor]]), lambda k, _: torch.tensor([[words[k]]]))
    chain = case.draft(case.drafter(), anchor)
    words = [case.tokens[anchor + 1], *chain.tokens]
    with torch.no_grad():
        sure = [float(guess.confidence.sigmoid()) for guess in guesses if guess.confidence is not None]
    np.testing.assert_allclose(chain.confidence, sure, rtol=1e-3)
    tree = case.draft(case.drafter(3), anchor, TREE)
    for parent in set(tree.parents):
        siblings = [tree.confidence[node] for node, of in enumerate(tree.parents) if of == parent]
        assert siblings == sorted(siblings, reverse=True)
        assert sum(siblings) <= 1.0 + 1e-6


def test_eight_bits_guess_nearly_the_same(case: Case) -> None:
    anchors = list(range(2, 52))
    exact, rounded = case.drafter(), case.drafter(weights="int8")
    pairs = [(case.draft(exact, anchor), case.draft(rounded, anchor)) for anchor in anchors]
    first = [a.tokens[0] == b.tokens[0] for a, b in pairs]
    assert np.mean(first) > 0.85
    same = [(a.confidence[0], b.confidence[0]) for (a, b), is_same in zip(pairs, first, strict=True) if is_same]
    assert np.abs(np.diff(np.array(same), axis=1)).mean() < 0.03


@pytest.mark.parametrize("num_children", [1, 3])
def test_texts_side_by_side_are_drafted_as_one_by_one(case: Case, num_children: int) -> None:
    anchors, budgets = [3, 31, 50, 12], [TREE, CHAIN, Budget(2, 9), Budget(4, 1)]
    drafter = case.drafter(num_children)
    alone = [case.draft(drafter, anchor, budget) for anchor, budget in zip(anchors, budgets, strict=True)]
    contexts = [case.context(anchor, sequence_id=anchor) for anchor in anchors]
    for context, anchor in zip(contexts, anchors, strict=True):
        drafter.see(context, 0, case.features[: anchor + 1])
    unknown = case.context(20, sequence_id=99)
    together = drafter.propose([unknown, *contexts], [TREE, *budgets])
    assert together[0] == EMPTY
    for draft, wanted in zip(together[1:], alone, strict=True):
        assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
        np.testing.assert_allclose(draft.confidence, wanted.confidence, rtol=1e-3)


def test_how_rows_lie_in_memory_changes_no_guess(case: Case) -> None:
    """A pass leaves them layer by layer, in one piece or in several."""
    drafter, expected = case.drafter(), case.draft(case.drafter(), 20)
    by_layer = case.features.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    for cuts in ((0, 21), (0, 8, 21)):
        about = case.context(20)
        for first, last in itertools.pairwise(cuts):
            drafter.see(about, first, by_layer[first:last])
        assert drafter.propose([about], [CHAIN]) == [expected]
        drafter.stop(about, finished=True)


@pytest.mark.parametrize("num_children", [1, 3])
def test_rows_that_come_in_pieces_leave_nothing_of_wrong_guesses(case: Case, num_children: int) -> None:
    """Cycle after cycle: what was drafted is replaced by true rows, and asking twice gives the same."""
    drafter, fresh = case.drafter(num_children), case.drafter(num_children)
    context = case.context(0)
    shown = 0
    for step in (6, 1, 3, 1, 20, 2, 5):
        anchor = shown + step - 1
        context.tokens[:] = case.tokens[: anchor + 2]
        drafter.see(context, shown, case.features[shown : anchor + 1])
        shown += step
        drafts = [drafter.propose([context], [TREE])[0] for _ in range(2)]
        wanted = case.draft(fresh, anchor, TREE)
        for draft in drafts:
            assert (draft.tokens, draft.parents) == (wanted.tokens, wanted.parents)
            np.testing.assert_allclose(draft.confidence, wanted.confidence, rtol=1e-3)


def test_many_rows_are_read_before_they_are_asked_for(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = case.draft(case.drafter(), 50)
    monkeypatch.setattr(seen, "MOST_KEPT", 8)
    drafter = case.drafter()
    context = case.context(50)
    for first in range(0, 51, 17):
        drafter.see(context, first, case.features[first : first + 17])
        assert drafter.num_unread(context) == 1
    (draft,) = drafter.propose([context], [CHAIN])
    assert draft.tokens == wanted.tokens


def test_rows_that_were_never_shown_are_not_attended_to(case: Case) -> None:
    """Gaps: the network's own answer, over a context without them."""
    anchor, kept = 40, [*range(3, 11), *range(25, 41)]
    drafter, context = case.drafter(), case.context(anchor)
    drafter.see(context, 3, case.features[3:11])
    drafter.see(context, 25, case.features[25:41])
    (draft,) = drafter.propose([context], [CHAIN])
    assert list(draft.tokens) == without_gaps(case, anchor, kept)
    if drafter.name != "medusa":
        assert draft.confidence != case.draft(case.drafter(), anchor).confidence


@torch.no_grad()
def without_gaps(case: Case, anchor: int, kept: list[int]) -> list[int]:
    """The greedy guesses of a network that has seen some positions alone, at their own positions."""
    guesser, head, reading = case.guesser, case.guesser.head, case.reading
    ids = guesser.vocabulary.ids
    places = torch.tensor(kept)
    if isinstance(head, EagleHead):
        following = guesser.teacher.embedding[torch.tensor([case.tokens])[:, places + 1]]
        states, past = head.read(head.fusion(reading.features[:, places]), following, places)
        words: list[int] = []
        for depth in range(1, 5):
            words.append(int(ids[Guess(head.output_norm(states[0, -1]), guesser._output).logits.argmax()]))
            embedding = guesser.teacher.embedding[torch.tensor([[words[-1]]])]
            states, past = head.read(states[:, -1:], embedding, torch.tensor([anchor + depth]), past)
        return words
    if isinstance(head, BlockHead):
        # a hole in the context is a position that no row may look at
        whole = block.block_mask

        def with_holes(anchors: torch.Tensor, *, num_context: int, num_rows: int) -> torch.Tensor:
            mask = whole(anchors, num_context=num_context, num_rows=num_rows).clone()
            mask[..., [place for place in range(num_context) if place not in kept]] = False
            return mask

        block.block_mask = with_holes
        try:
            return case.greedy([anchor])[0]
        finally:
            block.block_mask = whole
    return case.greedy([anchor])[0]


def test_nothing_is_said_without_the_last_row(case: Case) -> None:
    drafter, context = case.drafter(2), case.context(20)
    assert drafter.num_unread(context) == 1
    assert drafter.propose([context], [TREE]) == [EMPTY]
    drafter.see(context, 0, case.features[:20])
    assert drafter.num_unread(context) == 20
    assert drafter.propose([context], [TREE]) == [EMPTY]
    drafter.see(context, 20, case.features[20:21])
    assert drafter.propose([context, context], [Budget(0, 8), Budget(4, 0)]) == [EMPTY, EMPTY]
    (draft,) = drafter.propose([context], [TREE])
    assert len(draft) == 14
    assert drafter.propose([], []) == []
    drafter.stop(context, finished=True)
    assert drafter.propose([context], [TREE]) == [EMPTY]


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_text_that_ended_gives_its_pages_back(kind: HeadKind) -> None:
    case = Case(kind)
    drafter: Any = case.drafter(3)
    pages = drafter._pages
    num_free, num_blocks = pages.num_free, pages.cache.keys.shape[1]
    contexts = [case.context(50, sequence_id=number) for number in range(num_blocks)]
    for context in contexts:
        drafter.see(context, 0, case.features[:51])
        drafter.propose([context], [TREE])
    assert pages.cache.keys.shape[1] > num_blocks, "they did not run out"
    drafts = drafter.propose(contexts, [TREE] * len(contexts))
    assert len(set(drafts)) == 1, "what was read before there were more pages was lost"
    for context in contexts:
        drafter.stop(context, finished=True)
    drafter.stop(contexts[0], finished=False)
    assert pages.num_free == num_free + pages.cache.keys.shape[1] - num_blocks


def test_the_dice_decide_above_temperature_zero(case: Case) -> None:
    drafter, free = case.drafter(), case.drafter(is_coupled=False)
    drafts = [case.draft(drafter, 30, temperature=1.0, seed=seed).tokens for seed in range(12)]
    assert len(set(drafts)) > 3
    assert len({case.draft(free, 30, temperature=1.0, seed=seed).tokens for seed in range(12)}) == 1


def test_eagle_asks_before_each_further_pass_and_a_block_does_not() -> None:
    for kind, wanted in (("eagle", [1, 2]), ("block", []), ("medusa", [])):
        case = Case(kind)  # type: ignore[arg-type]
        asked: list[int] = []

        def goes_on(draft: Draft, asked: list[int] = asked) -> bool:
            asked.append(len(draft))
            return len(draft) < 2

        for num_children in (1, 3):
            asked.clear()
            draft = case.draft(case.drafter(num_children), 30, Budget(4, 14, goes_on))
            assert asked == wanted
            assert draft.depth == (2 if kind == "eagle" else 4)


def test_beyond_the_last_position_it_guesses_as_at_the_last(case: Case) -> None:
    """What comes of that is the engine's to refuse; here it must only not fail."""
    config = case.decoder.config
    tokens = [number % 300 for number in range(config.max_positions)]
    context = Context(1, tokens, 1, "", 0.0, NoiseKey(0), SamplingParams())
    drafter = case.drafter()
    first = config.max_positions - 21
    drafter.see(context, first, case.features[:20])
    (draft,) = drafter.propose([context], [CHAIN])
    assert len(draft) == 4


def test_numbers_that_are_none_are_not_guessed(case: Case) -> None:
    drafter, context = case.drafter(2), case.context(20)
    drafter.see(context, 0, np.full_like(case.features[:21], np.nan))
    assert drafter.propose([context], [TREE]) == [EMPTY]


def test_its_costs_are_measured(case: Case) -> None:
    drafter = make_trained_drafter(trained_head(case.guesser), case.decoder, shape=Shape(2))
    costs = drafter.cost.rows_s
    assert 0.0 < costs[1] <= costs[32]
    assert 0.0 <= drafter.reading_share <= 1.0
    assert drafter.num_texts == 0
    context = case.context(50)
    drafter.see(context, 0, case.features[:51])
    assert 1 <= drafter.num_unread(context) <= 51
    assert len(drafter.propose([context], [TREE])[0]) == 14


@pytest.mark.parametrize(("alone_s", "is_alone"), [(1.05, True), (1.5, False)])
def test_one_thread_computes_few_rows_unless_all_are_faster(
    monkeypatch: pytest.MonkeyPatch, alone_s: float, is_alone: bool
) -> None:
    case = Case("medusa")
    drafter = case.drafter()
    body = drafter._body

    def time_step(rows: int, context: int) -> float:
        return alone_s if body.is_few_alone else 1.0

    monkeypatch.setattr(drafter, "time_step", time_step)
    _choose_threads(drafter, body)
    assert body.is_few_alone is is_alone
    monkeypatch.setattr(body.kernels, "num_threads", 2)
    monkeypatch.setattr(body.kernels, "take_threads", lambda count: None)  # a machine may have one
    assert body.take_threads(FEW_ROWS) == (1 if is_alone else 2)
    assert body.take_threads(FEW_ROWS + 1) == 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_layer_is_the_target_s_own_lines(is_tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=is_tied)
    tensors = tiny_tensors(config, seed=8)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    weight = tensors[name].clone()
    decoder = Decoder(ModelConfig.from_hugging_face(config, None), tensors, CpuKernels(num_threads=1))
    ids = np.array([0, 5, 17, 303])
    assert np.array_equal(output_rows(decoder, ids), weight[ids].numpy())
    assert ("lm_head.weight" in tiny_tensors(config)) is not is_tied

"""Drafts on the GPU's kernels guess what the network that is their definition guesses, read in pieces or at once.

All nodes of their trees are looked at: what follows each is what the network says along the words that lead there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, PRECISION
from tests.tiny_heads import tiny_spec
from tests.tiny_models import write_tiny_model
from understudy.core.dice import Dice
from understudy.core.request import SamplingParams
from understudy.core.static_tree import StaticTree
from understudy.drafters.base import Context
from understudy.drafters.tree import Guesses, Shape, children
from understudy.kernels.cuda import CudaCache, CudaKernels
from understudy.kernels.cuda_blocks import BlockPasses, BlockWork
from understudy.models.decoder import Decoder
from understudy.models.heads.block import BlockHead
from understudy.models.heads.block_on_device import BlockOnDevice
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.eagle_on_device import EagleOnDevice
from understudy.models.load import load_model
from understudy.sampling.noise import NoiseKey
from understudy.train.run import new_head

NUM_TOKENS = 5
FAR = 40 * PRECISION
"""How far chances may be apart: weights and states are rounded here."""
MOST_EXACT = 0.7
"""The share of guesses at least that no rounding has changed."""


@dataclass
class Rig:
    """A draft with room for one text of four blocks."""

    head: BlockHead | EagleHead
    vocabulary: DraftVocabulary
    decoder: Decoder
    output: Tensor
    embedding: Tensor
    passes: BlockPasses
    cache: CudaCache

    def work(
        self, tokens: Sequence[int], done: int, upto: int, *, guesses: bool, dice: Dice | None = None
    ) -> BlockWork:
        """Read positions from `done` on; the text's blocks are the cache's, from the last one on."""
        blocks = [3, 1, 2, 0]
        slots = [blocks[place // 32] * 32 + place % 32 for place in range(128)]
        new = range(done, upto)
        after = slots[upto : upto + NUM_TOKENS]
        rows: dict[str, list[int]] = {}
        if guesses and isinstance(self.head, BlockHead):
            rows = {"row_slots": after, "row_positions": list(range(upto, upto + NUM_TOKENS))}
            rows["row_keys"] = [upto + NUM_TOKENS] * NUM_TOKENS
        elif guesses:
            rows = {"row_slots": [0, *after[:-1]], "row_positions": list(range(upto - 1, upto - 1 + NUM_TOKENS))}
            rows["row_keys"] = list(range(upto, upto + NUM_TOKENS))
        return BlockWork(
            context_positions=list(new),
            context_slots=[slots[place] for place in new],
            context_tokens=[tokens[place + 1] for place in new],
            blocks=blocks,
            **rows,
            token=tokens[upto],
            position=upto,
            dice=dice,
        )

    @torch.no_grad()
    def scores(
        self, features: Tensor, tokens: Sequence[int], words: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """What the network says behind the words: logits [draft ids], and how sure it is."""
        count = len(features)
        head = self.head if dtype == torch.float32 else deepcopy(self.head).to(dtype)
        features, embedding = features.to(dtype), self.embedding.to(dtype)
        output = self.output[self.vocabulary.ids].T.to(dtype)
        if isinstance(head, BlockHead):
            context = head.context(features[None])
            anchor = torch.tensor([[count - 1]])
            rows = head(context, anchor, embedding[torch.tensor([[tokens[count]]])])[0, 0]
            row = rows[len(words)]
            place = self.vocabulary.places[torch.tensor([tokens[count], *words])][-1]
            return (row @ output + head.bias(place)).float(), float(head.confidence(row, place).sigmoid())
        embeddings = embedding[torch.tensor([tokens[1 : count + 1]])]
        states, past = head.read(head.fusion(features[None]), embeddings, torch.arange(count))
        for step, word in enumerate(words):
            embedded = embedding[torch.tensor([[word]])]
            states, past = head.read(states[:, -1:], embedded, torch.tensor([count + step]), past)
        logits = (head.output_norm(states[0, -1]) @ output).float()
        return logits, float(logits.softmax(dim=-1).amax())


@pytest.fixture(scope="module", params=["block", "eagle"])
def rig(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Rig:
    loaded = load_model(write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3))
    kernels = CudaKernels(device=DEVICE.type, dtype=DTYPE)
    embedding = loaded.tensors["model.embed_tokens.weight"].float()
    output = embedding if loaded.config.tie_embeddings else loaded.tensors["lm_head.weight"].float()
    decoder = Decoder(loaded.config, loaded.tensors, kernels, weights=kernels.output_weights)
    num_layers = 2 if request.param == "block" else 1
    spec = replace(tiny_spec(request.param, loaded.config), num_tokens=NUM_TOKENS, num_layers=num_layers)
    head = new_head(spec, seed=5)
    assert isinstance(head, BlockHead | EagleHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    vocabulary = DraftVocabulary(torch.arange(0, 7 * spec.num_draft_ids, 7), loaded.config.vocab_size)
    passes, cache = passes_of(head, vocabulary, decoder, num_blocks=4)
    return Rig(head, vocabulary, decoder, output, embedding, passes, cache)


def passes_of(
    head: BlockHead | EagleHead, vocabulary: DraftVocabulary, decoder: Decoder, *, num_blocks: int
) -> tuple[BlockPasses, CudaCache]:
    kernels = cast(CudaKernels, decoder.kernels)
    make = BlockOnDevice if isinstance(head, BlockHead) else EagleOnDevice
    network = make(head, vocabulary, decoder, num_children=2)  # type: ignore[arg-type]
    cache = network.new_cache(num_blocks)
    passes = BlockPasses(
        lambda blocks: network.compute(blocks, cache),
        places=kernels.places,
        device=kernels.device,
        rows_each=NUM_TOKENS,
        tree=network.tree,
        feature_shape=(len(head.spec.feature_layers), head.spec.target.hidden_size),
        most_positions=head.spec.target.max_positions,
        scratch_slot=cache.scratch_slot,
        use_graphs=kernels.use_graphs,
        by_steps=network.by_steps,
    )
    return passes, cache


def features_of(rig: Rig, count: int, seed: int = 0) -> Tensor:
    shape = (count, len(rig.head.spec.feature_layers), rig.head.spec.target.hidden_size)
    return 3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TOKENS = [(3 + 7 * place) % 300 for place in range(64)]


@pytest.mark.parametrize("pieces", [(9,), (3, 9), (1, 40, 45)])
def test_guesses_are_the_network_s(rig: Rig, pieces: Sequence[int]) -> None:
    count = pieces[-1]
    features = features_of(rig, count)
    done = 0
    for upto in pieces:
        work = rig.work(TOKENS, done, upto, guesses=upto == count)
        launched = rig.passes.launch([work], [features[done:upto].to(DEVICE)])
        done = upto
    for _ in range(3 if ON_GPU else 2):  # as it is, with its last row read again, and that replayed
        guesses = launched.guesses(0)
        num_exact = 0
        for place, (word, sureness, rival) in enumerate(guesses):
            assert {word, rival} <= set(rig.vocabulary.ids.tolist())
            path = path_to(place, rig.passes.tree, guesses)
            line, sure = rig.scores(features, TOKENS, path)
            # rounded as it is here, the network itself is off by so much: scores can change places within twice that
            far = 2.0 * float((rig.scores(features, TOKENS, path, DTYPE)[0] - line).abs().max())
            first, second = line.topk(2).values.tolist()
            said = [float(line[rig.vocabulary.places[one]]) for one in (word, rival)]
            assert said[0] > first - far
            assert said[1] > second - far
            assert word != rival
            assert abs(sureness - sure) < FAR
            num_exact += said == [first, second]
        assert num_exact >= MOST_EXACT * len(guesses)
        again = rig.work(TOKENS, count - 1, count, guesses=True)
        launched = rig.passes.launch([again], [features[count - 1 :].to(DEVICE)])


def path_to(place: int, tree: StaticTree, guesses: Sequence[tuple[int, float, int]]) -> list[int]:
    """The words that lead to an expanded node."""
    above = tree.expanded[place]
    if above is None:
        return []
    word, _, rival = guesses[above.behind]
    return [*path_to(above.behind, tree, guesses), rival if above.is_rival else word]


def test_a_block_s_tree_is_wide(rig: Rig) -> None:
    """Else the other tests test chains."""
    widths = [len(level) for level in rig.passes.tree.levels]
    assert widths == ([1, 2, 4, 4, 5] if isinstance(rig.head, BlockHead) else [1] * NUM_TOKENS)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_words_are_those_that_a_tree_on_the_host_has(rig: Rig, temperature: float) -> None:
    """The two best of score + the noise of their own id and position, behind every node; without noise at 0."""
    num_equal = num_moved = num_nodes = 0
    for seed in (12, 13, 14):  # one seed's noise may move nothing
        nodes = list(beside_the_host(rig, temperature, seed))
        num_nodes += len(nodes)
        num_equal += sum(is_equal for is_equal, _ in nodes)
        num_moved += sum(is_moved for _, is_moved in nodes)
    assert num_equal >= 0.8 * num_nodes
    assert (num_moved > 0) == (temperature > 0.0), "noise decides somewhere"


def beside_the_host(rig: Rig, temperature: float, seed: int) -> Iterator[tuple[bool, bool]]:
    """Whether each node is followed by the host's words, and whether noise had the host take another than the best."""
    count, dice = 6, Dice(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed, choice=2)
    features = features_of(rig, count, seed=3)
    context = Context(0, TOKENS[: count + 1], count, "", temperature, NoiseKey(seed, 2), SamplingParams())
    work = rig.work(TOKENS, 0, count, guesses=True, dice=dice)
    guesses = rig.passes.launch([work], [features.to(DEVICE)]).guesses(0)
    for place, (word, _, rival) in enumerate(guesses):
        path = path_to(place, rig.passes.tree, guesses)
        logits, _ = rig.scores(features, TOKENS, path)
        likely = Guesses(rig.vocabulary.ids.numpy(), logits.log_softmax(dim=-1).numpy())
        offered = children(likely, context, position=count + 1 + len(path), shape=Shape(num_children=len(logits)))
        chances = {child.token: child.confidence for child in offered}
        assert word in chances
        said = [one for one in (word, rival) if one in chances]  # the host leaves hopeless rivals out of the race
        named = [child.token for child in offered[: len(said)]]
        for one, wanted in zip(said, named, strict=True):
            # rounded numbers may swap two whose chances hardly differ
            assert abs(math.log(chances[one] / chances[wanted])) < FAR
        yield said == named, named[0] != int(rig.vocabulary.ids[logits.argmax()])


def test_texts_side_by_side_guess_as_alone(rig: Rig) -> None:
    """Three texts, padded to four, of which one is short, one long, and one crosses a page."""
    lengths = (2, 30, 5)
    features = [features_of(rig, length, seed=length) for length in lengths]
    alone = []
    for length, own in zip(lengths, features, strict=True):
        work = rig.work(TOKENS, 0, length, guesses=True)
        alone.append(rig.passes.launch([work], [own.to(DEVICE)]).guesses(0))
    works = [rig.work(TOKENS, 0, length, guesses=True) for length in lengths]
    room, _ = passes_of(rig.head, rig.vocabulary, rig.decoder, num_blocks=2 * len(works))
    for number, work in enumerate(works):
        _move(work, [2 * number + 1, 2 * number])
    together = room.launch(works, [own.to(DEVICE) for own in features])
    for text, expected in enumerate(alone):
        found = together.guesses(text)
        assert [(word, rival) for word, _, rival in found] == [(word, rival) for word, _, rival in expected]


def _move(work: BlockWork, blocks: list[int]) -> None:
    """Put a text into two other blocks."""
    own = {3: 0, 1: 1}  # the blocks that it has, and their places
    for name in ("context_slots", "row_slots"):
        slots = [blocks[own.get(slot // 32, 0)] * 32 + slot % 32 for slot in getattr(work, name)]
        object.__setattr__(work, name, slots)
    object.__setattr__(work, "blocks", blocks)

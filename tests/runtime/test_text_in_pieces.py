"""The logits of a text are the same bits however it is cut into passes, and wherever its tokens stand in a draft."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiny_models import write_tiny_model
from understudy.assembly import Target, load_target
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner

Floats = NDArray[np.float32]
PAGE = 32
NUM_BLOCKS = 24
TEXT_LENGTH = 3 * PAGE + 5
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""SmolLM2's shape, two layers of it: more than 1024 inputs take another path on some machines."""
KINDS = {"llama": ("llama", {}), "qwen2": ("qwen2", {}), "smollm2": ("llama", SMOL)}


class Pieces:
    """One text, computed in pieces."""

    def __init__(self, target: Target) -> None:
        self.vocab_size = target.decoder.config.vocab_size
        self.runner = Runner(target.decoder, num_blocks=NUM_BLOCKS, page_tokens=PAGE)
        rng = random.Random(0)
        self.tokens = [rng.randrange(self.vocab_size) for _ in range(TEXT_LENGTH)]
        self.whole = self.logits([TEXT_LENGTH])
        """[TEXT_LENGTH, vocabulary], all rows in one pass."""

    def new_cache(self, seed: int = 0) -> SequenceCache:
        """A sequence in an order of blocks that the seed draws, and garbage in all of them."""
        pool = BlockPool(NUM_BLOCKS)
        random.Random(seed).shuffle(pool._free)
        self.runner.cache.keys[:] = np.nan
        self.runner.cache.values[:] = np.nan
        return SequenceCache(pool, PAGE, None, "")

    def work(self, cache: SequenceCache, count: int, draft: Draft = EMPTY) -> Work:
        """The next `count` tokens of the text, then a draft."""
        assert cache.reserve(count + len(draft))
        return Work(cache, self.tokens[cache.length : cache.length + count], draft, wants_logits=True)

    def logits(self, cuts: Sequence[int], *, seed: int = 0) -> Floats:
        """Compute the text in known chunks of these sizes: every row as the last one of a pass, or in a chain."""
        cache = self.new_cache(seed)
        parts = []
        for size in cuts:
            draft = Draft.chain(
                self.tokens[cache.length + 1 : cache.length + size], confidence=[1.0] * (size - 1), source="x"
            )
            parts += self.runner.forward([self.work(cache, 1, draft)])
            cache.commit(size, self.tokens)
        return np.concatenate(parts)


@pytest.fixture(scope="module", params=KINDS)
def pieces(request: pytest.FixtureRequest) -> Pieces:
    """Each kind of model in turn."""
    architecture, shape = KINDS[request.param]
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), architecture, tie_word_embeddings=False, **shape)  # type: ignore[arg-type]
        return Pieces(load_target(folder, num_threads=1))


def cut_up(total: int, rng: random.Random, longest: int) -> list[int]:
    sizes = []
    while total:
        sizes.append(min(total, rng.randint(1, longest)))
        total -= sizes[-1]
    return sizes


def test_one_by_one_equals_all_at_once(pieces: Pieces) -> None:
    assert np.array_equal(pieces.logits([1] * TEXT_LENGTH), pieces.whole)


@pytest.mark.parametrize("longest", [2, 3, 7, 16, 37, 64])
def test_odd_chunks_equal_all_at_once(pieces: Pieces, longest: int) -> None:
    for seed in range(3):
        cuts = cut_up(TEXT_LENGTH, random.Random(seed), longest)
        assert np.array_equal(pieces.logits(cuts, seed=seed), pieces.whole), cuts


def test_known_chunks_equal_drafted_chains(pieces: Pieces) -> None:
    """A prompt in chunks: only the last row of each has logits."""
    rng = random.Random(5)
    for seed in range(5):
        cache = pieces.new_cache(seed)
        for size in cut_up(TEXT_LENGTH, rng, 40):
            (logits,) = pieces.runner.forward([pieces.work(cache, size)])
            cache.commit(size, pieces.tokens)
            assert np.array_equal(logits[0], pieces.whole[cache.length - 1])


def tree_around(path: Sequence[int], vocab_size: int, rng: random.Random) -> tuple[Draft, list[int]]:
    """A tree that holds the path among random nodes; return it with the places of the path's nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    places: list[int] = []
    for token in path:
        for _ in range(rng.randint(0, 3)):
            tokens.append(rng.randrange(vocab_size))
            parents.append(rng.randint(ROOT, len(tokens) - 2))
        tokens.append(token)
        parents.append(places[-1] if places else ROOT)
        places.append(len(tokens) - 1)
    count = len(tokens)
    return Draft(tuple(tokens), tuple(parents), (1.0,) * count, ("x",) * count), places


def test_tree_node_equals_the_same_text_decoded_plainly(pieces: Pieces) -> None:
    rng = random.Random(7)
    num_off_line = 0
    for seed in range(25):
        cache = pieces.new_cache(seed)
        known = rng.randint(1, TEXT_LENGTH - 12)
        path = pieces.tokens[known : known + rng.randint(1, 12)]
        draft, places = tree_around(path, pieces.vocab_size, rng)
        (logits,) = pieces.runner.forward([pieces.work(cache, known, draft)])
        rows = [0, *(place + 1 for place in places)]
        assert np.array_equal(logits[rows], pieces.whole[known - 1 : known + len(path)])
        num_off_line += places != list(range(len(places)))
    assert num_off_line > 10


def test_accepted_path_becomes_the_text(pieces: Pieces) -> None:
    """Draft a tree, keep its path, go on: the rest of the text has the same bits, again and again."""
    rng = random.Random(9)
    for seed in range(4):
        cache = pieces.new_cache(seed)
        while cache.length + 10 < TEXT_LENGTH:
            known = rng.choice((1, 1, 1, 3))
            start = cache.length + known
            draft, places = tree_around(pieces.tokens[start : start + rng.randint(0, 6)], pieces.vocab_size, rng)
            (logits,) = pieces.runner.forward([pieces.work(cache, known, draft)])
            rows = [0, *(place + 1 for place in places)]
            assert np.array_equal(logits[rows], pieces.whole[start - 1 : start + len(places)])
            accepted = places[: rng.randint(0, len(places))]
            pieces.runner.move(*cache.keep(known, accepted))
            cache.commit(known + len(accepted), pieces.tokens)


def test_neighbours_in_the_batch_change_nothing(pieces: Pieces) -> None:
    rng = random.Random(11)
    pieces.new_cache()
    pool = BlockPool(NUM_BLOCKS)
    for _ in range(8):
        works, expected = [], []
        for _ in range(rng.randint(1, 5)):
            cache = SequenceCache(pool, PAGE, None, "")
            known = rng.randint(1, TEXT_LENGTH - 8)
            draft, places = tree_around(pieces.tokens[known : known + rng.randint(0, 5)], pieces.vocab_size, rng)
            works.append(pieces.work(cache, known, draft))
            expected.append((known, places))
        for logits, (known, places) in zip(pieces.runner.forward(works), expected, strict=True):
            rows = [0, *(place + 1 for place in places)]
            assert np.array_equal(logits[rows], pieces.whole[known - 1 : known + len(places)])
        for work in works:
            work.cache.release()


def test_works_without_logits_are_computed_and_not_sampled(pieces: Pieces) -> None:
    cache = pieces.new_cache()
    assert cache.reserve(40)
    (logits,) = pieces.runner.forward([Work(cache, pieces.tokens[:40], EMPTY, wants_logits=False)])
    assert logits.shape == (0, pieces.vocab_size)
    cache.commit(40, pieces.tokens)
    (logits,) = pieces.runner.forward([pieces.work(cache, 1)])
    assert np.array_equal(logits[0], pieces.whole[40])

"""The start-up proof that this machine computes rows alike: on the real weights, in a third of a second.

A short text that crosses a page is computed once at a stretch, then row by row, then as the nodes of a tree among
decoys, then beside another text that fills the pass up to sizes which a device computes in other pieces. The logits
must be equal, not close. A model with sliding windows is tested again with narrow ones, since a window of thousands of
tokens would never be left in so short a text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner

Floats = NDArray[np.float32]
_NUM_BLOCKS = 4
_NUM_TAIL = 4
_NARROW_TOKENS = 11
"""A window that begins inside of a page and reaches over into the next, for every row that is compared."""


def is_row_invariant(decoder: Decoder, page_tokens: int) -> bool:
    """Whether a row's logits are the same bits alone, among others, and in a tree."""
    narrow = [decoder.narrowed(_NARROW_TOKENS)] if decoder.config.windows else []
    return all(_is_row_invariant(tested, page_tokens) for tested in (decoder, *narrow))


def _is_row_invariant(decoder: Decoder, page_tokens: int) -> bool:
    num_blocks = _NUM_BLOCKS + -(-max(decoder.kernels.sizes_apart, default=0) // page_tokens)
    runner = Runner(decoder, num_blocks=num_blocks, page_tokens=page_tokens)
    vocab_size = decoder.config.vocab_size
    text = [(7 + 31 * i) % vocab_size for i in range(page_tokens + _NUM_TAIL)]
    known, tail = text[: -_NUM_TAIL + 1], text[-_NUM_TAIL + 1 :]
    chain = Draft.chain(tail, confidence=[1.0] * len(tail), source="self-test")
    at_a_stretch = _logits(runner, [(known, chain)])
    one_by_one = _logits(runner, [(known[:-1], EMPTY), *(([token], EMPTY) for token in text[-_NUM_TAIL:])])[1:]
    tree, places = _among_decoys(tail, vocab_size)
    in_a_tree = _logits(runner, [(known, tree)])[[0, *(place + 1 for place in places)]]
    beside = [_logits(runner, [(known, chain)], num_rows=count) for count in decoder.kernels.sizes_apart]
    others = one_by_one, in_a_tree, *beside
    return all(np.array_equal(at_a_stretch.view(np.int32), other.view(np.int32)) for other in others)


def _logits(runner: Runner, passes: list[tuple[list[int], Draft]], num_rows: int = 0) -> Floats:
    """The logits of all passes over one fresh sequence, one below the other; another fills each up to `num_rows`."""
    pool = BlockPool(runner.num_blocks)
    cache = SequenceCache(pool, runner.page_tokens, None, "")
    found = []
    for known, draft in passes:
        works = [Work(cache, known, draft, wants_logits=True)]
        cache.reserve(works[0].num_rows)
        if num_rows > works[0].num_rows:
            other = SequenceCache(pool, runner.page_tokens, None, "")
            works.append(Work(other, [0] * (num_rows - works[0].num_rows), EMPTY, wants_logits=False))
            other.reserve(works[1].num_rows)
        found.append(runner.forward(works)[0])
        cache.commit(len(known), [])
    return np.concatenate(found)


def _among_decoys(tail: list[int], vocab_size: int) -> tuple[Draft, list[int]]:
    """A tree in which every token of the text comes second to a decoy, and the places of those tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    places: list[int] = []
    for token in tail:
        parent = places[-1] if places else ROOT
        tokens += [(token + 1) % vocab_size, token]
        parents += [parent, parent]
        places.append(len(tokens) - 1)
    count = len(tokens)
    return Draft(tuple(tokens), tuple(parents), (1.0,) * count, ("self-test",) * count), places

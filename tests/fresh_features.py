"""Hidden states of a whole text, computed alone, in one pass into an empty cache: what drafters must have seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from understudy.assembly import Target
from understudy.core.draft import EMPTY
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner

Floats = NDArray[np.float32]


def fresh_features(target: Target, text: Sequence[int], layers: tuple[int, ...]) -> Floats:
    """[positions, layers, hidden]"""
    num_blocks = -(-len(text) // target.page_tokens)
    runner = Runner(target.decoder, num_blocks=num_blocks, page_tokens=target.page_tokens)
    runner.feature_layers = layers
    cache = SequenceCache(BlockPool(num_blocks), target.page_tokens, None, "")
    assert cache.reserve(len(text))
    features: Floats = runner.launch([Work(cache, text, EMPTY, wants_logits=False, wants_features=True)]).features
    return features

"""Hidden states of a text: those asked for, the same bits however it is cut into passes, free where unasked."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.engines import PAGE, tiny_target
from tests.fresh_features import fresh_features
from tests.tiny_models import TinyArchitecture
from understudy.assembly import Target
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kernels import reference
from understudy.kernels.interface import NORMED, FeatureBuffer
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Flight, Runner

Floats = NDArray[np.float32]
LAYERS = (NORMED, 0, 1, 2)
NUM_BLOCKS = 8
TEXT = [(7 + 31 * place) % 300 for place in range(2 * PAGE + 9)]


@pytest.fixture(params=["llama", "qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    architecture: TinyArchitecture = request.param
    return tiny_target(architecture)


class Reader:
    """Texts of one runner."""

    def __init__(self, target: Target, *, row_by_row: bool = False) -> None:
        self.runner = Runner(target.decoder, num_blocks=NUM_BLOCKS, page_tokens=PAGE, row_by_row=row_by_row)
        self.runner.feature_layers = LAYERS
        self.pool = BlockPool(NUM_BLOCKS)

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.pool, PAGE, None, "")

    def work(self, cache: SequenceCache, count: int, draft: Draft = EMPTY, **more: object) -> Work:
        """The next so many tokens of the text, then a draft."""
        scouts = more.get("scouts", EMPTY)
        assert isinstance(scouts, Draft)
        assert cache.reserve(count + len(draft) + len(scouts))
        known = TEXT[cache.length : cache.length + count]
        return Work(cache, known, draft, **{"wants_logits": True, "wants_features": True, **more})  # type: ignore[arg-type]

    def read(self, *works: Work) -> Flight:
        return self.runner.launch(works)

    def features(self, *works: Work) -> Floats:
        features: Floats = self.read(*works).features
        return features


def test_layers_are_what_their_numbers_say(target: Target) -> None:
    decoder, reader = target.decoder, Reader(target)
    flight = reader.read(reader.work(reader.new_cache(), len(TEXT), scored=range(len(TEXT) - 1)))
    (answer,) = flight.land()
    normed, embedded, first, last = flight.features.transpose(1, 0, 2)
    assert np.array_equal(embedded, decoder._embedding[TEXT])
    assert np.array_equal(decoder._logits(normed, np.arange(len(TEXT))), answer.logits)
    expected = reference.add_rms_norm(last, np.zeros_like(last), decoder._final_norm, decoder.config.rms_norm_eps)[1]
    assert np.abs(normed - expected).max() < 1e-4
    shorter = Runner(decoder.first_layers(1), num_blocks=NUM_BLOCKS, page_tokens=PAGE)
    shorter.feature_layers = (1,)
    short = shorter.launch([reader.work(reader.new_cache(), len(TEXT))])
    assert np.array_equal(short.features[:, 0], first)
    assert not np.array_equal(first, last)


@pytest.mark.parametrize("size", [1, 7, PAGE + 1])
def test_same_bits_however_a_text_is_cut(target: Target, size: int) -> None:
    reader = Reader(target)
    cache = reader.new_cache()
    pieces: list[Floats] = []
    while cache.length < len(TEXT):
        work = reader.work(cache, min(size, len(TEXT) - cache.length))
        pieces.append(reader.features(work))
        cache.commit(len(work.known), TEXT)
    assert np.array_equal(np.concatenate(pieces), fresh_features(target, TEXT, LAYERS))


def test_nodes_of_a_tree_show_what_the_text_would(target: Target) -> None:
    """Each right node has a wrong sibling before it; scouts ride beside, and another text before and behind."""
    whole = fresh_features(target, TEXT, LAYERS)
    known, depth = PAGE - 2, 5
    tokens: list[int] = []
    parents: list[int] = []
    for token in TEXT[known : known + depth]:
        parent = len(tokens) - 1 if tokens else ROOT
        tokens += [(token + 1) % 300, token]
        parents += [parent, parent]
    draft = Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), ("test",) * len(tokens))
    scouts = Draft.chain([5, 6], confidence=[0.5] * 2, source="test")
    reader = Reader(target)
    works = [
        reader.work(reader.new_cache(), 5, draft, wants_features=False),
        reader.work(reader.new_cache(), known, draft, scouts=scouts),
        reader.work(reader.new_cache(), 3),
    ]
    before, between, behind = (work.num_rows for work in works)
    found = reader.features(*works)
    assert found.shape == (before + between + behind, len(LAYERS), 64)
    found, last = found[before : before + between], found[before + between :]
    right = [known + 2 * place + 1 for place in range(depth)]
    assert np.array_equal(found[:known], whole[:known])
    assert np.array_equal(found[right], whole[known : known + depth])
    assert np.array_equal(last, whole[:3])


def test_nothing_is_copied_where_nobody_asks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(target)
    (shown,) = reader.read(reader.work(reader.new_cache(), len(TEXT))).land()
    monkeypatch.setattr(FeatureBuffer, "take", None)
    flight = reader.read(reader.work(reader.new_cache(), len(TEXT), wants_features=False))
    assert flight.features is None
    (unshown,) = flight.land()
    assert np.array_equal(shown.logits, unshown.logits)
    with pytest.raises(TypeError):
        reader.read(reader.work(reader.new_cache(), 3))


def test_a_machine_that_computes_row_by_row_shows_nothing(target: Target) -> None:
    reader = Reader(target, row_by_row=True)
    assert not reader.runner.shows_features
    assert Reader(target).runner.shows_features
    with pytest.raises(AssertionError):
        reader.read(reader.work(reader.new_cache(), 3))

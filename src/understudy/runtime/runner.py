"""One forward pass of the target over the works of a step, and what such a pass costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from understudy.core.dice import Dice
from understudy.core.draft import EMPTY
from understudy.kernels.host_passes import HostLaunched
from understudy.kernels.interface import Drawn, FeatureBuffer, FeaturePasses, Launched
from understudy.kernels.rows import Rows
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work, build_rows

Floats = NDArray[np.float32]

_DICE, _WANTS_FEATURES = attrgetter("dice"), attrgetter("wants_features")

_GREEDY = Dice(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0)


class Answer(NamedTuple):
    """What a pass has for one work, by place: its scored rows, root, draft, scouts' leaves. Words, or else logits."""

    logits: Floats | None = None
    """[places, vocabulary]"""
    words: Sequence[int] | None = None
    """[places] drawn by the device: the work's dice were given, and nothing of it is scored"""


class Flight:
    """A pass under way."""

    def __init__(
        self,
        works: Sequence[Work],
        counts: Sequence[int],
        launched: Launched,
        *,
        draws: bool,
        features: Any = None,
    ) -> None:
        """`counts`: the places of each work."""
        self.counts = counts
        self.features = features
        """[rows of the pass; `Runner.feature_layers`; hidden] if any work wants them: Floats, or a tensor on the device
        if they stay there. Rows are those of one work after the other: known ones, its draft's nodes, scouts."""
        self._works = works
        self._launched = launched
        self._draws = draws

    @property
    def is_over(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._launched.is_over

    def land(self) -> list[Answer]:
        """Wait for the pass, and return what it has for each work."""
        words = self._launched.drawn().words if self._draws else []
        answers: list[Answer] = []
        start = 0
        for work, count in zip(self._works, self.counts, strict=True):
            stop = start + count
            if self._draws and work.dice is not None:
                answers.append(Answer(None, words[start:stop]))
            else:
                answers.append(Answer(self._launched.logits(start, stop)))
            start = stop
        return answers

    def drawn(self) -> Drawn:
        """Wait for a pass whose works all have dice; return what was drawn for them, by place."""
        return self._launched.drawn()


class Runner:
    """Owns the target's weights and cache."""

    def __init__(self, decoder: Decoder, *, num_blocks: int, page_tokens: int, row_by_row: bool = False) -> None:
        """Make room for `num_blocks` blocks. `row_by_row` is for machines that fail the self-test, without drafts."""
        self.decoder = decoder
        self.page_tokens = page_tokens
        self.num_blocks = num_blocks
        self._row_by_row = row_by_row
        self.cache = decoder.new_cache(num_blocks)
        self._passes = decoder.passes(self.cache)
        self.feature_layers: tuple[int, ...] = ()
        """Whose hidden states are shown, as `kernels.interface.FeatureBuffer` names them; to be set before a pass."""
        self._heads_per_kv_head = decoder.config.num_heads // decoder.config.num_kv_heads

    @property
    def draws(self) -> bool:
        """Whether words are drawn by the device, and the next pass may begin before they are seen."""
        return self._passes.draws and not self._row_by_row

    @property
    def shows_features(self) -> bool:
        """Whether hidden states of its rows can be shown."""
        return hasattr(self._passes, "launch_showing") and not self._row_by_row

    @property
    def features_stay(self) -> bool:
        """Whether hidden states stay on the device: only drafters that read them there can be shown any."""
        return self.shows_features and cast(FeaturePasses, self._passes).features_stay

    @property
    def first_place(self) -> int:
        """Where the words of its passes begin, for whoever names them unseen."""
        return self._passes.first_place

    @property
    def first_rival(self) -> int:
        """Where those begin that came second."""
        return self._passes.first_rival

    @property
    def num_firsts(self) -> int:
        """Passes of its device that took longer because they were the first of their size."""
        return self._passes.num_firsts

    def prepare(self) -> Iterator[None]:
        """Make usual passes ready while nothing is under way, one with each `next`."""
        if not self._row_by_row:
            yield from self._passes.prepare(self.feature_layers, self.decoder.config.hidden_size)

    def launch(self, works: Sequence[Work]) -> Flight:
        """Begin a pass."""
        rows = self._rows(works)
        counts = [work.num_logits for work in works]
        wants_features = any(map(_WANTS_FEATURES, works))
        assert self.shows_features or not wants_features, "ask whether hidden states are shown before wanting them"
        if self._row_by_row:
            return Flight(works, counts, HostLaunched(self._forward_row_by_row(rows)), draws=False)
        dice = list(chain.from_iterable(map(repeat, map(_DICE, works), counts)))
        if not wants_features:
            return Flight(works, counts, self._passes.launch(rows, dice), draws=self.draws)
        shape = len(rows.token_ids), len(self.feature_layers), self.decoder.config.hidden_size
        passes = cast(FeaturePasses, self._passes)
        shown = FeatureBuffer(self.feature_layers, passes.new_features(shape))
        launched = passes.launch_showing(rows, dice, shown)
        return Flight(works, counts, launched, draws=self.draws, features=shown.into)

    def _rows(self, works: Sequence[Work]) -> Rows:
        tails_alone = self.decoder.kernels.tails_alone
        return build_rows(works, heads_per_kv_head=self._heads_per_kv_head, tails_alone=tails_alone)

    def forward(self, works: Sequence[Work]) -> list[Floats]:
        """Compute a pass; return each work's logits [places, vocabulary]."""
        flight = self.launch([work._replace(dice=None) for work in works])
        return [answer.logits for answer in flight.land() if answer.logits is not None]

    def _forward_row_by_row(self, rows: Rows) -> Floats:
        singles = [rows.only(row) for row in range(len(rows.token_ids))]
        return np.concatenate([self.decoder.forward(single, self.cache) for single in singles])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots of the cache, in order."""
        if not sources:
            return
        self.cache.move(np.array(sources, np.int32), np.array(targets, np.int32))

    def time_step(self, num_rows: int, context: int) -> float:
        """Seconds of one pass over this many rows of a sequence of that length. Only on an idle engine."""
        rows = self._profile_rows(num_rows, context)
        started = time.perf_counter()
        launched = self._passes.launch(rows, [_GREEDY] * num_rows)
        if self._passes.draws:
            launched.drawn()
        return time.perf_counter() - started

    def _profile_rows(self, num_rows: int, context: int) -> Rows:
        cache = SequenceCache(BlockPool(self.num_blocks), self.page_tokens, None, "")
        cache.reserve(context + num_rows)
        cache.length = context
        work = Work(cache, [0] * num_rows, EMPTY, wants_logits=False)
        rows = self._rows([work])
        return rows._replace(logit_rows=np.arange(num_rows))

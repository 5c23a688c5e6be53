"""Hidden states of the target, shown to the drafters that guess from them.

After every pass, such a drafter sees the hidden states of the rows that became part of a text: prompt chunks, the last
word, the accepted nodes of a draft. It never sees a rejected node. Every position is shown at most once, in order: what
is computed again after a preemption was seen before. Positions that were not computed (a prefix that was found in the
cache), or while a drafter had no say, are left out and stay so; a drafter is told where each row stands. On a device
the states stay where they are, and the drafter is told which rows of a pass it may read.

Where no drafter wants them, nothing is copied. What a pass shows is kept as it is, and told when somebody is asked: to
tell each text's drafter of each row takes longer than a percent of a short step, and most texts of a busy engine end
before anybody is asked about them. On a device, where states stay where they are, drafters are told at once.

To show the words of many texts takes the host longer than some steps last, so where many are served and no guess was
bought for a class for long, or drafts bring it too little (control/sharing.py), its texts begin hidden as well, and
stay so while many are served.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from understudy.control.classes import ClassNames
from understudy.control.sharing import Sharing
from understudy.core.events import EventSink, Fallback
from understudy.core.switches import Switches
from understudy.drafters.base import Drafter, FeatureDrafter
from understudy.engine.asking import Asking
from understudy.engine.proposal import Proposal
from understudy.engine.scheduler import Share
from understudy.engine.sequence import Sequence
from understudy.engine.underway import Underway
from understudy.kernels.interface import NORMED, ShownRows
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner
from understudy.sampling.verify import Verdict

_MOST_KEPT = 1024
"""Rows of passes that are kept until somebody is asked; beyond that, their drafters are told."""
_LONG_PIECE = 16
"""Rows of one text in one pass that are not worth copying to save the memory of the pass's others."""
_FEW_TEXTS = 3
"""So many are always shown."""
_IDLE_STEPS = 512
"""After so many steps, with about as many texts, in which nothing was bought for a class, texts of it begin hidden."""
_REST_STEPS = 8192
"""For so many steps: those that begin then are shown again."""


def without_blind(drafters: Items[Drafter], runner: Runner, emit: EventSink) -> list[Drafter]:
    """The drafters without those that want hidden states which this target cannot show; each of them is an event."""
    able: list[Drafter] = []
    for drafter in drafters:
        reason = _refusal(cast(FeatureDrafter, drafter), runner) if hasattr(drafter, "see") else ""
        if reason:
            emit(Fallback(f"drafter {drafter.name}", f"left out: {reason}"))
        else:
            able.append(drafter)
    return able


def _refusal(drafter: FeatureDrafter, runner: Runner) -> str:
    """Why a drafter cannot be shown what it wants; empty if it can."""
    if not runner.shows_features:
        return "it guesses from hidden states of the target, which are not shown where this target is computed"
    if runner.features_stay != getattr(drafter, "reads_on_device", False):
        place = "on a device" if runner.features_stay else "on the host"
        return f"it cannot read hidden states of the target {place}, where they are"
    num_layers = runner.decoder.config.num_layers
    unknown = [layer for layer in drafter.feature_layers if layer != NORMED and not 0 <= layer <= num_layers]
    return f"it wants to see layers {unknown} of a target that has {num_layers}" if unknown else ""


class _Pass(NamedTuple):
    """What must be known of a pass to tell of it later."""

    features: Any
    """[rows, layers, hidden]: an array, or a tensor on a device"""
    shares: Items[Share]
    works: Items[Work]
    verdicts: Items[Verdict]
    starts: Items[int]
    """Where each text's rows begin: its cache may have moved on since."""


class _Piece(NamedTuple):
    """Rows of one pass that became part of one text, from a position on."""

    first: int
    features: Any
    """[rows of the text in that pass, layers, hidden]"""
    rows: range | list[int]
    """Those of them that are meant, in order of their positions; a range if they lie in line"""


def _chosen(pieces: Items[_Piece], columns: Items[int] | None) -> NDArray[np.float32] | ShownRows:
    """The rows, and some layers or all: a copy, lest a drafter that keeps a row keep all of its pass, or a long piece.

    On a device it is told where they lie.
    """
    _, features, rows = pieces[0]
    if not isinstance(features, np.ndarray):
        return ShownRows(features, tuple(rows), tuple(range(features.shape[1]) if columns is None else columns))
    seen: NDArray[np.float32]
    if _is_long(pieces[0]) and isinstance(rows, range):
        seen = _taken(pieces[0])
    else:
        seen = np.concatenate([_taken(piece) for piece in pieces])
    if columns is not None:
        seen = seen[:, columns]
    seen.flags.writeable = False
    return seen


def _taken(piece: _Piece) -> NDArray[np.float32]:
    """Its rows [rows, layers, hidden]."""
    _, features, rows = piece
    taken: NDArray[np.float32] = features[rows.start : rows.stop] if isinstance(rows, range) else features[rows]
    return taken


def _is_long(piece: _Piece) -> bool:
    return len(piece.rows) >= _LONG_PIECE


def _runs(pieces: Items[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one text, those together that follow each other; long ones, and those on a device, alone."""
    run: list[_Piece] = []
    for piece in pieces:
        if run and not _follows(run[-1], piece):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _follows(before: _Piece, piece: _Piece) -> bool:
    """Whether two pieces are told as one."""
    is_next = piece.first == before.first + len(before.rows)
    return is_next and isinstance(piece.features, np.ndarray) and not _is_long(before) and not _is_long(piece)


class Showing:
    """Shows hidden states to the drafters of an engine that want them, if there are any."""

    def __init__(self, asking: Asking, drafters: Items[Drafter], sharing: Sharing) -> None:
        self._asking = asking
        self._sharing = sharing
        self._drafters = [cast(FeatureDrafter, drafter) for drafter in drafters if hasattr(drafter, "see")]
        self.layers = tuple(sorted({layer for drafter in self._drafters for layer in drafter.feature_layers}))
        """All that any of them wants to see."""
        self._columns = [
            None if drafter.feature_layers == self.layers else [self.layers.index(n) for n in drafter.feature_layers]
            for drafter in self._drafters
        ]  # None: all of them, in their order
        self._classes = ClassNames()
        self._num_idle: dict[tuple[str, int], int] = {}  # steps, by kind
        self._wanted: tuple[list[Sequence], Switches, list[bool]] | None = None  # in the last step, if nothing changed
        self._passes: list[_Pass] = []  # of which nobody was told yet
        self._num_kept = 0  # their rows
        self._is_free = any(getattr(drafter, "reads_on_device", False) for drafter in self._drafters)
        """Whether states stay where they are, and there is nothing to save by telling late."""

    def wants(self, shares: Items[Share], switches: Switches) -> list[bool]:
        """Whether anybody would look at each sequence's rows."""
        if not self._drafters:
            return [False] * len(shares)
        sequences = [share.sequence for share in shares]
        if self._wanted is None or self._wanted[0] != sequences or self._wanted[1] is not switches:
            self._wanted = sequences, switches, [self._is_wanted(one, len(shares), switches) for one in sequences]
        return self._wanted[2]

    def _is_wanted(self, sequence: Sequence, num_texts: int, switches: Switches) -> bool:
        if sequence.is_hidden and num_texts > _FEW_TEXTS:
            return False
        if not any(self._sees(drafter, sequence, switches) for drafter in self._drafters):
            return False
        # once: where passes begin ahead, a text is new for two of them
        is_new = not sequence.is_met and not sequence.num_generated
        sequence.is_met = True
        sequence.is_hidden = is_new and self._rests(sequence, num_texts)
        return not sequence.is_hidden

    def _insists(self, sequence: Sequence) -> bool:
        """Whether its request wants guesses from hidden states, whatever they come to."""
        speculation = sequence.request.speculation
        return speculation.forced or speculation.drafter in self._asking.seeing

    def _rests(self, sequence: Sequence, num_texts: int) -> bool:
        """Whether nothing is bought of late for texts like this one, among so many, and nobody insists on any guess."""
        if num_texts <= _FEW_TEXTS or self._insists(sequence):
            return False
        num_idle = self._num_idle.get(self._kind(sequence, num_texts), 0)
        return num_idle >= _IDLE_STEPS or self._sharing.is_resting(sequence.line, num_texts)

    def _kind(self, sequence: Sequence, num_texts: int) -> tuple[str, int]:
        """A class, and a number of texts as a power of two."""
        return self._classes.known(sequence.request.workload_class), (num_texts - 1).bit_length()

    def count(self, shares: Items[Share], works: Items[Work], proposals: Items[Proposal]) -> None:
        """Count a step: for whom a guess from hidden states was bought, and, of many texts, could have been.

        Beside a prompt nothing is drafted, so such a step says nothing; nor do those whose drafts are forced.
        """
        if not self._drafters:
            return
        self._wanted = None
        if len(shares) <= _FEW_TEXTS or any(share.num_known > 1 for share in shares):
            return
        is_bought: dict[tuple[str, int], bool] = {}
        for share, work, proposal in zip(shares, works, proposals, strict=True):
            sequence = share.sequence
            if (work.wants_features or sequence.is_hidden) and not sequence.request.speculation.forced:
                kind = self._kind(sequence, len(shares))
                is_bought[kind] = is_bought.get(kind, False) or not self._asking.seeing.isdisjoint(
                    proposal.bought.sources
                )
        for kind, was_bought in is_bought.items():
            num_idle = 0 if was_bought else self._num_idle.get(kind, 0) + 1
            self._num_idle[kind] = num_idle % (_IDLE_STEPS + _REST_STEPS)

    def stop(self) -> None:
        """Look anew at who wants to see: a text ended."""
        self._wanted = None

    def keep(self, underway: Underway, verdicts: Items[Verdict], switches: Switches) -> None:
        """Keep what a pass shows, to tell of the rows that became part of a text: those known, and accepted nodes."""
        features = underway.flight.features
        if features is None:
            return
        self._passes.append(_Pass(features, underway.shares, underway.works, verdicts, underway.starts))
        self._num_kept += len(features)
        if self._is_free or self._num_kept > _MOST_KEPT:
            self.tell(switches)

    def tell(self, switches: Switches) -> None:
        """Let drafters see what was kept of texts that go on."""
        passes, self._passes, self._num_kept = self._passes, [], 0
        told: dict[Sequence, list[_Piece]] = {}
        for features, *items in passes:
            row = 0
            for share, work, verdict, first in zip(*items, strict=True):
                if work.wants_features and share.sequence.finish_reason is None:
                    own = features[row : row + len(work.known) + len(work.draft)]
                    told.setdefault(share.sequence, []).extend(_committed(share, own, verdict.path, first))
                row += work.num_rows
        for sequence, pieces in told.items():
            for drafter, columns in zip(self._drafters, self._columns, strict=True):
                for run in _runs(pieces) if self._sees(drafter, sequence, switches) else ():
                    see = partial(drafter.see, sequence.context, run[0].first, _chosen(run, columns))
                    self._asking.guard(drafter, see)

    def _sees(self, drafter: FeatureDrafter, sequence: Sequence, switches: Switches) -> bool:
        """Whether a drafter may be asked for a sequence at all, and is not switched off."""
        wanted = sequence.request.speculation
        return (
            wanted.drafter in (None, drafter.name)
            and wanted.max_rows > 0
            and switches.depth_of(wanted, sequence.request.workload_class) > 0
            and switches.allows(drafter.name)
            and self._asking.is_active(drafter, sequence)
        )


def _committed(share: Share, features: Any, path: Items[int], first: int) -> Iterator[_Piece]:
    """What of a text's rows in a pass was not shown before, if anything: it may be computed again.

    `first` is the position of the first row, and `path` the accepted nodes.
    """
    sequence, num_known = share.sequence, share.num_known
    rows: range | list[int] = range(num_known)
    if path:
        rows = [*rows, *(num_known + node for node in path)]
    num_seen = max(0, sequence.num_shown - first)
    if num_seen < len(rows):
        sequence.num_shown = first + len(rows)
        yield _Piece(first + num_seen, features, rows[num_seen:])

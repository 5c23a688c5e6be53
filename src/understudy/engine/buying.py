"""The rows of a step that are verified: those that pay, and for which the ledgers have room."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from understudy.control.classes import Line
from understudy.control.controller import Controller, by_class
from understudy.control.cost import CostModel, Load
from understudy.control.policy import Decision, StatedOffers, decide
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import EMPTY, Draft
from understudy.engine.sequence import Sequence


class Buyer:
    """Chooses rows until nobody's ledger stands in the way."""

    def __init__(self, cost: CostModel, stats: AcceptanceStats, controller: Controller) -> None:
        self._cost = cost
        self._stats = stats
        self._controller = controller

    def buy(
        self,
        sequences: Items[Sequence],
        offers: StatedOffers,
        base: Load,
        *,
        max_rows: int,
        num_emitting: int,
        spent_s: float,
        asked_s: Mapping[str, Mapping[Line, float]],
    ) -> tuple[Decision, str]:
        """Choose the rows that pay, and for which the ledgers have room; also tells whom these refused."""
        refused: set[str] = set()
        by_name: dict[str, float] = {}
        for seconds in asked_s.values():
            for name, one_s in by_class(seconds).items():
                by_name[name] = by_name.get(name, 0.0) + one_s
        while True:
            decision = decide(
                offers, base, self._cost, self._stats, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s
            )
            rows = _rows_by_class(sequences, decision)
            if not rows:
                break
            now_refused = self._controller.refused(rows, base, _load(sequences, decision, base), by_name)
            if not now_refused:
                break
            refused |= now_refused
            kept = [
                EMPTY if s.request.workload_class in refused and not forced else draft
                for s, draft, forced in zip(sequences, offers.drafts, offers.forced, strict=True)
            ]
            offers = replace(offers, drafts=kept)
        return decision, f"; the ledger has no room for {', '.join(sorted(refused))}" if refused else ""


def stated(sequences: Items[Sequence], merged: Items[tuple[Draft, int]], plain_s: float) -> StatedOffers:
    """What could be verified: of each sequence a tree, and the group that tells what its confidences are worth."""
    return StatedOffers(
        drafts=[tree for tree, _ in merged],
        groups=[group for _, group in merged],
        contexts=[len(sequence.tokens) for sequence in sequences],
        rooms_s=[sequence.ledger.room_s(plain_s, len(sequences)) for sequence in sequences],
        forced=[sequence.request.speculation.forced for sequence in sequences],
    )


def _rows_by_class(sequences: Items[Sequence], decision: Decision) -> dict[str, int]:
    """Rows that were chosen and not forced, by class."""
    rows: dict[str, int] = {}
    for sequence, nodes in zip(sequences, decision.nodes, strict=True):
        if nodes and not sequence.request.speculation.forced:
            name = sequence.request.workload_class
            rows[name] = rows.get(name, 0) + len(nodes)
    return rows


def _load(sequences: Items[Sequence], decision: Decision, base: Load) -> Load:
    """The pass with what was chosen."""
    lines = [(len(sequence.tokens), len(nodes)) for sequence, nodes in zip(sequences, decision.nodes, strict=True)]
    rows = sum(count for _, count in lines)
    return Load(base.rows + rows, base.keys, base.reads + sum(context * count for context, count in lines))

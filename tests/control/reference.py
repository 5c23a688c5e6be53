"""The slow obvious twin of control/choosing.py: the same rules on lists, one node, row and text after the other.

Sums are written out so that they are added in the same order in every version of Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from understudy.control.choosing import BELIEVED
from understudy.control.cost import CostModel, Load
from understudy.control.policy import LEAST_GAIN, MOST_DELAY, Offer, StatedOffers
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import ROOT, Draft

Rates = dict[tuple[int, str, int], tuple[float, float]]
"""Group, drafter, band of confidence -> hits and trials."""


def rates_by_group(stats: AcceptanceStats) -> Rates:
    """What was learned of stated confidence."""
    temperatures = (0.0, 0.5, 1.0, 1.5)
    return {
        (stats.group(r.workload_class, temperatures[r.temperature_band]), r.drafter, r.index): (r.hits, r.trials)
        for r in stats.rates()
        if r.kind == "confidence"
    }


def least_rate(hits: float, trials: float, prior: float) -> float:
    """The acceptance that was measured, the prior counting as six trials, less one standard error."""
    rate = (hits + 6.0 * prior) / (trials + 6.0)
    return max(0.0, rate - math.sqrt(max(0.0, rate * (1.0 - rate)) / (trials + 6.0)))


def acceptance(draft: Draft, group: int, rates: Rates, certain: frozenset[str]) -> list[float]:
    """What each node of a draft is worth, given its parent."""
    learned: list[float] = []
    for stated, source in zip(draft.confidence, draft.sources, strict=True):
        confidence = min(1.0, max(0.0, stated))
        if group == BELIEVED or source in certain:
            learned.append(confidence)
            continue
        hits, trials = rates.get((group, source, min(9, int(confidence * 10))), (0.0, 0.0))
        learned.append(least_rate(hits, trials, 0.6 * confidence))
    return learned


def survival(draft: Draft, learned: Sequence[float]) -> list[float]:
    """The chance that the walk reaches each node."""
    claimed: dict[int, float] = {}
    for parent, worth in zip(draft.parents, learned, strict=True):
        claimed[parent] = claimed.get(parent, 0.0) + worth
    survival: list[float] = []
    for parent, worth in zip(draft.parents, learned, strict=True):
        reached = 1.0 if parent == ROOT else survival[parent]
        survival.append(reached * worth / max(1.0, claimed[parent]))
    return survival


def decide(
    offers: StatedOffers,
    base: Load,
    cost: CostModel,
    rates: Rates,
    *,
    certain: frozenset[str],
    max_rows: int,
    num_emitting: int | None = None,
    spent_s: float = 0.0,
) -> tuple[list[list[int]], float]:
    """The nodes to buy, by offer, and the expected gain."""
    columns = zip(offers.drafts, offers.groups, offers.contexts, offers.rooms_s, offers.forced, strict=True)
    known = [
        Offer(context, survival(draft, acceptance(draft, group, rates, certain)), room_s, forced)
        for draft, group, context, room_s, forced in columns
    ]
    return choose(known, base, cost, max_rows=max_rows, num_emitting=num_emitting, spent_s=spent_s)


def choose(
    offers: Sequence[Offer],
    base: Load,
    cost: CostModel,
    *,
    max_rows: int,
    num_emitting: int | None = None,
    spent_s: float = 0.0,
) -> tuple[list[list[int]], float]:
    """The nodes to buy, by offer, and the expected gain."""
    ranked = sorted(
        (-chance, index, node, offer.context)
        for index, offer in enumerate(offers)
        if not offer.forced
        for node, chance in enumerate(offer.survival)
    )
    nodes = _forced(offers, max_rows)
    num_forced = sum(len(line) for line in nodes)
    num_emitting = len(offers) if num_emitting is None else num_emitting
    words = [1.0 + _total(offer.survival[node] for node in line) for offer, line in zip(offers, nodes, strict=True)]
    least = 1.0 if num_emitting > len(offers) else math.inf
    tokens = num_emitting + _total(words) - len(offers)
    rows = base.rows + num_forced
    reads = base.reads + sum(offer.context * len(line) for offer, line in zip(offers, nodes, strict=True))
    plain_s = spent_s + cost.step_s(Load(rows, base.keys, reads), base)
    rooms = [MOST_DELAY * plain_s if offer.room_s is None else offer.room_s for offer in offers]
    best_count, best_speed, plain_speed = 0, tokens / plain_s, tokens / plain_s
    for count, (negative, index, _, context) in enumerate(ranked[: max(0, max_rows - num_forced)], start=1):
        tokens, rows, reads = tokens - negative, rows + 1, reads + context
        words[index] -= negative
        seconds = spent_s + cost.step_s(Load(rows, base.keys, reads), base)
        is_fair = seconds <= plain_s * (1.0 + MOST_DELAY) * least and all(
            seconds <= plain_s * said + room for said, room in zip(words, rooms, strict=True)
        )
        if is_fair and tokens / seconds > best_speed:
            best_count, best_speed = count, tokens / seconds
    if best_speed < LEAST_GAIN * plain_speed:
        best_count, best_speed = 0, plain_speed
    for _, index, node, _ in ranked[:best_count]:
        nodes[index].append(node)
    return [sorted(line) for line in nodes], best_speed / plain_speed


def _forced(offers: Sequence[Offer], max_rows: int) -> list[list[int]]:
    nodes: list[list[int]] = []
    room = max_rows
    for offer in offers:
        line = list(range(min(room, len(offer.survival)))) if offer.forced else []
        nodes.append(line)
        room -= len(line)
    return nodes


def _total(numbers: Iterable[float]) -> float:
    total = 0.0
    for number in numbers:
        total += number
    return total

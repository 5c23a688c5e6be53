"""How many drafted rows to buy: a pure function from measured numbers to a decision with its reason in words.

A node is worth its survival (the chance that the walk reaches it) and costs the time that its row adds to the pass.
Nodes of all requests are taken in order of survival, and the number of them that gives most tokens per second is
bought. Where a row is dear, a guess poor, the batch large or the context long, that number is zero by itself.

All texts of a pass wait for all of its rows. So the number is also one at which nobody waits longer for words than
plainly, but for the room that its ledger leaves: a text that gains nothing by the step may not pay for those that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from understudy.control.cost import CostModel, Load

LEAST_GAIN = 1.02
"""Expected speed, as a multiple of a plain step's, below which nothing is bought: estimates are not exact."""


MOST_DELAY = 0.03
"""Share of a plain step by which nobody's words may be expected to come later where no ledger says better."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one sequence could draft in this step."""

    context: int
    survival: Sequence[float]
    """By node, parents before children, never larger than the parent's."""
    room_s: float | None = None
    """How much longer this text may wait for its words than plainly; None where no ledger is kept: see MOST_DELAY."""
    forced: bool = False
    """Buy everything whatever it costs: for proofs, not for users."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The nodes to verify, per offer, and why."""

    nodes: list[list[int]]
    reason: str
    gain: float = 1.0
    """Expected speed as a multiple of the same pass without what was bought."""


def choose(
    offers: Sequence[Offer],
    base: Load,
    cost: CostModel,
    *,
    max_rows: int,
    num_emitting: int | None = None,
    spent_s: float = 0.0,
) -> Decision:
    """Buy the nodes that maximise tokens per second. `base` is the pass without drafts.

    `num_emitting` sequences say a word in it whatever is bought: all that offer, and those that draw their first.
    `spent_s` went into drafting already: it makes the cycle longer whatever is bought.
    """
    ranked = sorted(
        (-survival, index, node, offer.context)
        for index, offer in enumerate(offers)
        if not offer.forced
        for node, survival in enumerate(offer.survival)
    )
    nodes, num_forced = _forced(offers, max_rows)
    num_emitting = len(offers) if num_emitting is None else num_emitting
    # words that each is expected to say; whoever says its first word in this pass says one
    words = [1.0 + sum(offer.survival[node] for node in line) for offer, line in zip(offers, nodes, strict=True)]
    least = 1.0 if num_emitting > len(offers) else math.inf
    tokens = num_emitting + sum(words) - len(offers)
    rows = base.rows + num_forced
    reads = base.reads + sum(offer.context * len(line) for offer, line in zip(offers, nodes, strict=True))
    plain_s = spent_s + cost.step_s(Load(rows, base.keys, reads))
    rooms = [MOST_DELAY * plain_s if offer.room_s is None else offer.room_s for offer in offers]
    best_count, best_speed, plain_speed = 0, tokens / plain_s, tokens / plain_s
    for count, (negative, index, _, context) in enumerate(ranked[: max(0, max_rows - num_forced)], start=1):
        tokens, rows, reads = tokens - negative, rows + 1, reads + context
        words[index] -= negative
        seconds = spent_s + cost.step_s(Load(rows, base.keys, reads))
        is_fair = seconds <= plain_s * (1.0 + MOST_DELAY) * least and all(
            seconds <= plain_s * said + room for said, room in zip(words, rooms, strict=True)
        )
        if is_fair and tokens / seconds > best_speed:
            best_count, best_speed = count, tokens / seconds
    if best_speed < LEAST_GAIN * plain_speed:
        best_count, best_speed = 0, plain_speed
    for _, index, node, _ in ranked[:best_count]:
        nodes[index].append(node)
    gain = best_speed / plain_speed
    return Decision([sorted(line) for line in nodes], _reason(best_count, num_forced, gain, ranked), gain)


def _forced(offers: Sequence[Offer], max_rows: int) -> tuple[list[list[int]], int]:
    """The nodes that are bought whatever they cost, as many as there is room for."""
    nodes: list[list[int]] = []
    room = max_rows
    for offer in offers:
        line = list(range(min(room, len(offer.survival)))) if offer.forced else []
        nodes.append(line)
        room -= len(line)
    return nodes, max_rows - room


def _reason(bought: int, forced: int, gain: float, ranked: Sequence[object]) -> str:
    if forced:
        return f"{forced} drafted rows were forced"
    if not ranked:
        return "no draft was offered"
    if not bought:
        return f"none of {len(ranked)} drafted rows would have paid for its time"
    return f"{bought} of {len(ranked)} drafted rows bought: {gain:.2f}x the tokens per second of a plain step expected"

"""How many drafted rows to buy: a pure function from measured numbers to a decision with its reason in words.

A node is worth its survival (the chance that the walk reaches it) and costs the time that its row adds to the pass.
Nodes of all requests are taken in order of survival, and the number of them that gives most tokens per second is
bought. Where a row is dear, a guess poor, the batch large or the context long, that number is zero by itself.

All texts of a pass wait for all of its rows. So the number is also one at which nobody waits longer for words than
plainly, but for the room that its ledger leaves: a text that gains nothing by the step may not pay for those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from understudy.control import choosing
from understudy.control.choosing import BELIEVED
from understudy.control.classes import OTHER
from understudy.control.cost import CostModel, Load
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import Draft

LEAST_GAIN = 1.01
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedOffers:
    """What the sequences of a step could draft, as their drafters state it: one entry per sequence in each column.

    Columns, because an object for each of 64 sequences takes as long to make as all the rest of deciding.
    """

    drafts: Sequence[Draft]
    groups: Sequence[int]
    """AcceptanceStats.group of each, which never changes; BELIEVED where the confidences are measured acceptances
    already, such as those of drafts that were calibrated and then merged."""
    contexts: Sequence[int]
    rooms_s: Sequence[float | None]
    """As in Offer, and so is `forced`."""
    forced: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """The nodes to verify, per offer, and why."""

    nodes: list[list[int]]
    reason: str
    gain: float = 1.0
    """Expected speed as a multiple of the same pass without what was bought."""


NOTHING = Decision([], "no draft was offered")
"""Where there is nothing to decide."""


def decide(
    offers: StatedOffers,
    base: Load,
    cost: CostModel,
    stats: AcceptanceStats,
    *,
    max_rows: int,
    num_emitting: int | None = None,
    spent_s: float = 0.0,
) -> Decision:
    """Calibrate what is stated by what such statements were worth, and buy as `choose` does."""
    parents: list[int] = []
    stated: list[float] = []
    sources: list[str] = []
    for draft in offers.drafts:
        parents += draft.parents
        stated += draft.confidence
        sources += draft.sources
    num_nodes = [len(draft.parents) for draft in offers.drafts]
    columns = (num_nodes, offers.groups, offers.contexts, offers.forced)
    sizes = _sizes(base, max_rows, num_emitting, cost, columns)
    whole = np.array([*sizes, *chain.from_iterable(columns), *parents, *stats.places(sources)], np.int64)
    bought, gain = choosing.decide(whole, _numbers(cost, spent_s, offers.rooms_s, stated), stats.counts, stats.trust)
    return _decision(bought.tolist(), gain, len(num_nodes))


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
    contexts, forced = [offer.context for offer in offers], [offer.forced for offer in offers]
    columns = ([len(offer.survival) for offer in offers], [BELIEVED] * len(offers), contexts, forced)
    sizes = _sizes(base, max_rows, num_emitting, cost, columns)
    survival = [*chain.from_iterable([offer.survival for offer in offers])]
    numbers = _numbers(cost, spent_s, [offer.room_s for offer in offers], survival)
    bought, gain = choosing.choose(np.array([*sizes, *chain.from_iterable(columns)], np.int64), numbers)
    return _decision(bought.tolist(), gain, len(offers))


def prepare() -> None:
    """Decide once about a made-up step, so that no user's request waits for the compiler."""
    draft, stats = Draft.chain([0], confidence=[0.5], source=OTHER), AcceptanceStats()
    base, cost = Load(1, 0, 0), CostModel({1: 1.0})
    choose([Offer(0, stats.survival(OTHER, draft))], base, cost, max_rows=1)
    offers = StatedOffers(
        drafts=[draft], groups=[stats.group(OTHER, 0.0)], contexts=[0], rooms_s=[None], forced=[False]
    )
    decide(offers, base, cost, stats, max_rows=1)


def _sizes(
    base: Load, max_rows: int, num_emitting: int | None, cost: CostModel, columns: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    num_offers = len(columns[0])
    assert all(len(column) == num_offers for column in columns), "every sequence has its entries"
    emitting = num_offers if num_emitting is None else num_emitting
    return base.rows, base.keys, base.reads, max_rows, emitting, num_offers, len(cost.rows_s)


def _numbers(
    cost: CostModel, spent_s: float, rooms_s: Sequence[float | None], of_nodes: Sequence[float]
) -> choosing.Floats:
    rates = (cost.per_key_s, cost.per_read_s, cost.drift, spent_s, MOST_DELAY, LEAST_GAIN, cost.row_factor)
    known = (*rates, *cost.rows_s, *cost.rows_s.values(), *rooms_s)  # None becomes NaN
    try:
        return np.array([*known, *of_nodes], np.float64)
    except OverflowError:  # a drafter may state a whole number that is larger than any float
        return np.array([*known, *(min(1.0, max(0.0, stated)) for stated in of_nodes)], np.float64)


def _decision(found: list[int], gain: float, num_offers: int) -> Decision:
    num_forced, num_for_sale, *bought = found
    nodes: list[list[int]] = [[] for _ in range(num_offers)]
    num_bought = len(bought) // 2
    for offer, node in zip(bought[:num_bought], bought[num_bought:], strict=True):
        nodes[offer].append(node)
    return Decision(nodes, _reason(num_bought - num_forced, num_forced, gain, num_for_sale), gain)


def _reason(bought: int, forced: int, gain: float, for_sale: int) -> str:
    if forced:
        return f"{forced} drafted rows were forced"
    if not for_sale:
        return NOTHING.reason
    if not bought:
        return f"none of {for_sale} drafted rows would have paid for its time"
    return f"{bought} of {for_sale} drafted rows bought: {gain:.2f}x the tokens per second of a plain step expected"

"""The arithmetic of deciding, compiled: what every drafted node is worth, and which nodes are bought.

A step decides for all of its sequences at once, and every one of them waits for it. For 64 requests there are hundreds
of nodes to calibrate and rank, and for each further row the cost of the pass and the patience of every text are to be
looked at: one to two milliseconds of Python, of a step that may take five. Compiled, it is some ten microseconds. This
file is the one of `control` that needs a compiler; the rules are told in stats.py, policy.py and cost.py, and their
slow obvious twin is tests/control/reference.py.

A call is given as few arrays as can be, because each of them costs as much as ten nodes:

    whole [.] int64       ROWS, KEYS, READS of the plain pass; MAX_ROWS, NUM_EMITTING, NUM_OFFERS, NUM_PROFILED;
                          by offer: NUM_NODES, GROUP (see stats.py), CONTEXT, FORCED, one row after the other;
                          by node, offer after offer: its parent within its own draft, or ROOT; the place of its drafter
    numbers [.] float64   PER_KEY, PER_READ, DRIFT, SPENT, MOST_DELAY, LEAST_GAIN, ROW_FACTOR;
                          the table: numbers of rows, ascending, and the seconds of each;
                          by offer: its room in seconds, NaN where no ledger is kept;
                          by node: its stated confidence, or its survival where that is known
    counts [groups, drafters, bands, 2] float64   hits and trials
    trust [drafters] float64                      how far each is believed before anything is known; CERTAIN: always

A plain number that is whole on some day would be compiled for anew, in the middle of a step: so there is none among
these. No sum is reordered, so that ties fall as they do in the twin.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]
Choice = tuple[Whole, float]
"""[2 + 2 * bought]: how many nodes were forced and how many stood for sale, the offer of each node that is bought, and
its place in that draft; and the expected speed as a multiple of the plain one."""

ROWS, KEYS, READS, MAX_ROWS, NUM_EMITTING, NUM_OFFERS, NUM_PROFILED = 0, 1, 2, 3, 4, 5, 6
_NUM_SIZES = 7
NUM_NODES, GROUP, CONTEXT, FORCED = 0, 1, 2, 3
_NUM_COLUMNS = 4
PER_KEY, PER_READ, DRIFT, SPENT, MOST_DELAY, LEAST_GAIN, ROW_FACTOR = 0, 1, 2, 3, 4, 5, 6
_NUM_RATES = 7
HITS, TRIALS = 0, 1
BELIEVED = -1
"""In place of a group: what is stated was calibrated before."""

PRIOR_WEIGHT = 6.0
PRIOR_TRUST = 0.6
"""Before anything is known, a stated confidence is believed this far, with the weight of so many trials."""
CERTAIN = 2.0
"""In place of a trust: what is stated is so."""

_NUM_BINS = 256


@jit
def calibrate(stated: Floats, sources: Whole, group: int, counts: Floats, trust: Floats, learned: Floats) -> None:
    """Fill `learned` [nodes] with the acceptance that was measured where this confidence was stated, less its error.

    One standard error less: of many nodes the likeliest are bought, which are those most overrated by chance.
    """
    num_bands = counts.shape[2]
    for node in range(len(stated)):
        confidence = stated[node] if stated[node] > 0.0 else 0.0  # not a number counts as nothing
        confidence = min(1.0, confidence)
        if group == BELIEVED or trust[sources[node]] == CERTAIN:
            learned[node] = confidence
            continue
        band = counts[group, sources[node], min(num_bands - 1, int(confidence * num_bands))]
        weight = band[TRIALS] + PRIOR_WEIGHT
        rate = (band[HITS] + PRIOR_WEIGHT * (trust[sources[node]] * confidence)) / weight
        learned[node] = max(0.0, rate - math.sqrt(max(0.0, rate * (1.0 - rate)) / weight))


@jit
def survive(parents: Whole, acceptance: Floats, claimed: Floats, survival: Floats) -> None:
    """Fill `survival` [nodes] of one draft: acceptances multiplied along the path, no more than certainty shared out.

    `claimed` [nodes + 1] is zero: what the children of each node, the root first, claim together.
    """
    for node in range(len(parents)):
        assert -1 <= parents[node] < node, "a parent stands before its children"
        claimed[parents[node] + 1] += acceptance[node]
    for node in range(len(parents)):
        parent = parents[node]
        reached = 1.0 if parent < 0 else survival[parent]
        survival[node] = reached * acceptance[node] / max(1.0, claimed[parent + 1])


@jit
def _table_s(table: Floats, rows: float) -> float:
    """As CostModel._table_s."""
    grid, seconds = table
    last = len(grid) - 1
    right = int(np.searchsorted(grid, rows))
    if right <= last and grid[right] == rows:
        return float(seconds[right])
    if last == 0:
        return float(seconds[0] * rows / grid[0])
    if right > last:
        whole = (seconds[last] - seconds[0]) / (grid[last] - grid[0])
        end = (seconds[last] - seconds[last - 1]) / (grid[last] - grid[last - 1])
        return float(seconds[last] + max(0.0, whole, end) * (rows - grid[last]))
    right = max(right, 1)
    x0, x1, y0, y1 = grid[right - 1], grid[right], seconds[right - 1], seconds[right]
    return float(max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), min(y0, y1) / 2))


@jit
def _pass_s(table: Floats, rates: Floats, rows: int, keys: int, reads: int) -> float:
    """As CostModel.step_s without a base."""
    return float(rates[DRIFT] * (_table_s(table, float(rows)) + rates[PER_KEY] * keys + rates[PER_READ] * reads))


@jit
def _cycle_s(table: Floats, rates: Floats, keys: int, base_s: float, rows: int, reads: int) -> float:
    """Seconds of a cycle: what was spent before the pass, the pass without drafts, and what drafted rows add to it."""
    whole_s = _pass_s(table, rates, rows, keys, reads)
    return float(rates[SPENT] + (base_s + rates[ROW_FACTOR] * (whole_s - base_s) if whole_s > base_s else whole_s))


@jit
def _ranked(survival: Floats, owners: Whole, offers: Whole) -> Whole:
    """The nodes that are for sale, the likeliest first; of equals the first.

    They are counted into bins of like survival and put in order there. A sort that compares all with all takes five
    times as long, because a processor cannot foresee how a comparison of chances will turn out.
    """
    starts = np.zeros(_NUM_BINS + 1, np.int64)
    bins = np.empty(len(survival), np.int64)
    for node in range(len(survival)):
        chance = min(1.0, survival[node]) if survival[node] > 0.0 else 0.0
        bins[node] = int((1.0 - chance) * (_NUM_BINS - 1))
        starts[bins[node] + 1] += 1 - offers[FORCED, owners[node]]
    for each in range(_NUM_BINS):
        starts[each + 1] += starts[each]
    ranked = np.empty(starts[_NUM_BINS], np.int64)
    for node in range(len(survival)):
        if not offers[FORCED, owners[node]]:
            ranked[starts[bins[node]]] = node
            starts[bins[node]] += 1
    for end in range(1, len(ranked)):
        node, place = ranked[end], end
        while place > 0 and survival[ranked[place - 1]] < survival[node]:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = node
    return ranked


@jit
def _owners(offers: Whole, num_nodes: int) -> Whole:
    """The offer of each node."""
    owners = np.empty(num_nodes, np.int64)
    first = 0
    for offer in range(offers.shape[1]):
        owners[first : first + offers[NUM_NODES, offer]] = offer
        first += offers[NUM_NODES, offer]
    return owners


@jit
def _force(survival: Floats, owners: Whole, offers: Whole, max_rows: int, is_bought: Flags) -> int:
    """Buy what is bought whatever it costs, as much as there is room for."""
    num_forced = 0
    for node in range(len(survival)):
        if offers[FORCED, owners[node]] and num_forced < max_rows:
            is_bought[node] = True
            num_forced += 1
    return num_forced


@jit
def _best(
    survival: Floats,
    owners: Whole,
    offers: Whole,
    rooms_s: Floats,
    table: Floats,
    sizes: Whole,
    rates: Floats,
    is_bought: Flags,
    ranked: Whole,
) -> tuple[int, float]:
    """How many of `ranked` to buy beside what is bought already, and the speed as a multiple of buying none of them."""
    num_offers = offers.shape[1]
    rows, keys, reads = sizes[ROWS], sizes[KEYS], sizes[READS]
    words = np.zeros(num_offers)  # that each is expected to say
    for node in range(len(survival)):
        if is_bought[node]:
            rows, reads = rows + 1, reads + offers[CONTEXT, owners[node]]
            words[owners[node]] += survival[node]
    said = 0.0
    for offer in range(num_offers):
        words[offer] += 1.0
        said += words[offer]
    tokens = sizes[NUM_EMITTING] + said - num_offers
    base_s = _pass_s(table, rates, sizes[ROWS], keys, sizes[READS])
    plain_s = _cycle_s(table, rates, keys, base_s, rows, reads)
    plain_speed = tokens / plain_s
    # Whoever says its first word in this pass offers nothing, says one word, and has no ledger yet.
    limit_s = plain_s * (1.0 + rates[MOST_DELAY]) if sizes[NUM_EMITTING] > num_offers else math.inf
    tightest, least_s = 0, -math.inf  # whose patience ends first, and when: looked for again when that one gains
    best_count, best_speed = 0, plain_speed
    for place in range(len(ranked)):
        node = ranked[place]
        owner = owners[node]
        tokens, rows, reads = tokens + survival[node], rows + 1, reads + offers[CONTEXT, owner]
        words[owner] += survival[node]
        if place == 0 or owner == tightest:
            least_s = math.inf
            for offer in range(num_offers):
                room_s = rates[MOST_DELAY] * plain_s if math.isnan(rooms_s[offer]) else rooms_s[offer]
                patience_s = plain_s * words[offer] + room_s
                if patience_s < least_s:
                    tightest, least_s = offer, patience_s
        seconds = _cycle_s(table, rates, keys, base_s, rows, reads)
        if seconds <= limit_s and seconds <= least_s and tokens / seconds > best_speed:
            best_count, best_speed = place + 1, tokens / seconds
    if best_speed < rates[LEAST_GAIN] * plain_speed:
        return 0, 1.0
    return best_count, best_speed / plain_speed


@jit
def _nodes_at(whole: Whole, numbers: Floats) -> tuple[int, int]:
    """Where what is said of nodes begins, in either array."""
    num_offers = whole[NUM_OFFERS]
    in_whole = _NUM_SIZES + _NUM_COLUMNS * num_offers
    return in_whole, _NUM_RATES + 2 * whole[NUM_PROFILED] + num_offers


@jit
def _choose(whole: Whole, numbers: Floats, survival: Floats) -> Choice:
    num_nodes, num_offers = len(survival), whole[NUM_OFFERS]
    in_whole, in_numbers = _nodes_at(whole, numbers)
    offers = whole[_NUM_SIZES:in_whole].reshape((_NUM_COLUMNS, num_offers))
    table = numbers[_NUM_RATES : in_numbers - num_offers].reshape((2, whole[NUM_PROFILED]))
    rooms_s = numbers[in_numbers - num_offers : in_numbers]
    owners = _owners(offers, num_nodes)
    is_bought = np.zeros(num_nodes, np.bool_)
    num_forced = _force(survival, owners, offers, whole[MAX_ROWS], is_bought)
    ranked = _ranked(survival, owners, offers)
    within = ranked[: max(0, whole[MAX_ROWS] - num_forced)]
    count, gain = _best(survival, owners, offers, rooms_s, table, whole, numbers, is_bought, within)
    for node in ranked[:count]:
        is_bought[node] = True
    num_bought = num_forced + count
    bought = np.empty(2 + 2 * num_bought, np.int64)
    bought[0], bought[1] = num_forced, len(ranked)
    place, first = 2, 0
    for offer in range(num_offers):
        for node in range(offers[NUM_NODES, offer]):
            if is_bought[first + node]:
                bought[place], bought[place + num_bought] = offer, node
                place += 1
        first += offers[NUM_NODES, offer]
    return bought, gain


@jit
def choose(whole: Whole, numbers: Floats) -> Choice:
    """Buy the nodes that maximise tokens per second while nobody waits longer than its room allows: see policy.py."""
    _, in_numbers = _nodes_at(whole, numbers)
    return _choose(whole, numbers, numbers[in_numbers:])


@jit
def decide(whole: Whole, numbers: Floats, counts: Floats, trust: Floats) -> Choice:
    """Calibrate every node, multiply along the paths, and choose."""
    in_whole, in_numbers = _nodes_at(whole, numbers)
    stated = numbers[in_numbers:]
    parents, sources = whole[in_whole : in_whole + len(stated)], whole[in_whole + len(stated) :]
    assert len(parents) == len(sources) == len(stated), "every node has its entries"
    acceptance, survival = np.empty(len(stated)), np.empty(len(stated))
    num_offers = whole[NUM_OFFERS]
    claimed = np.zeros(len(stated) + num_offers)  # one more for each root
    first = 0
    for offer in range(num_offers):
        end = first + whole[_NUM_SIZES + NUM_NODES * num_offers + offer]
        group = whole[_NUM_SIZES + GROUP * num_offers + offer]
        calibrate(stated[first:end], sources[first:end], group, counts, trust, acceptance[first:end])
        shares = claimed[first + offer : end + offer + 1]
        survive(parents[first:end], acceptance[first:end], shares, survival[first:end])
        first = end
    assert first == len(stated), "every node is somebody's"
    return _choose(whole, numbers, survival)

"""What top-k, top-p and min-p leave in the race, for CUDA: the lowest score and the lowest weight that stay.

A token's score is (logit - best) / temperature, at most 0; its weight is exp(score), at most 1. As in
`sampling/processors.py`, top-k goes by scores, then top-p by the weights that are left, then min-p.

Nothing is sorted. How deep a token lies below the best is a whole number, a bit pattern that grows as its score or its
weight falls. The depth down to which tokens are k, or hold their share of all weight, is found by halving: over the
whole row, until few tokens are left to tell apart, and then over these. One program does it all for a row, and adds
weights in fp64 in an order that the row's own numbers decide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from understudy.kernels.cuda_overlap import wait_for_inputs

BLOCK = 4096
"""Tokens that the program of a row reads at once"""
SHORTLIST = 4096
"""Tokens among which the last steps of a search are made"""
WARPS = 16

_ONE_BITS = tl.constexpr(0x3F800000)
_LARGEST_BITS = tl.constexpr(0x7F7FFFFF)
"""of the largest finite number"""
_NOWHERE = tl.constexpr(0x7FFFFFFF)
"""deeper than any token"""

_OUT_OF_REACH = tl.constexpr(-41.0)
"""Noise lies between -3.61 and 36.74, so that no token below this score can win against the best, whose score is 0."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2_HIGH = tl.constexpr(0.693359375)
_LN_2_LOW = tl.constexpr(-2.12194440e-4)
"""ln(2) in two parts. The first has nine bits: a product with a whole number from -289 to 0 is exact."""


@triton.jit
def is_finite(x):
    """Whether these are numbers, neither infinite nor NaN."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def load_scores(logits, tokens, best, temperature, num_sayable):
    """The scores of some tokens of one row, -inf beyond the vocabulary. logits points to the row."""
    own = tl.load(logits + tokens, mask=tokens < num_sayable, other=float("-inf"))
    behind = own - best
    return tl.div_rn(behind, tl.broadcast_to(temperature, behind.shape))


@triton.jit
def weights_of(scores):
    """exp(scores) in fp32, right to about a unit in the last place, and 0 below the smallest normal number.

    The GPU's own exponential is as good only near 0: 2^whole is taken out first.
    """
    scores = tl.maximum(scores, -200.0)
    whole = tl.floor(scores * _LOG2_E + 0.5)
    part = (scores - whole * _LN_2_HIGH) - whole * _LN_2_LOW
    scale = ((tl.maximum(whole, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(tl.exp2(part * _LOG2_E) * scale, 1.0)


@triton.jit(do_not_specialize=["num_sayable"])
def find_floors(
    logits, temperatures, top_ks, top_ps, min_ps, bests, score_floors, weight_floors, shortlists, row_stride,
    num_sayable, block: tl.constexpr, shortlist: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """The floors of one row. A row that is greedy, or whose best is not finite, has no race and gets none."""
    wait_for_inputs(overlap)
    row = tl.program_id(0)
    temperature, best = tl.load(temperatures + row), tl.load(bests + row)
    if (temperature > 0) & is_finite(best):
        own, near = logits + row.to(tl.int64) * row_stride, shortlists + row * shortlist
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        score_floor = tl.cast(float("-inf"), tl.float32)
        weight_floor = tl.load(min_ps + row)
        if (top_k > 0) & (top_k < num_sayable):
            depth = _depth_that_holds(
                top_k.to(tl.float64), own, near, best, temperature, score_floor, num_sayable, False, block, shortlist
            )
            score_floor = 0.0 - depth.to(tl.float32, bitcast=True)
        if top_p < 1:
            total, _ = _held(-1, own, best, temperature, score_floor, num_sayable, True, block)
            depth = _depth_that_holds(
                top_p * total, own, near, best, temperature, score_floor, num_sayable, True, block, shortlist
            )
            weight_floor = tl.maximum(weight_floor, (-depth).to(tl.float32, bitcast=True))
        tl.store(score_floors + row, tl.maximum(score_floor, _OUT_OF_REACH))
        tl.store(weight_floors + row, weight_floor)


@triton.jit
def _load_depths(
    logits, start, best, temperature, score_floor, num_sayable, by_weight: tl.constexpr, block: tl.constexpr
):
    """How deep a block of tokens lies. By weight: its bits, negated; else the bits of the score's distance from 0.

    A token of weight 0, or below the score's floor, has depth 0 by weight; all others are negative. By score, -inf is
    deeper than _LARGEST_BITS. So padding is never found.
    """
    scores = load_scores(logits, start + tl.arange(0, block), best, temperature, num_sayable)
    if by_weight:
        depths = -tl.where(scores >= score_floor, weights_of(scores), 0.0).to(tl.int32, bitcast=True)
    else:
        depths = (0.0 - scores).to(tl.int32, bitcast=True)
    return depths


@triton.jit
def _held_by(depths, is_held, by_weight: tl.constexpr):
    """What each of some tokens adds to what is held, in fp64: its weight, or 1."""
    if by_weight:
        shares = tl.where(is_held, (-depths).to(tl.float32, bitcast=True), 0.0)
    else:
        shares = tl.where(is_held, 1.0, 0.0)
    return shares.to(tl.float64)


@triton.jit
def _held(depth, logits, best, temperature, score_floor, num_sayable, by_weight: tl.constexpr, block: tl.constexpr):
    """What the tokens of a row hold down to a depth, and how many they are."""
    held = tl.zeros((block,), tl.float64)
    counts = tl.zeros((block,), tl.int32)
    for start in range(0, num_sayable, block):
        depths = _load_depths(logits, start, best, temperature, score_floor, num_sayable, by_weight, block)
        is_held = depths <= depth
        held += _held_by(depths, is_held, by_weight)
        counts += is_held.to(tl.int32)
    return tl.sum(held, axis=0), tl.sum(counts, axis=0)


@triton.jit
def _depth_that_holds(
    wanted, logits, near, best, temperature, score_floor, num_sayable,
    by_weight: tl.constexpr, block: tl.constexpr, shortlist: tl.constexpr,
):  # fmt: skip
    """The least depth down to which the tokens of a row hold what is wanted. near has room for the shortlist."""
    low = tl.cast(-_ONE_BITS if by_weight else 0, tl.int32)
    high = tl.cast(-1 if by_weight else _LARGEST_BITS, tl.int32)
    held_above = tl.cast(0.0, tl.float64)  # by the tokens above low, which are num_above; num_within go down to high
    num_above, num_within = tl.cast(0, tl.int32), tl.cast(num_sayable, tl.int32)
    while (low < high) & (num_within - num_above > shortlist):
        middle = low + (high - low) // 2
        held, count = _held(middle, logits, best, temperature, score_floor, num_sayable, by_weight, block)
        if held >= wanted:
            high, num_within = middle, count
        else:
            low, num_above, held_above = middle + 1, count, held
    if low < high:
        depths = _listed(
            low, high, logits, near, best, temperature, score_floor, num_sayable, by_weight, block, shortlist
        )
        while low < high:
            middle = low + (high - low) // 2
            is_held = depths <= middle
            if held_above + tl.sum(_held_by(depths, is_held, by_weight), axis=0) >= wanted:
                high = tl.max(tl.where(is_held, depths, low), axis=0)
            else:
                low = tl.minimum(tl.min(tl.where(is_held, high, depths), axis=0), high)
    return low


@triton.jit
def _listed(
    low, high, logits, near, best, temperature, score_floor, num_sayable,
    by_weight: tl.constexpr, block: tl.constexpr, shortlist: tl.constexpr,
):  # fmt: skip
    """The depths from low to high, in order of tokens, [shortlist]; the rest is nowhere. near is where they pass."""
    count = tl.cast(0, tl.int32)
    for start in range(0, num_sayable, block):
        depths = _load_depths(logits, start, best, temperature, score_floor, num_sayable, by_weight, block)
        is_near = ((depths >= low) & (depths <= high)).to(tl.int32)
        tl.store(near + count + tl.cumsum(is_near, axis=0) - 1, depths, mask=is_near > 0)
        count += tl.sum(is_near, axis=0)
    tl.debug_barrier()  # each thread reads what others have written
    places = tl.arange(0, shortlist)
    return tl.load(near + places, mask=places < count, other=_NOWHERE, cache_modifier=".cg")

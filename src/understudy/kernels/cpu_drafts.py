"""Small kernels that only trained drafts need, compiled by numba: norms side by side, and the likeliest of many scores.

A draft decides nothing about the words, so nothing here has to be computed alike in every batch.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit, jit_exact, jit_exact_parallel
from understudy.kernels.cpu_ops import exp
from understudy.kernels.simd import LANES, fma, load, splat, store

Floats = NDArray[np.float32]
Ints64 = NDArray[np.int64]

f32 = np.float32


@jit_exact
def norm_each(x: Floats, weights: Floats, eps: f32, out: Floats) -> None:
    """out = x / rms(x) * weight, for several vectors of a row, each with its own weight.

    x and out [rows, vectors, features], weights [vectors, features]; features are a multiple of LANES.
    """
    num_features = x.shape[2]
    partial = np.empty(LANES, f32)
    for row in range(x.shape[0]):
        for place in range(x.shape[1]):
            vector, weight, target = x[row, place], weights[place], out[row, place]
            for lane in range(LANES):
                partial[lane] = f32(0)
            for i in range(0, num_features, LANES):
                for lane in range(LANES):
                    partial[lane] = partial[lane] + vector[i + lane] * vector[i + lane]
            total = f32(0)
            for lane in range(LANES):
                total = total + partial[lane]
            scale = f32(1) / np.sqrt(total / f32(num_features) + eps)
            for i in range(num_features):
                target[i] = vector[i] * scale * weight[i]


@jit_exact
def add_silu(x: Floats, y: Floats) -> None:
    """x += silu(y), both [rows, features]."""
    for row in range(x.shape[0]):
        to, source = x[row], y[row]
        for i in range(x.shape[1]):
            to[i] = to[i] + source[i] / (f32(1) + exp(-source[i]))


@jit_exact
def _highest(scores: Floats) -> f32:
    """The largest of scores [count]; a NaN is no score."""
    lanes = np.full(LANES, f32(-np.inf))
    whole = scores.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = scores[i + lane] if scores[i + lane] > lanes[lane] else lanes[lane]
    highest = f32(-np.inf)
    for lane in range(LANES):
        highest = max(highest, lanes[lane])
    for i in range(whole, scores.shape[0]):
        highest = scores[i] if scores[i] > highest else highest
    return highest


@jit_exact
def _total(scores: Floats, highest: f32) -> f32:
    """The sum of exp(score - highest) over scores [count]."""
    weights = np.empty((scores.shape[0] + LANES - 1) // LANES * LANES, f32)
    for i in range(scores.shape[0]):
        weights[i] = exp(scores[i] - highest)
    for i in range(scores.shape[0], weights.shape[0]):
        weights[i] = f32(0)
    partial, one = splat(f32(0)), splat(f32(1))
    for i in range(0, weights.shape[0], LANES):
        partial = fma(load(weights, i), one, partial)
    store(weights, 0, partial)
    total = f32(0)
    for lane in range(LANES):
        total = total + weights[lane]
    return total


@jit_exact
def _find_best(scores: Floats, places: Ints64) -> None:
    """Fill in the places of the largest of scores, the best first, of equal ones the first; -1 beyond all that are."""
    count = places.shape[0]
    found = 0
    floor = f32(-np.inf)
    for i in range(scores.shape[0]):
        score = scores[i]
        if not score > floor:
            continue
        at = min(found, count - 1)
        while at > 0 and score > scores[places[at - 1]]:
            places[at] = places[at - 1]
            at -= 1
        places[at] = i
        found = min(found + 1, count)
        if found == count:
            floor = scores[places[count - 1]]
    for at in range(found, count):
        places[at] = -1


@jit_exact_parallel
def likeliest(scores: Floats, places: Ints64, shares: Floats) -> None:
    """The best places of each row, and their probabilities: scores [rows, count], the others [rows, wanted].

    Where there are not so many scores the places are -1.
    """
    for row in numba.prange(scores.shape[0]):
        line = scores[row]
        highest = _highest(line)
        total = _total(line, highest)
        _find_best(line, places[row])
        for i in range(places.shape[1]):
            shares[row, i] = exp(line[places[row, i]] - highest) / total if places[row, i] >= 0 else f32(0)


@jit
def places_above(scores: Floats, floor: f32) -> Ints64:
    """The places of all scores that are no smaller than the floor, in order."""
    places = np.empty(scores.shape[0], np.int64)
    found = 0
    for i in range(scores.shape[0]):
        if scores[i] >= floor:
            places[found] = i
            found += 1
    return places[:found]

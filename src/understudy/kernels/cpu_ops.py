"""Row-invariant kernels for the CPU, compiled by numba.

Every function here computes a row from that row's own numbers in one fixed order: the number of rows, their
place in the batch, the page a key lies in and whether it was drafted or committed change no bit. That is what
lets a verified row stand for a plainly decoded one, so three habits hold throughout:

* a sum runs in a fixed order: over features in `LANES` interleaved partial sums, over keys one after the other;
* a key's place in a reduction is its position, never its slot;
* vector loops run over whole pages or lanes, so that no element ever meets a differently rounded tail.

Where one sum is computed by two functions (a key in a page, a key in a tail) the multiply-add is explicit (simd.py);
elsewhere the compiler may fuse it (`contract`), and may never reorder a sum.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.simd import LANES, fma, fma_one, load, prefetch, splat, spread, store

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Ints64 = NDArray[np.int64]

PAGE = 32
"""Keys in a page. Keys lie transposed inside one, so that a score loop fills whole vector registers."""

QUERIES = 4
"""Queries that share a page while it is in registers: enough independent sums to keep the multipliers busy."""

f32 = np.float32
_LOG2E = f32(1.4426950408889634)
_LN2_HIGH = f32(0.693359375)
_LN2_LOW = f32(-2.12194440e-4)
_EXP_LOW = f32(-87.0)
_EXP_HIGH = f32(87.0)
_MINUS_HUGE = f32(-3e38)


@jit_exact
def _exp(x: f32) -> f32:
    """e**x by range reduction and a polynomial, so that vector and scalar code round alike."""
    x = min(max(x, _EXP_LOW), _EXP_HIGH)
    k = np.floor(x * _LOG2E + f32(0.5))
    r = x - k * _LN2_HIGH
    r = r - k * _LN2_LOW
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + f32(5.0000001201e-1)
    y = y * (r * r) + r
    y = y + f32(1.0)
    exponent = np.int32((np.int32(k) + np.int32(127)) << np.int32(23))
    return f32(y * exponent.view(np.float32))


@jit_exact
def add_rms_norm(x: Floats, delta: Floats, weight: Floats, eps: f32, out: Floats) -> None:
    """X += delta; out = x / rms(x) * weight. All [rows, features]; features are a multiple of LANES."""
    num_features = x.shape[1]
    partial = np.empty(LANES, f32)
    for row in range(x.shape[0]):
        xr, dr, outr = x[row], delta[row], out[row]
        for lane in range(LANES):
            partial[lane] = f32(0)
        for i in range(0, num_features, LANES):
            for lane in range(LANES):
                v = xr[i + lane] + dr[i + lane]
                xr[i + lane] = v
                partial[lane] = partial[lane] + v * v
        total = f32(0)
        for lane in range(LANES):
            total = total + partial[lane]
        scale = f32(1) / np.sqrt(total / f32(num_features) + eps)
        for i in range(num_features):
            outr[i] = xr[i] * scale * weight[i]


@jit_exact
def gated(gate_up: Floats, out: Floats) -> None:
    """Out = silu(gate) * up. gate_up [rows, 2 * features], out [rows, features]."""
    num_features = out.shape[1]
    for row in range(out.shape[0]):
        source, target = gate_up[row], out[row]
        for i in range(num_features):
            a = source[i]
            target[i] = a / (f32(1) + _exp(-a)) * source[num_features + i]


@jit_exact
def rotate_and_store(
    qkv: Floats, cos: Floats, sin: Floats, positions: Ints, slots: Ints, keys: Floats, values: Floats, queries: Floats
) -> None:
    """Turn queries and keys by their position, write keys and values to their slots, scale the queries.

    qkv [rows, (heads + 2 * kv_heads) * dim], cos and sin [positions, dim / 2],
    keys [blocks, kv_heads, dim, PAGE], values [blocks, kv_heads, PAGE, dim], queries [rows, heads, dim].
    """
    num_rows, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    half = dim // 2
    scale = f32(1.0 / math.sqrt(dim))
    for row in range(num_rows):
        source, c, s = qkv[row], cos[positions[row]], sin[positions[row]]
        block, offset = slots[row] // PAGE, slots[row] % PAGE
        for head in range(num_heads):
            base = head * dim
            target = queries[row, head]
            for i in range(half):
                a, b = source[base + i], source[base + half + i]
                target[i] = (a * c[i] - b * s[i]) * scale
                target[half + i] = (b * c[i] + a * s[i]) * scale
        for head in range(num_kv_heads):
            base = (num_heads + head) * dim
            key = keys[block, head]
            for i in range(half):
                a, b = source[base + i], source[base + half + i]
                key[i, offset] = a * c[i] - b * s[i]
                key[half + i, offset] = b * c[i] + a * s[i]
            base = (num_heads + num_kv_heads + head) * dim
            value = values[block, head, offset]
            for i in range(dim):
                value[i] = source[base + i]


@jit_exact
def _score_page(queries: Floats, dim: int, keys: Floats, at: int, following: int, out: Floats) -> None:
    """Score QUERIES queries against the PAGE keys of one page, features in ascending order.

    queries [QUERIES * dim], keys flat with the page at `at` as [dim, PAGE], out [QUERIES * PAGE]. The page at
    `following` will be wanted next: pages lie apart, so nobody else would ask for it ahead of time.
    """
    for j in range(0, PAGE, LANES):
        s0, s1, s2, s3 = splat(f32(0)), splat(f32(0)), splat(f32(0)), splat(f32(0))
        for d in range(dim):
            prefetch(keys, following + d * PAGE + j)
            key = load(keys, at + d * PAGE + j)
            s0 = fma(spread(queries, d), key, s0)
            s1 = fma(spread(queries, dim + d), key, s1)
            s2 = fma(spread(queries, 2 * dim + d), key, s2)
            s3 = fma(spread(queries, 3 * dim + d), key, s3)
        store(out, j, s0)
        store(out, PAGE + j, s1)
        store(out, 2 * PAGE + j, s2)
        store(out, 3 * PAGE + j, s3)


@jit_exact
def _add_page(weights: Floats, values: Floats, at: int, following: int, dim: int, sums: Floats) -> None:
    """Add the PAGE values of one page to the sums of QUERIES queries, one key after the other.

    weights [QUERIES * PAGE], values flat with the page at `at` as [PAGE, dim], sums [QUERIES * dim].
    """
    for d in range(0, dim, LANES):
        s0, s1, s2, s3 = load(sums, d), load(sums, dim + d), load(sums, 2 * dim + d), load(sums, 3 * dim + d)
        for j in range(PAGE):
            prefetch(values, following + j * dim + d)
            value = load(values, at + j * dim + d)
            s0 = fma(spread(weights, j), value, s0)
            s1 = fma(spread(weights, PAGE + j), value, s1)
            s2 = fma(spread(weights, 2 * PAGE + j), value, s2)
            s3 = fma(spread(weights, 3 * PAGE + j), value, s3)
        store(sums, d, s0)
        store(sums, dim + d, s1)
        store(sums, 2 * dim + d, s2)
        store(sums, 3 * dim + d, s3)


@jit_exact
def _add_keys(weights: Floats, num_keys: int, values: Floats, at: int, dim: int, sums: Floats) -> None:
    """As `_add_page`, for one query and the first keys of a page: weights [PAGE], sums [dim]."""
    for d in range(0, dim, LANES):
        total = load(sums, d)
        for j in range(num_keys):
            total = fma(spread(weights, j), load(values, at + j * dim + d), total)
        store(sums, d, total)


@jit_exact
def _to_weights(scores: Floats, num_keys: int) -> f32:
    """scores -> exp(scores - highest) over whole pages, zero for absent keys, and their sum.

    The sum runs in LANES partial sums, by position: an absent key adds an exact zero.
    """
    num_padded = (num_keys + PAGE - 1) // PAGE * PAGE
    for i in range(num_keys, num_padded):
        scores[i] = _MINUS_HUGE
    lanes = np.full(LANES, _MINUS_HUGE, f32)
    for i in range(0, num_padded, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], scores[i + lane])
    highest = _MINUS_HUGE
    for lane in range(LANES):
        highest = max(highest, lanes[lane])
    for i in range(num_padded):
        scores[i] = _exp(scores[i] - highest)
    for i in range(num_keys, num_padded):
        scores[i] = f32(0)
    partial, one = splat(f32(0)), splat(f32(1))
    for i in range(0, num_padded, LANES):
        partial = fma(load(scores, i), one, partial)
    store(lanes, 0, partial)
    total = f32(0)
    for lane in range(LANES):
        total = total + lanes[lane]
    return total


@jit_exact
def _score_pages(
    queries: Floats, num_queries: int, dim: int, keys: Floats, page_starts: Ints64, num_pages: int, scores: Floats
) -> None:
    """Score all queries [num_queries * dim] against whole pages; each page is read once for all of them."""
    tile = np.empty(QUERIES * PAGE, f32)
    for page in range(num_pages):
        following = page_starts[min(page + 1, num_pages - 1)]
        for first in range(0, num_queries, QUERIES):
            _score_page(queries[first * dim :], dim, keys, page_starts[page], following, tile)
            for query in range(QUERIES):
                line = scores[first + query]
                for j in range(PAGE):
                    line[page * PAGE + j] = tile[query * PAGE + j]


@jit_exact
def _add_pages(
    scores: Floats, num_queries: int, dim: int, values: Floats, page_starts: Ints64, num_pages: int, sums: Floats
) -> None:
    """Add the values of whole pages to the sums [num_queries * dim]; each page is read once for all queries."""
    tile = np.empty(QUERIES * PAGE, f32)
    for page in range(num_pages):
        following = page_starts[min(page + 1, num_pages - 1)]
        for first in range(0, num_queries, QUERIES):
            for query in range(QUERIES):
                line = scores[first + query]
                for j in range(PAGE):
                    tile[query * PAGE + j] = line[page * PAGE + j]
            _add_page(tile, values, page_starts[page], following, dim, sums[first * dim :])


@jit_exact
def _score_tail(query: Floats, keys: Floats, tail: Ints, head: int, num_kv_heads: int, out: Floats) -> None:
    """Score one query [dim] against the keys in the tail's slots: out[i] is that of tail[i]."""
    dim = query.shape[0]
    for i in range(tail.shape[0]):
        start = (tail[i] // PAGE * num_kv_heads + head) * dim * PAGE + tail[i] % PAGE
        t = f32(0)
        for d in range(dim):
            t = fma_one(query[d], keys[start + d * PAGE], t)
        out[i] = t


@jit_exact
def _add_rest(
    weights: Floats, num_prefix: int, num_done: int, values: Floats, page_starts: Ints64, tail: Ints, head: int,
    num_kv_heads: int, dim: int, sums: Floats,
) -> None:  # fmt: skip
    """Add, for one query, the values of the prefix from page `num_done` on, and those of the tail."""
    for page in range(num_done, (num_prefix + PAGE - 1) // PAGE):
        num_keys = min(PAGE, num_prefix - page * PAGE)
        _add_keys(weights[page * PAGE :], num_keys, values, page_starts[page], dim, sums)
    for i in range(tail.shape[0]):
        start = ((tail[i] // PAGE * num_kv_heads + head) * PAGE + tail[i] % PAGE) * dim
        _add_keys(weights[num_prefix + i :], 1, values, start, dim, sums)


@jit_exact
def _attend_group(
    first: int, last: int, head: int, queries: Floats, keys: Floats, values: Floats, num_kv_heads: int, table: Ints,
    prefix_lens: Ints, tail_starts: Ints, tail_slots: Ints, out: Floats,
) -> None:  # fmt: skip
    """Rows first..last-1 of one sequence against one key head; keys and values flat."""
    dim = queries.shape[2]
    group = queries.shape[1] // num_kv_heads
    num_rows = last - first
    num_queries = (num_rows * group + QUERIES - 1) // QUERIES * QUERIES  # the last ones may be padding
    longest, shortest, longest_tail = 0, prefix_lens[first], 0
    for row in range(first, last):
        longest, shortest = max(longest, prefix_lens[row]), min(shortest, prefix_lens[row])
        longest_tail = max(longest_tail, tail_starts[row + 1] - tail_starts[row])
    num_pages = (longest + PAGE - 1) // PAGE
    page_starts = np.empty(num_pages, np.int64)
    for page in range(num_pages):
        page_starts[page] = (table[page] * num_kv_heads + head) * dim * PAGE
    asked = np.zeros(num_queries * dim, f32)
    for query in range(num_rows * group):
        asked[query * dim : query * dim + dim] = queries[first + query // group, head * group + query % group]
    scores = np.empty((num_queries, num_pages * PAGE + longest_tail + PAGE), f32)
    sums = np.zeros(num_queries * dim, f32)
    totals = np.empty(num_queries, f32)

    _score_pages(asked, num_queries, dim, keys, page_starts, num_pages, scores)
    for query in range(num_rows * group):
        row = first + query // group
        tail = tail_slots[tail_starts[row] : tail_starts[row + 1]]
        line = scores[query]
        _score_tail(asked[query * dim : query * dim + dim], keys, tail, head, num_kv_heads, line[prefix_lens[row] :])
        totals[query] = _to_weights(line, prefix_lens[row] + tail.shape[0])
    _add_pages(scores, num_queries, dim, values, page_starts, shortest // PAGE, sums)
    for query in range(num_rows * group):
        row = first + query // group
        tail = tail_slots[tail_starts[row] : tail_starts[row + 1]]
        total = sums[query * dim : query * dim + dim]
        _add_rest(
            scores[query], prefix_lens[row], shortest // PAGE, values, page_starts, tail, head, num_kv_heads, dim, total
        )
        for d in range(dim):
            out[row, head * group + query % group, d] = total[d] / totals[query]


@jit_exact_parallel
def attend(
    queries: Floats, keys: Floats, values: Floats, tables: Ints, group_starts: Ints, group_tables: Ints,
    prefix_lens: Ints, tail_starts: Ints, tail_slots: Ints, out: Floats,
) -> None:  # fmt: skip
    """Attention of every row over its prefix (through its sequence's block table) and its tail (slot by slot).

    queries and out [rows, heads, dim]; tables [sequences, blocks]; rows group_starts[i] .. group_starts[i + 1] - 1
    belong to sequence group_tables[i]; row r sees positions 0 .. prefix_lens[r] - 1 of the table and then the
    slots tail_slots[tail_starts[r] : tail_starts[r + 1]], which hold the positions that follow.
    """
    num_kv_heads = keys.shape[1]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    for item in numba.prange((group_starts.shape[0] - 1) * num_kv_heads):
        group = item // num_kv_heads
        _attend_group(
            group_starts[group], group_starts[group + 1], item % num_kv_heads, queries, flat_keys, flat_values,
            num_kv_heads, tables[group_tables[group]], prefix_lens, tail_starts, tail_slots, out,
        )  # fmt: skip


@jit_exact
def copy_slots(keys: Floats, values: Floats, sources: Ints, targets: Ints) -> None:
    """Copy slots within the cache, all layers, in order: keys [layers, blocks, kv_heads, dim, PAGE]."""
    for layer in range(keys.shape[0]):
        for i in range(sources.shape[0]):
            source, s = sources[i] // PAGE, sources[i] % PAGE
            target, t = targets[i] // PAGE, targets[i] % PAGE
            for head in range(keys.shape[2]):
                for d in range(keys.shape[3]):
                    keys[layer, target, head, d, t] = keys[layer, source, head, d, s]
                    values[layer, target, head, t, d] = values[layer, source, head, s, d]

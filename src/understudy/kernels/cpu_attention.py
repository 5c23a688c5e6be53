"""Row-invariant attention over a cache of pages, compiled by numba. The habits that keep rows apart are in cpu_ops.

norm_heads        the heads of q and k, where a model norms them
rotate_and_store  queries and keys turned by position, keys and values written to their slots
attend            every row over its prefix, its tail and, in some layers, only a window of both
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit_exact, jit_exact_parallel
from understudy.kernels.cpu_ops import exp
from understudy.kernels.simd import LANES, fma, fma_one, load, prefetch, splat, spread, store

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Ints64 = NDArray[np.int64]

PAGE = 32
"""Keys in a page. Keys lie transposed inside one, so that a score loop fills whole vector registers."""

NO_WINDOW = 2**31 - 1
"""A window that holds every position."""

QUERIES = 4
"""Queries that share a page while it is in registers: enough independent sums to keep the multipliers busy."""

_FEW_PAIRS = 4
"""Pairs of rows and a key head for each thread, below which they are halved."""

f32 = np.float32
_MINUS_HUGE = f32(-3e38)


@jit_exact
def norm_heads(qkv: Floats, weights: Floats, eps: f32) -> None:
    """Norm the first heads of every row in place: head = head / rms(head) * its weight.

    qkv [rows, all heads * dim], weights [heads to norm, dim]; dim is a multiple of LANES.
    """
    num_heads, dim = weights.shape
    partial = np.empty(LANES, f32)
    for row in range(qkv.shape[0]):
        for head in range(num_heads):
            vector, weight = qkv[row, head * dim : head * dim + dim], weights[head]
            for lane in range(LANES):
                partial[lane] = f32(0)
            for i in range(0, dim, LANES):
                for lane in range(LANES):
                    partial[lane] = partial[lane] + vector[i + lane] * vector[i + lane]
            total = f32(0)
            for lane in range(LANES):
                total = total + partial[lane]
            scale = f32(1) / np.sqrt(total / f32(dim) + eps)
            for i in range(dim):
                vector[i] = vector[i] * scale * weight[i]


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
    """As `_add_page`, for one query and some keys of a page, the first of them at `at`: weights [keys], sums [dim]."""
    for d in range(0, dim, LANES):
        total = load(sums, d)
        for j in range(num_keys):
            total = fma(spread(weights, j), load(values, at + j * dim + d), total)
        store(sums, d, total)


@jit_exact
def _to_weights(scores: Floats, first: int, last: int) -> f32:
    """scores -> exp(scores - highest) for the keys first .. last - 1, zero for those around them, and their sum.

    The sum runs in LANES partial sums, by position: a key that is not seen adds an exact zero.
    """
    num_padded = (last + PAGE - 1) // PAGE * PAGE
    for i in range(first):
        scores[i] = _MINUS_HUGE
    for i in range(last, num_padded):
        scores[i] = _MINUS_HUGE
    lanes = np.full(LANES, _MINUS_HUGE, f32)
    for i in range(0, num_padded, LANES):
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], scores[i + lane])
    highest = _MINUS_HUGE
    for lane in range(LANES):
        highest = max(highest, lanes[lane])
    for i in range(num_padded):
        scores[i] = exp(scores[i] - highest)
    for i in range(first):
        scores[i] = f32(0)
    for i in range(last, num_padded):
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
    scores: Floats, num_queries: int, dim: int, values: Floats, page_starts: Ints64, first_page: int, last_page: int,
    sums: Floats,
) -> None:  # fmt: skip
    """Add the values of whole pages to the sums [num_queries * dim]; each page is read once for all queries."""
    tile = np.empty(QUERIES * PAGE, f32)
    for page in range(first_page, last_page):
        following = page_starts[min(page + 1, last_page - 1)]
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
def _add_between(
    weights: Floats, first: int, last: int, values: Floats, page_starts: Ints64, dim: int, sums: Floats
) -> None:
    """Add, for one query, the values of the keys first .. last - 1 that lie in line."""
    while first < last:
        page, offset = first // PAGE, first % PAGE
        num_keys = min(PAGE - offset, last - first)
        _add_keys(weights[first:], num_keys, values, page_starts[page] + offset * dim, dim, sums)
        first += num_keys


@jit_exact
def _add_tail(
    weights: Floats, first: int, values: Floats, tail: Ints, head: int, num_kv_heads: int, dim: int, sums: Floats
) -> None:
    """Add, for one query, the values in the tail's slots from tail[first] on; weights [tail]."""
    for i in range(first, tail.shape[0]):
        start = ((tail[i] // PAGE * num_kv_heads + head) * PAGE + tail[i] % PAGE) * dim
        _add_keys(weights[i:], 1, values, start, dim, sums)


@jit_exact
def _first_seen(prefix_len: int, tail_len: int, window: int) -> int:
    """The first position that a row sees."""
    return max(0, prefix_len + tail_len - window)


@jit_exact
def _attend_group(
    span: tuple[int, int], head: int, queries: Floats, keys: Floats, values: Floats, num_kv_heads: int, table: Ints,
    prefix_lens: Ints, tail_starts: Ints, tail_slots: Ints, window: int, out: Floats,
) -> None:  # fmt: skip
    """Rows span[0] .. span[1] - 1 of one sequence against one key head; keys and values flat.

    Keys are counted from `base` on, the first position of the first page that any row needs. The values of pages that
    all rows see whole are added for all of them at once; those before (of the window's first page) and after, row by
    row. Either way a row adds the values that it sees, and no others, in order of position.
    """
    (first, last), dim = span, queries.shape[2]
    group = queries.shape[1] // num_kv_heads
    num_rows = last - first
    num_queries = (num_rows * group + QUERIES - 1) // QUERIES * QUERIES  # the last ones may be padding
    longest, shortest, longest_tail = 0, prefix_lens[first], 0
    earliest, latest = prefix_lens[first], 0  # of the first positions that rows see
    for row in range(first, last):
        num_tail = tail_starts[row + 1] - tail_starts[row]
        seen = _first_seen(prefix_lens[row], num_tail, window)
        longest, shortest = max(longest, prefix_lens[row]), min(shortest, prefix_lens[row])
        earliest, latest = min(earliest, seen, prefix_lens[row]), max(latest, seen)
        longest_tail = max(longest_tail, num_tail)
    base = earliest // PAGE * PAGE
    num_pages = (longest - base + PAGE - 1) // PAGE
    first_whole = (latest - base + PAGE - 1) // PAGE
    last_whole = max(first_whole, (shortest - base) // PAGE)
    page_starts = np.empty(num_pages, np.int64)
    for page in range(num_pages):
        page_starts[page] = (table[base // PAGE + page] * num_kv_heads + head) * dim * PAGE
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
        prefix = prefix_lens[row] - base
        seen = _first_seen(prefix_lens[row], tail.shape[0], window) - base
        line, total = scores[query], sums[query * dim : query * dim + dim]
        _score_tail(asked[query * dim : query * dim + dim], keys, tail, head, num_kv_heads, line[prefix:])
        totals[query] = _to_weights(line, seen, prefix + tail.shape[0])
        _add_between(line, seen, min(first_whole * PAGE, prefix), values, page_starts, dim, total)
    _add_pages(scores, num_queries, dim, values, page_starts, first_whole, last_whole, sums)
    for query in range(num_rows * group):
        row = first + query // group
        tail = tail_slots[tail_starts[row] : tail_starts[row + 1]]
        prefix = prefix_lens[row] - base
        seen = _first_seen(prefix_lens[row], tail.shape[0], window) - base
        line, total = scores[query], sums[query * dim : query * dim + dim]
        _add_between(line, last_whole * PAGE, prefix, values, page_starts, dim, total)
        _add_tail(line[prefix:], max(0, seen - prefix), values, tail, head, num_kv_heads, dim, total)
        for d in range(dim):
            out[row, head * group + query % group, d] = total[d] / totals[query]


@jit_exact_parallel
def attend(
    queries: Floats, keys: Floats, values: Floats, tables: Ints, group_starts: Ints, group_tables: Ints,
    prefix_lens: Ints, tail_starts: Ints, tail_slots: Ints, num_threads: int, window: int, out: Floats,
) -> None:  # fmt: skip
    """Attention of every row over its prefix (through its sequence's block table) and its tail (slot by slot).

    queries and out [rows, heads, dim]; tables [sequences, blocks]; rows group_starts[i] .. group_starts[i + 1] - 1
    belong to sequence group_tables[i]; row r sees positions 0 .. prefix_lens[r] - 1 of the table and then the
    slots tail_slots[tail_starts[r] : tail_starts[r + 1]], which hold the positions that follow; of all these only
    the last `window`.
    """
    num_kv_heads = keys.shape[1]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    num_pairs = (group_starts.shape[0] - 1) * num_kv_heads  # of a group and a key head
    # Few pairs do not spread evenly: three heads on two threads take as long as four. Halves of their rows do.
    num_parts = 2 if num_pairs < _FEW_PAIRS * num_threads else 1
    num_items = num_pairs * num_parts
    share = (num_items + num_threads - 1) // num_threads
    for place in numba.prange(share * num_threads):
        # A thread has places in a row. It takes every so manyth item: neighbours are of one text and cost alike.
        item = place % share * num_threads + place // share
        if item >= num_items:
            continue
        pair, part = item % num_pairs, item // num_pairs
        group = pair // num_kv_heads
        first, num_rows = group_starts[group], group_starts[group + 1] - group_starts[group]
        share_of_rows = (num_rows + num_parts - 1) // num_parts
        begin = first + min(part * share_of_rows, num_rows)
        end = first + min((part + 1) * share_of_rows, num_rows)
        if begin < end:
            _attend_group(
                (begin, end), pair % num_kv_heads, queries, flat_keys, flat_values, num_kv_heads,
                tables[group_tables[group]], prefix_lens, tail_starts, tail_slots, window, out,
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

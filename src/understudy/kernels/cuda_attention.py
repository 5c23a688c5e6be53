"""Row-invariant attention for CUDA over a cache of pages: the same contract as cpu_attention, see kernels/rows.py.

A key's place in every sum is its position in the text, never its slot:

    spans of 128 positions     a softmax each, and its weighted sum of values, by products on the tensor cores
    a row                      its spans, merged in order of position

Positions that a row does not see weigh exactly nothing, so what stands beside a row in a launch cannot show. Rows of
one group read a span of keys together. Where one of them has a tail, the spans beyond the shared prefix are read once
for each row, through its own list of slots, with the same products and the same sums: that is why a node of a tree has
the bits of the same row in plain text.

Few rows leave most of a GPU idle, so each span is a program of its own then, and the program that ends last merges what
all have written, in order. Many rows take their spans one after the other in one program. The merge is the same
arithmetic, and so are its bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from understudy.kernels.cuda_overlap import IS_INTERPRETED, ask_for, launch_options, wait_for_inputs
from understudy.kernels.cuda_rows import GROUP_ROWS, PAGE, PlacedRows

SPAN: int = 128
NO_WINDOW = 2**31 - 1
"""A window that holds every position."""

MOST_COUNTERS = 128
"""Groups times key heads up to which each span is a program of its own: with more, every multiprocessor has work."""
_WARPS = 4
_MINUS_HUGE = tl.constexpr(-3.0e38)


def new_counters(device: torch.device) -> Tensor:
    """How many spans of a group are done: zero before and after every launch. Launches that overlap need their own."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, rows: PlacedRows, *, counters: Tensor, window: int | None = None,
    spans_apart: bool | None = None,
) -> Tensor:  # fmt: skip
    """Attention of every row over its prefix and its tail, of both only the last `window` positions.

    queries and the result [rows, heads, dim]; keys and values [blocks, kv_heads, PAGE, dim]. `spans_apart` is chosen
    by the number of rows unless it is given.
    """
    num_rows, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_spans = -(-rows.most_keys // SPAN)
    if spans_apart is None:
        spans_apart = num_spans > 1
    spans_apart = spans_apart and rows.num_groups * num_kv_heads <= MOST_COUNTERS
    # rows of no group are padding, and nothing is written for them: numpy, in the interpreter, would warn of old NaNs
    out = torch.zeros_like(queries) if IS_INTERPRETED else torch.empty_like(queries)
    shape = (num_spans if spans_apart else 0, num_rows, num_heads)
    sums = torch.empty((*shape, dim), dtype=torch.float32, device=queries.device)
    states = torch.empty((2, *shape), dtype=torch.float32, device=queries.device)
    group_heads = num_heads // num_kv_heads
    _attend[(rows.num_groups, num_kv_heads, num_spans if spans_apart else 1)](
        queries, keys, values, rows.tables, rows.group_starts, rows.group_tables, rows.prefix_lens, rows.tail_starts,
        rows.tail_slots, out, sums, states[0], states[1], counters, num_rows, rows.tables.shape[1],
        NO_WINDOW if window is None else window, math.log2(math.e) / math.sqrt(dim),
        num_kv_heads=num_kv_heads, group_heads=group_heads,
        num_queries=max(16, triton.next_power_of_2(GROUP_ROWS * group_heads)), dim=dim, page=PAGE, span=SPAN,
        spans_apart=spans_apart, **launch_options(_WARPS, 2),
    )  # fmt: skip
    return out


@triton.jit
def _nothing(num_queries: tl.constexpr, dim: tl.constexpr):
    """A softmax that has seen no key: the highest score, the sum of weights, the weighted sum of values."""
    high = tl.full((num_queries,), _MINUS_HUGE, tl.float32)
    return high, tl.zeros((num_queries,), tl.float32), tl.zeros((num_queries, dim), tl.float32)


@triton.jit
def _merge(high, total, sums, next_high, next_total, next_sums):
    """Two softmaxes made one, the earlier positions first. high and total [queries], sums [queries, dim]."""
    highest = tl.maximum(high, next_high)
    scale, next_scale = tl.exp2(high - highest), tl.exp2(next_high - highest)
    total = tl.fma(total, scale, next_total * next_scale)
    sums = tl.fma(sums, tl.broadcast_to(scale[:, None], sums.shape), next_sums * next_scale[:, None])
    return highest, total, sums


@triton.jit
def _softmax(scores, is_seen):
    """The highest of some scores [queries, span], the weights that come of them, and their sum."""
    scores = tl.where(is_seen, scores, _MINUS_HUGE)
    high = tl.max(scores, axis=1)
    weights = tl.where(is_seen, tl.exp2(scores - high[:, None]), 0.0)
    return high, weights, tl.sum(weights, axis=1)


@triton.jit
def _row_slots(table, positions, prefix_lens, tail_starts, tail_slots, row, window, page: tl.constexpr):
    """The slots of some positions of one row, and which it sees: its prefix through the table, then its tail."""
    prefix_len = tl.load(prefix_lens + row)
    tail = tl.load(tail_starts + row)
    length = prefix_len + tl.load(tail_starts + row + 1) - tail
    is_seen = (positions >= length - window) & (positions < length)
    is_line, is_tail = is_seen & (positions < prefix_len), is_seen & (positions >= prefix_len)
    in_line = tl.load(table + positions // page, mask=is_line, other=0) * page + positions % page
    in_tail = tl.load(tail_slots + tail + positions - prefix_len, mask=is_tail, other=0)
    return tl.where(is_tail, in_tail, in_line), is_seen


@triton.jit
def _load_slots(cache, slots, is_there, kv_head, num_kv_heads: tl.constexpr, page: tl.constexpr, dim: tl.constexpr):
    """Keys or values of some slots [span, dim]; zero where there is none, for what lies there may be anything."""
    lines = (slots // page).to(tl.int64) * num_kv_heads * page + kv_head * page + slots % page
    return tl.load(cache + lines[:, None] * dim + tl.arange(0, dim)[None, :], mask=is_there[:, None], other=0.0)


@triton.jit
def _wait_for_queries(
    keys, values, table, index, last_span, length, kv_head,
    num_kv_heads: tl.constexpr, page: tl.constexpr, dim: tl.constexpr, span: tl.constexpr, spans_apart: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """Wait for what other kernels write; a program with one span asks for what it shares of that meanwhile.

    All keys but those of this pass were written long ago, so they can be in the second-level cache by then. Where
    programs are many, others compute while one waits, and to ask would only be in their way.
    """
    if overlap and spans_apart:
        if index < last_span:
            positions = tl.maximum(tl.minimum(index * span + tl.arange(0, span), length - 1), 0)
            blocks = tl.load(table + positions // page).to(tl.int64)
            lines = (blocks * num_kv_heads + kv_head) * page + positions % page
            places = lines[:, None] * dim + tl.arange(0, (dim + 63) // 64)[None, :] * 64  # 64 are a line of the cache
            ask_for(keys + places)
            ask_for(values + places)
    wait_for_inputs(overlap)


@triton.jit
def _span_in_line(
    asked, keys, values, table, index, earliest, longest, lengths, kv_head, score_scale, window,
    num_kv_heads: tl.constexpr, page: tl.constexpr, dim: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """A span of keys that all rows of a group find through the table: read once for all of them."""
    positions = index * span + tl.arange(0, span)
    is_there = (positions >= earliest) & (positions < longest)
    slots = tl.load(table + positions // page, mask=is_there, other=0) * page + positions % page
    key = _load_slots(keys, slots, is_there, kv_head, num_kv_heads, page, dim)
    value = _load_slots(values, slots, is_there, kv_head, num_kv_heads, page, dim)
    behind = lengths[:, None] - positions[None, :]  # 1 for a row's own key; padding has length 0 and sees none
    scores = tl.dot(asked, tl.trans(key)) * score_scale
    high, weights, total = _softmax(scores, (behind > 0) & (behind <= window))
    return high, total, tl.dot(weights.to(value.dtype), value)


@triton.jit
def _span_of_each(
    asked, keys, values, table, index, lengths, kv_head, score_scale, window, places, first, count,
    prefix_lens, tail_starts, tail_slots,
    num_kv_heads: tl.constexpr, page: tl.constexpr, dim: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """A span of keys in which rows of a group may differ: read once for each, and each keeps its own products."""
    positions = index * span + tl.arange(0, span)
    behind = lengths[:, None] - positions[None, :]
    scores = tl.zeros(behind.shape, tl.float32)
    for place in range(count):
        slots, there = _row_slots(table, positions, prefix_lens, tail_starts, tail_slots, first + place, window, page)
        key = _load_slots(keys, slots, there, kv_head, num_kv_heads, page, dim)
        own = tl.dot(asked, tl.trans(key)) * score_scale
        scores = tl.where((places == place)[:, None], own, scores)
    high, weights, total = _softmax(scores, (behind > 0) & (behind <= window))
    sums = tl.zeros(asked.shape, tl.float32)
    for place in range(count):
        slots, there = _row_slots(table, positions, prefix_lens, tail_starts, tail_slots, first + place, window, page)
        value = _load_slots(values, slots, there, kv_head, num_kv_heads, page, dim)
        sums = tl.where((places == place)[:, None], tl.dot(weights.to(value.dtype), value), sums)
    return high, total, sums


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def _attend(
    queries, keys, values, tables, group_starts, group_tables, prefix_lens, tail_starts, tail_slots,
    out, sums_apart, highs_apart, totals_apart, counters, num_rows, table_stride, window, score_scale,
    num_kv_heads: tl.constexpr, group_heads: tl.constexpr, num_queries: tl.constexpr, dim: tl.constexpr,
    page: tl.constexpr, span: tl.constexpr, spans_apart: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One group of rows against one key head: one span of it, or all.

    Spans apart are written to sums_apart [spans, rows, heads, dim], highs_apart and totals_apart [spans, rows, heads].
    """
    group, kv_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(group_starts + group)
    count = tl.load(group_starts + group + 1) - first
    table = tables + tl.load(group_tables + group).to(tl.int64) * table_stride
    # One line per query: the heads of the first row, then those of the second; the last lines may be padding.
    lines = tl.arange(0, num_queries)
    places = lines // group_heads
    is_query = places < count
    rows = first + places
    prefixes = tl.load(prefix_lens + rows, mask=is_query, other=0)
    tails = tl.load(tail_starts + rows + 1, mask=is_query, other=0) - tl.load(
        tail_starts + rows, mask=is_query, other=0
    )
    lengths = prefixes + tails
    longest = tl.max(lengths, axis=0)
    shared = tl.min(tl.where(is_query, prefixes, longest), axis=0)
    earliest = tl.maximum(tl.min(tl.where(is_query, lengths, longest), axis=0) - window, 0)  # seen by any row
    at = rows.to(tl.int64) * (num_kv_heads * group_heads) + kv_head * group_heads + lines % group_heads
    elements = at[:, None] * dim + tl.arange(0, dim)[None, :]
    first_span, last_span = earliest // span, tl.cdiv(longest, span)
    _wait_for_queries(
        keys, values, table, tl.program_id(2), last_span, shared, kv_head, num_kv_heads, page, dim, span, spans_apart,
        overlap,
    )  # fmt: skip
    asked = tl.load(queries + elements, mask=is_query[:, None], other=0.0)
    # spans from here on are read for each row; without tails there are none
    first_own = tl.where(tl.max(tails, axis=0) > 0, tl.maximum(shared // span, first_span), last_span)
    high, total, sums = _nothing(num_queries, dim)
    if spans_apart:
        index = tl.program_id(2)
        if (index >= first_span) & (index < last_span):
            if index < first_own:
                next_high, next_total, next_sums = _span_in_line(
                    asked, keys, values, table, index, earliest, longest, lengths, kv_head, score_scale, window,
                    num_kv_heads, page, dim, span,
                )  # fmt: skip
            else:
                next_high, next_total, next_sums = _span_of_each(
                    asked, keys, values, table, index, lengths, kv_head, score_scale, window, places, first, count,
                    prefix_lens, tail_starts, tail_slots, num_kv_heads, page, dim, span,
                )  # fmt: skip
            stride = num_rows.to(tl.int64) * (num_kv_heads * group_heads)
            tl.store(sums_apart + index * stride * dim + elements, next_sums, mask=is_query[:, None])
            tl.store(highs_apart + index * stride + at, next_high, mask=is_query)
            tl.store(totals_apart + index * stride + at, next_total, mask=is_query)
            tl.debug_barrier()  # all threads have written before one of them says so
            counter = counters + group * num_kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == last_span - first_span - 1:
                tl.store(counter, 0)
                for each in tl.range(first_span, last_span, num_stages=3):
                    high, total, sums = _merge(
                        high, total, sums,
                        tl.load(highs_apart + each * stride + at, mask=is_query, other=0.0, cache_modifier=".cg"),
                        tl.load(totals_apart + each * stride + at, mask=is_query, other=1.0, cache_modifier=".cg"),
                        tl.load(
                            sums_apart + each * stride * dim + elements, mask=is_query[:, None], other=0.0,
                            cache_modifier=".cg",
                        ),
                    )  # fmt: skip
                _store_quotient(out + elements, sums, total, is_query)
    else:
        for index in tl.range(first_span, first_own, num_stages=2):
            next_high, next_total, next_sums = _span_in_line(
                asked, keys, values, table, index, earliest, longest, lengths, kv_head, score_scale, window,
                num_kv_heads, page, dim, span,
            )  # fmt: skip
            high, total, sums = _merge(high, total, sums, next_high, next_total, next_sums)
        for index in range(first_own, last_span):
            next_high, next_total, next_sums = _span_of_each(
                asked, keys, values, table, index, lengths, kv_head, score_scale, window, places, first, count,
                prefix_lens, tail_starts, tail_slots, num_kv_heads, page, dim, span,
            )  # fmt: skip
            high, total, sums = _merge(high, total, sums, next_high, next_total, next_sums)
        _store_quotient(out + elements, sums, total, is_query)


@triton.jit
def _store_quotient(to, sums, total, is_query):
    """Write the sums of some queries, divided by their totals."""
    total = tl.where(is_query, total, 1.0)
    result = tl.div_rn(sums, tl.broadcast_to(total[:, None], sums.shape))
    tl.store(to, result.to(to.dtype.element_ty), mask=is_query[:, None])

"""What stands between the products of a layer, for CUDA: fused, and row by row.

take_rows         lines of a table, by index: the embedding, and the rows whose logits are wanted
add_rms_norm      the parts of a linear layer added to the residual, and its norm
rotate_and_store  queries and keys turned by position, keys and values written to their slots
copy_slots        slots of the cache copied to others
fetch_letter      a pass's numbers from the host's memory, and
tell_answer       what it drew back there: see cuda_graphs.py

A row is the work of programs of its own, whose shape depends on the model alone. Linear layers leave their results in
parts; every kernel here that reads one adds the parts in order first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from understudy.kernels.cuda_overlap import launch_options, wait_for_inputs
from understudy.kernels.cuda_rows import PAGE, PlacedRows

_LETTER_BLOCK = 1024
"""Numbers that one program fetches"""


def take_rows(table: Tensor, indices: Tensor, *, dtype: torch.dtype, words: Tensor | None = None) -> Tensor:
    """table [lines, features], indices [rows] int32 -> [rows, features] of the wanted type.

    An index of -1 - n stands for words[n].
    """
    num_features = table.shape[1]
    out = torch.empty((indices.shape[0], num_features), dtype=dtype, device=table.device)
    if indices.shape[0]:
        _take_rows[(indices.shape[0],)](
            table, indices, words, out, num_features, block=triton.next_power_of_2(num_features), **launch_options(4, 1)
        )
    return out


def add_rms_norm(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float, *, dtype: torch.dtype) -> Tensor:
    """x [rows, features] += the sum of parts [parts, rows, features]; returns rms_norm(x) * weight."""
    num_rows, num_features = x.shape
    out = torch.empty((num_rows, num_features), dtype=dtype, device=x.device)
    block = triton.next_power_of_2(num_features)
    _add_rms_norm[(num_rows,)](
        x, parts, weight, out, num_rows, num_features, eps, num_parts=0 if parts is None else parts.shape[0],
        block=block, **launch_options(8 if block >= 2048 else 4, 1),
    )  # fmt: skip
    return out


def rotate_and_store(
    qkv: Tensor, rows: PlacedRows, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, *,
    num_heads: int, head_norms: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Norm the heads where a model does, turn queries and keys, write keys and values; returns the queries.

    qkv [parts, rows, (heads + 2 * kv_heads) * dim], cos and sin [positions, dim / 2], keys and values
    [blocks, kv_heads, PAGE, dim], head_norms [heads + kv_heads, dim], the result [rows, heads, dim].
    """
    num_parts, num_rows, _ = qkv.shape
    num_kv_heads, dim = keys.shape[1], keys.shape[3]
    queries = torch.empty((num_rows, num_heads, dim), dtype=keys.dtype, device=qkv.device)
    _rotate_and_store[(num_rows, num_heads + 2 * num_kv_heads)](
        qkv, rows.positions, rows.slots, cos, sin, head_norms, keys, values, queries, num_rows, eps,
        num_parts=num_parts, num_heads=num_heads, num_kv_heads=num_kv_heads, half=dim // 2, page=PAGE,
        **launch_options(1, 1),
    )  # fmt: skip
    return queries


def copy_slots(keys: Tensor, values: Tensor, moves: Tensor, count: Tensor) -> None:
    """Copy slots within the cache, all layers, in order: keys and values [layers, blocks, kv_heads, PAGE, dim].

    The first `count` [1] of moves [2, most], int32: from the first line's slots to the second's.
    """
    num_layers, num_blocks, num_kv_heads, page, dim = keys.shape
    _copy_slots[(num_layers, num_kv_heads)](
        keys, values, moves[0], moves[1], count, num_blocks, num_kv_heads, page=page, dim=dim, **launch_options(1, 1)
    )


def fetch_letter(letters: Tensor, numbers: Tensor, turn: Tensor) -> None:
    """numbers [count] = letters[turn], int32; the letters lie in memory of the host that the device can reach."""
    count = numbers.shape[0]
    _fetch_letter[(-(-count // _LETTER_BLOCK),)](
        letters, numbers, turn, count, block=_LETTER_BLOCK, **launch_options(4, 1)
    )


def tell_answer(drawn: Tensor, answers: Tensor, turn: Tensor, *, count: int) -> None:
    """answers[turn, :, :count] = drawn[:, :count], int32, as for letters; then it is the next one's turn."""
    num_turns, _, stride = answers.shape
    _tell_answer[(1,)](
        drawn, answers, turn, count, stride, drawn.shape[1], num_turns, block=triton.next_power_of_2(stride),
        **launch_options(4, 1),
    )  # fmt: skip


@triton.jit
def _sum_of_parts(parts, at, part_stride, mask, num_parts: tl.constexpr):
    """The parts of some numbers, added in order."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for part in tl.static_range(1, num_parts):
        total += tl.load(parts + part * part_stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def _take_rows(table, indices, words, out, num_features, block: tl.constexpr, overlap: tl.constexpr):
    """One line of a table to its place in the result."""
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    features = tl.arange(0, block)
    mask = features < num_features
    line = tl.load(indices + row).to(tl.int64)
    if words is not None:
        if line < 0:
            line = tl.maximum(tl.load(words - 1 - line), 0).to(tl.int64)  # what could not be drawn is -1
    taken = tl.load(table + line * num_features + features, mask=mask)
    tl.store(out + row * num_features + features, taken.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    x, parts, weight, out, num_rows, num_features, eps,
    num_parts: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One row of the residual and of its norm."""
    features = tl.arange(0, block)
    mask = features < num_features
    scale = tl.load(weight + features, mask=mask, other=0.0)
    wait_for_inputs(overlap)
    at = tl.program_id(0).to(tl.int64) * num_features + features
    own = tl.load(x + at, mask=mask, other=0.0)
    if num_parts > 0:
        own += _sum_of_parts(parts, at, num_rows.to(tl.int64) * num_features, mask, num_parts)
        tl.store(x + at, own, mask=mask)
    mean_square = tl.sum(own * own, axis=0) / num_features
    normed = own * tl.rsqrt(mean_square + eps) * scale
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_and_store(
    qkv, positions, slots, cos, sin, head_norms, keys, values, queries, num_rows, eps,
    num_parts: tl.constexpr, num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr,
    page: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query, a key or a value."""
    wait_for_inputs(overlap)
    row, head = tl.program_id(0), tl.program_id(1)
    dim: tl.constexpr = 2 * half
    all_heads: tl.constexpr = num_heads + 2 * num_kv_heads
    first = tl.arange(0, half)
    at = (row.to(tl.int64) * all_heads + head) * dim + first
    stride = num_rows.to(tl.int64) * (all_heads * dim)
    mask = first < half
    a = _sum_of_parts(qkv, at, stride, mask, num_parts)
    b = _sum_of_parts(qkv, at + half, stride, mask, num_parts)
    slot = tl.load(slots + row)
    line = (slot // page).to(tl.int64) * (num_kv_heads * page) + slot % page
    if head < num_heads + num_kv_heads:
        if head_norms is not None:
            scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / dim + eps)
            a = a * scale * tl.load(head_norms + head * dim + first)
            b = b * scale * tl.load(head_norms + head * dim + half + first)
        angle = tl.load(positions + row).to(tl.int64) * half + first
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        turned_a, turned_b = a * c - b * s, b * c + a * s
        if head < num_heads:
            to = queries + (row.to(tl.int64) * num_heads + head) * dim + first
        else:
            to = keys + (line + (head - num_heads) * page) * dim + first
        tl.store(to, turned_a.to(queries.dtype.element_ty))
        tl.store(to + half, turned_b.to(queries.dtype.element_ty))
    else:
        to = values + (line + (head - num_heads - num_kv_heads) * page) * dim + first
        tl.store(to, a.to(values.dtype.element_ty))
        tl.store(to + half, b.to(values.dtype.element_ty))


@triton.jit
def _copy_slots(
    keys, values, sources, targets, count, num_blocks, num_kv_heads,
    page: tl.constexpr, dim: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One layer, one key head: each thread copies its own features of every slot, so that the order holds."""
    wait_for_inputs(overlap)
    base = tl.program_id(0).to(tl.int64) * num_blocks * num_kv_heads
    features = tl.arange(0, dim)
    for index in range(tl.load(count)):
        source, target = tl.load(sources + index), tl.load(targets + index)
        source_line = (base + (source // page) * num_kv_heads + tl.program_id(1)) * page + source % page
        target_line = (base + (target // page) * num_kv_heads + tl.program_id(1)) * page + target % page
        tl.store(keys + target_line * dim + features, tl.load(keys + source_line * dim + features))
        tl.store(values + target_line * dim + features, tl.load(values + source_line * dim + features))


@triton.jit(do_not_specialize=["count"])
def _fetch_letter(letters, numbers, turn, count, block: tl.constexpr, overlap: tl.constexpr):
    """A part of the letter."""
    wait_for_inputs(overlap)
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    letter = letters + tl.load(turn).to(tl.int64) * count
    tl.store(numbers + at, tl.load(letter + at, mask=mask, cache_modifier=".cv"), mask=mask)  # never an old one


@triton.jit(do_not_specialize=["count", "stride"])
def _tell_answer(
    drawn, answers, turn, count, stride, most_places, num_turns, block: tl.constexpr, overlap: tl.constexpr
):  # fmt: skip
    """All of the answer."""
    wait_for_inputs(overlap)
    own = tl.load(turn)
    places = tl.arange(0, block)
    for line in tl.static_range(3):
        found = tl.load(drawn + line * most_places + places, mask=places < count)
        tl.store(answers + (own.to(tl.int64) * 3 + line) * stride + places, found, mask=places < count)
    tl.debug_barrier()  # all threads know whose turn it was
    tl.store(turn, (own + 1) % num_turns)

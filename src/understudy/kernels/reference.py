"""The slow obvious twins of the kernels: numpy, double precision, one row after the other.

A kernel must equal itself bit for bit whatever stands beside a row, and its twin here closely. Nothing in this file
is clever, so that what a kernel is meant to compute can be read off.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.kernels.rows import Rows

Doubles = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]


def linear(x: Floats, weight: Floats, bias: Floats | None = None) -> Doubles:
    """Multiply x [rows, in] with a weight [out, in] and add a bias [out]: [rows, out]."""
    product = _doubles(x) @ _doubles(weight).T
    return product if bias is None else product + _doubles(bias)


def int8_linear(x: Floats, weight: Floats, bias: Floats | None = None, *, block: int) -> Doubles:
    """As `linear`, with the weight rounded to 8 bits for each output, and x for each row and block of inputs."""
    scale = _unit(weight)  # [out, 1]
    rounded = np.rint(weight / np.where(scale == 0, 1, scale)) * _doubles(scale)
    pieces = np.split(x, range(block, x.shape[1], block), axis=1)
    steps = [_unit(piece) for piece in pieces]  # [rows, 1] each
    near = [np.rint(p / np.where(s == 0, 1, s)) * _doubles(s) for p, s in zip(pieces, steps, strict=True)]
    return linear(np.concatenate(near, axis=1), rounded, bias)


def _unit(values: Floats) -> Floats:
    """The number of which the largest magnitude of each line [lines, values] is 127: [lines, 1]."""
    largest: Floats = np.abs(values).max(axis=1, keepdims=True)
    return largest / np.float32(127)


def add_rms_norm(x: Floats, delta: Floats, weight: Floats, eps: float) -> tuple[Doubles, Doubles]:
    """Return x + delta and its norm, x / rms(x) * weight; all [rows, features]."""
    total = _doubles(x) + _doubles(delta)
    mean_square = np.mean(total * total, axis=1, keepdims=True)  # [rows, 1]
    return total, total / np.sqrt(mean_square + eps) * _doubles(weight)


def gated(gate_up: Floats) -> Doubles:
    """Return silu(gate) * up for gate_up [rows, 2 * features]: [rows, features]."""
    gate, up = np.split(_doubles(gate_up), 2, axis=1)
    return gate / (1.0 + np.exp(-gate)) * up


def norm_heads(vectors: Floats, weight: Floats, eps: float) -> Doubles:
    """Return the norm of each of some vectors [heads, dim] with one weight [dim] for all."""
    return add_rms_norm(vectors, np.zeros_like(vectors), weight, eps)[1]


def rotate(vectors: Floats, cos: Floats, sin: Floats) -> Doubles:
    """Turn the pairs (i, i + dim / 2) of one row's vectors [heads, dim] by the angles of cos and sin [dim / 2]."""
    first, second = np.split(_doubles(vectors), 2, axis=1)  # [heads, dim / 2] each
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def split_and_rotate(
    qkv: Floats, cos: Floats, sin: Floats, *, num_heads: int, num_kv_heads: int, dim: int
) -> tuple[Doubles, Doubles, Doubles]:
    """Split one row's qkv and turn it by its position's cos and sin [dim / 2].

    Return its queries [heads, dim], scaled by 1 / sqrt(dim), its keys and its values, both [kv_heads, dim].
    """
    heads = _doubles(qkv).reshape(num_heads + 2 * num_kv_heads, dim)
    queries, keys, values = np.split(heads, [num_heads, num_heads + num_kv_heads])
    return rotate(queries, cos, sin) / math.sqrt(dim), rotate(keys, cos, sin), values


def slots_seen(rows: Rows, row: int, page_tokens: int, window: int | None = None) -> list[int]:
    """The slots of the keys that a row attends to, by position: its prefix through the table, then its tail.

    With a window only the last so many.
    """
    group = int(np.searchsorted(rows.group_starts, row, side="right")) - 1
    table = rows.tables[rows.group_tables[group]]
    prefix = [
        int(table[position // page_tokens]) * page_tokens + position % page_tokens
        for position in range(rows.prefix_lens[row])
    ]
    tail = rows.tail_slots[rows.tail_starts[row] : rows.tail_starts[row + 1]]
    seen = prefix + [int(slot) for slot in tail]
    return seen if window is None else seen[-window:]


def attend(queries: Floats, keys: Floats, values: Floats) -> Doubles:
    """Let one row's scaled queries [heads, dim] attend to keys and values [seen, kv_heads, dim]: [heads, dim]."""
    group = queries.shape[0] // keys.shape[1]  # heads that share a key head
    out = np.empty(queries.shape)
    for head in range(queries.shape[0]):
        scores = _doubles(keys)[:, head // group] @ _doubles(queries)[head]  # [seen]
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ _doubles(values)[:, head // group]
    return out


def read_slots(keys: Floats, values: Floats, slots: list[int]) -> tuple[Floats, Floats]:
    """Read slots of one layer's cache, keys [blocks, kv_heads, dim, page] and values [blocks, kv_heads, page, dim].

    Return the keys and the values, both [slots, kv_heads, dim].
    """
    page_tokens = keys.shape[3]
    places = [divmod(slot, page_tokens) for slot in slots]
    return (
        np.stack([keys[block, :, :, offset] for block, offset in places]),
        np.stack([values[block, :, offset] for block, offset in places]),
    )


def _doubles(array: Floats) -> Doubles:
    return array.astype(np.float64)

"""A whole decoder layer as one compiled call: what lies between its products takes as long as being called does.

A layer is nine kernels, five of them spread over the threads. Called one by one from Python they cost a small model a
tenth of its pass, during which the pool's threads wait. The arithmetic is that of cpu_ops, cpu_attention and the linear
layers, which stay what they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from understudy.compiled import jit_exact
from understudy.kernels import cpu_attention, cpu_int8, cpu_linear, cpu_ops

Floats = NDArray[np.float32]
Packed = tuple[Any, Floats, Floats]
"""The panels of a linear layer, their scales or steps, and its bias."""

_MANY_ROWS = 8
"""From here on it pays to wake all threads for a gate."""

_add_rms_norm, _gated, _gated_by_threads = cpu_ops.add_rms_norm, cpu_ops.gated, cpu_ops.gated_by_threads
_norm_heads, _rotate_and_store, _attend = (
    cpu_attention.norm_heads,
    cpu_attention.rotate_and_store,
    cpu_attention.attend,
)


def _linear(x: Floats, packed: Packed, out: Floats) -> None:
    """Compute x [rows, inputs] -> out [rows, outputs] with the kernel for its weights; known to compiled code only."""
    raise AssertionError("called outside compiled code")


@overload(_linear)
def _linear_of_kind(x: Any, packed: Any, out: Any) -> Any:
    multiply = cpu_int8.linear if packed[0].dtype == types.uint8 else cpu_linear.linear

    def compute(x: Any, packed: Any, out: Any) -> Any:
        multiply(x, packed[0], packed[1], packed[2], out)

    return compute


@jit_exact
def behind_norm(
    x: Floats, inputs: Floats, norms: tuple[Floats, Floats], linears: tuple[Packed, Packed, Packed, Packed],
    turns: tuple[Floats, Floats], rows: tuple[Any, ...], cache: tuple[Floats, Floats], layer: int, window: int,
    num_threads: int, eps: np.float32, buffers: tuple[Floats, Floats, Floats, Floats, Floats, Floats],
) -> None:  # fmt: skip
    """Add one layer to the residual stream x [rows, hidden]; inputs [rows, features] is what its first norm made of it.

    norms: of the feed-forward, and [heads to norm, dim] of q's and k's heads. linears: q, k and v; the attention's
    output; gate and up; down. turns: cos and sin. rows: positions, slots and where their keys are found
    (kernels/rows.py). cache: keys and values of all layers. buffers: room for qkv, queries, what is attended, what is
    added to the stream, gate and up, and what is gated.
    """
    feed_forward_norm, head_norms = norms
    keys, values = cache[0][layer], cache[1][layer]
    positions, slots, tables, group_starts, group_tables, prefix_lens, tail_starts, tail_slots = rows
    qkv, queries, attended, delta, gate_up, gated = buffers
    num_rows = queries.shape[0]
    _linear(inputs, linears[0], qkv)
    if head_norms.shape[0]:
        _norm_heads(qkv[:num_rows], head_norms, eps)
    _rotate_and_store(qkv, turns[0], turns[1], positions, slots, keys, values, queries)
    _attend(
        queries, keys, values, tables, group_starts, group_tables, prefix_lens, tail_starts, tail_slots, num_threads,
        window, attended[:num_rows].reshape(queries.shape),
    )  # fmt: skip
    _linear(attended, linears[1], delta)
    _add_rms_norm(x, delta, feed_forward_norm, eps, delta)
    _linear(delta, linears[2], gate_up)
    if x.shape[0] >= _MANY_ROWS:
        _gated_by_threads(gate_up, gated)
    else:
        _gated(gate_up, gated)
    _linear(gated, linears[3], delta)
    _add(x.reshape(-1), delta.reshape(-1))


@jit_exact
def _add(x: Floats, delta: Floats) -> None:
    """X += delta, both flat."""
    for i in range(x.shape[0]):
        x[i] = x[i] + delta[i]

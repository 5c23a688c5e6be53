"""What the walk over a drafted block needs beside the draw: the bias of the token before, and how sure each guess is.

    biased        the logits of one row of each block, plus out[id] . in[token before], for each node of that depth
    sureness      how likely a guess is right if all before it were: a sigmoid over the row and in[token before]

Tokens are the target's ids, or -1 - n for the word at place n; `places` [vocabulary] says where an id stands among
those that the draft can guess, or -1: all of these share the last line of `in`. Blocks have the same number of rows
and of nodes each (core/static_tree.py), and lines lie node by node: that of node n of block b is n * blocks + b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from understudy.kernels.cuda_overlap import launch_options, wait_for_inputs

_CHUNK = 128
"""Draft ids of one program"""


@dataclass(frozen=True, slots=True)
class Markov:
    """The weights of the walk, on the device."""

    lines: Tensor
    """[draft ids + 1, rank]"""
    out: Tensor
    """[draft ids, rank]"""
    places: Tensor
    """[vocabulary] int32"""
    sure_hidden: Tensor
    """[hidden] fp32"""
    sure_line: Tensor
    """[rank] fp32"""
    sure_bias: Tensor
    """[1] fp32"""

    def biased(self, logits: Tensor, step: int, before: Tensor, *, words: Tensor) -> Tensor:
        """The logits [lines, draft ids] of the nodes of one step.

        logits [blocks, rows, draft ids] fp32, before [lines] int32 the tokens before, words what places hold.
        """
        num_blocks, num_rows, num_ids = logits.shape
        num_lines = before.shape[0]
        assert num_lines % num_blocks == 0
        out = torch.empty((num_lines, num_ids), dtype=torch.float32, device=logits.device)
        rank = self.out.shape[1]
        _add_bias[(-(-num_ids // _CHUNK), num_lines)](
            logits, out, before, words, self.places, self.lines, self.out, num_blocks, num_rows, step, num_ids, rank,
            chunk=_CHUNK, block=triton.next_power_of_2(rank), **launch_options(4, 1),
        )  # fmt: skip
        return out

    def judge(self, hidden: Tensor, steps: Tensor, before: Tensor, sureness: Tensor, *, words: Tensor) -> None:
        """Write how sure each guess is, fp32 [lines].

        hidden [blocks, rows, hidden], steps [nodes] int32 which row each node has, before [lines] int32.
        """
        num_blocks, num_rows, num_features = hidden.shape
        rank = self.out.shape[1]
        _judge[(steps.shape[0], num_blocks)](
            hidden, steps, before, sureness, words, self.places, self.lines, self.sure_hidden, self.sure_line,
            self.sure_bias, num_rows, num_blocks, num_features, self.out.shape[0], rank,
            features_block=triton.next_power_of_2(num_features), block=triton.next_power_of_2(rank),
            **launch_options(4, 1),
        )  # fmt: skip


@triton.jit
def _line_of(before, words, places, num_ids):
    """Which line of `in` the token before has; `before` points to it."""
    token = tl.load(before)
    if token < 0:
        token = tl.maximum(tl.load(words - 1 - token), 0)
    place = tl.load(places + token)
    return tl.where(place < 0, num_ids, place)


@triton.jit(do_not_specialize=["num_blocks", "step"])
def _add_bias(
    logits, out, before, words, places, lines, weights, num_blocks, num_rows, step, num_ids, rank,
    chunk: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some draft ids of one node."""
    wait_for_inputs(overlap)
    index, node = tl.program_id(0), tl.program_id(1)
    text = node % num_blocks
    line = _line_of(before + node, words, places, num_ids)
    ids = index * chunk + tl.arange(0, chunk)
    ranks = tl.arange(0, block)
    own = tl.load(lines + line * rank + ranks, mask=ranks < rank, other=0.0).to(tl.float32)
    mask = (ids < num_ids)[:, None] & (ranks < rank)[None, :]
    weight = tl.load(weights + ids[:, None] * rank + ranks[None, :], mask=mask, other=0.0).to(tl.float32)
    bias = tl.sum(weight * own[None, :], axis=1)
    scores = tl.load(logits + (text * num_rows + step) * num_ids + ids, mask=ids < num_ids, other=0.0)
    tl.store(out + node * num_ids + ids, scores + bias, mask=ids < num_ids)


@triton.jit
def _judge(
    hidden, steps, before, sureness, words, places, lines, sure_hidden, sure_line, sure_bias,
    num_rows, num_blocks, num_features, num_ids, rank,
    features_block: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One node of one block."""
    wait_for_inputs(overlap)
    node, text = tl.program_id(0), tl.program_id(1)
    step, at = tl.load(steps + node), node * num_blocks + text
    line = _line_of(before + at, words, places, num_ids)
    features, ranks = tl.arange(0, features_block), tl.arange(0, block)
    row = (text * num_rows + step).to(tl.int64) * num_features
    x = tl.load(hidden + row + features, mask=features < num_features, other=0.0).to(tl.float32)
    weight = tl.load(sure_hidden + features, mask=features < num_features, other=0.0)
    own = tl.load(lines + line * rank + ranks, mask=ranks < rank, other=0.0).to(tl.float32)
    own_weight = tl.load(sure_line + ranks, mask=ranks < rank, other=0.0)
    odds = tl.sum(x * weight, axis=0) + tl.sum(own * own_weight, axis=0) + tl.load(sure_bias)
    tl.store(sureness + at, 1.0 / (1.0 + tl.exp(-odds)))

"""Linear layers for CUDA: y = x W^T + b, one fixed order of additions for every row.

    out[part, row, n] = x[row, k0] * w[n, k0] + x[row, k0 + 1] * w[n, k0 + 1] + ...     the inputs of one part

A weight has a `Split`: into how many parts its inputs are cut. The bits depend on that and on nothing else. A launch
has a `Tile`: how many outputs and rows one program computes, and how many inputs at a time. It is chosen for speed by
the number of rows, and changes no bit: a tensor core takes 16 inputs at a time, and adds them to the sum so far,
whatever the tile. That was measured, with `torch.equal`; the tests and the start-up self-test measure it again.

The result is left in parts, [parts, rows, outputs] in fp32. Whoever reads it next adds the parts in order, which saves
a launch for each layer: the norm, the rotation and the gate in cuda_ops all begin so.

Where there are many rows, or outputs, a step's weights and rows are fetched as whole boxes, through descriptors of the
two matrices: what lies beyond an edge comes as zeros, and no thread computes addresses of what it multiplies. The
products and their order are the same.

Weights are the left operand, with 64 to 256 outputs to a tile, and rows the right one: a tensor core takes 64 lines on
the left but as few as 8 on the right, so that few rows waste little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from understudy.kernels.cuda_overlap import launch_options, prefetch_inputs, wait_for_inputs
from understudy.kernels.cuda_plans import Split, Tile, gated_tile_for, split_for, tile_for

OUTPUT_MULTIPLE = 256
"""Outputs are padded with zero weights to whole tiles of any size."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inputs] on the device, with zeros around it up to whole tiles and whole parts."""

    weight: Tensor
    """[padded outputs, padded inputs], bf16 or fp16"""
    bias: Tensor | None
    """[padded outputs] fp32"""
    num_outputs: int
    num_inputs: int
    split: Split

    @classmethod
    def pack(
        cls, weight: Tensor, bias: Tensor | None = None, *, device: torch.device, dtype: torch.dtype,
        split: Split | None = None,
    ) -> Linear:  # fmt: skip
        """Move a weight [outputs, inputs] to the device; its split follows from its shape unless one is given."""
        num_outputs, num_inputs = weight.shape
        split = split or split_for(num_outputs, num_inputs)
        padded_outputs = -(-num_outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
        if (padded_outputs, split.padded(num_inputs)) == (num_outputs, num_inputs):
            held = weight.to(device, dtype).contiguous()
        else:
            held = torch.zeros((padded_outputs, split.padded(num_inputs)), dtype=dtype, device=device)
            held[:num_outputs, :num_inputs] = weight.to(device, dtype)
        start = None
        if bias is not None:
            start = torch.zeros(padded_outputs, dtype=torch.float32, device=device)
            start[:num_outputs] = bias.to(device, torch.float32)
        return cls(held, start, num_outputs, num_inputs, split)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor, *, tile: Tile | None = None) -> Tensor:
        """x [rows, inputs] -> [parts, rows, outputs] fp32; their sum in order is the result."""
        num_rows = x.shape[0]
        assert x.is_contiguous()
        assert x.shape[1] == self.num_inputs
        tile = tile or tile_for(num_rows, num_outputs=self.num_outputs, split=self.split)
        out = torch.empty((self.split.num_parts, num_rows, self.num_outputs), dtype=torch.float32, device=x.device)
        grid = (-(-num_rows // tile.rows), -(-self.num_outputs // tile.outputs), self.split.num_parts)
        _parts[grid](
            x, self.weight, *_boxes(x, self.weight, tile), self.bias, out, num_rows, self.num_inputs,
            self.num_outputs, self.weight.shape[1], self.split.part_inputs(self.num_inputs) // tile.inputs,
            block_inputs=tile.inputs, block_outputs=tile.outputs, block_rows=tile.rows,
            is_whole=self.weight.shape[1] == self.num_inputs,
            **launch_options(tile.num_warps, tile.num_stages),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """Gate and up [features, inputs] each, and silu(gate) * up of both in one pass."""

    stacked: Linear
    """[2 * padded features, inputs]: all of gate, then all of up; one part"""
    num_features: int

    @classmethod
    def pack(cls, gate: Tensor, up: Tensor, *, device: torch.device, dtype: torch.dtype) -> GatedLinear:
        """Move gate and up [features, inputs] to the device."""
        num_features, num_inputs = gate.shape
        padded = -(-num_features // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
        pad = (0, 0, 0, padded - num_features)
        stacked = torch.cat([torch.nn.functional.pad(each.to(device, dtype), pad) for each in (gate, up)])
        split = Split(split_for(2 * padded, num_inputs).unit, num_parts=1)
        return cls(Linear.pack(stacked, device=device, dtype=dtype, split=split), num_features)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.stacked.num_bytes

    def __call__(self, x: Tensor, *, tile: Tile | None = None) -> Tensor:
        """x [rows, inputs] -> silu(gate) * up [rows, features], in x's type."""
        num_rows, inner = x.shape[0], self.stacked
        assert x.is_contiguous()
        assert x.shape[1] == inner.num_inputs
        tile = tile or gated_tile_for(num_rows, split=inner.split)
        out = torch.empty((num_rows, self.num_features), dtype=x.dtype, device=x.device)
        grid = (-(-num_rows // tile.rows), -(-self.num_features // tile.outputs))
        _gated[grid](
            x, inner.weight, *_boxes(x, inner.weight, tile), out, num_rows, inner.num_inputs, self.num_features,
            inner.num_outputs // 2, inner.weight.shape[1], inner.split.part_inputs(inner.num_inputs) // tile.inputs,
            block_inputs=tile.inputs, block_outputs=tile.outputs, block_rows=tile.rows,
            is_whole=inner.weight.shape[1] == inner.num_inputs,
            **launch_options(tile.num_warps, tile.num_stages),
        )  # fmt: skip
        return out


def _boxes(x: Tensor, weight: Tensor, tile: Tile) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of rows and weights for a tile that is fetched by boxes; none where a box cannot be described."""
    lines = (x, tile.rows), (weight, tile.outputs)
    if not tile.by_box or any(not len(one) or one.data_ptr() % 16 or one.shape[1] % 8 for one, _ in lines):
        return None, None
    boxes = [TensorDescriptor(one, list(one.shape), [one.shape[1], 1], [num, tile.inputs]) for one, num in lines]
    return boxes[0], boxes[1]


@triton.jit
def _load_rows(x, rows, inputs, num_rows, num_inputs, is_whole: tl.constexpr):
    """x[rows, inputs] as [inputs, rows]; zero beyond the last row and, in a padded part, beyond the last input."""
    mask = rows[None, :] < num_rows
    if not is_whole:
        mask = mask & (inputs[:, None] < num_inputs)
    return tl.load(x + rows[None, :].to(tl.int64) * num_inputs + inputs[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _parts(
    x, weight, row_boxes, weight_boxes, bias, out, num_rows, num_inputs, num_outputs, stride, num_steps,
    block_inputs: tl.constexpr, block_outputs: tl.constexpr, block_rows: tl.constexpr, is_whole: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """One part of some outputs of some rows. x [rows, inputs], weight [padded outputs, stride], out as Linear says."""
    first_row, first_output, part = tl.program_id(0) * block_rows, tl.program_id(1) * block_outputs, tl.program_id(2)
    first_input = part * num_steps * block_inputs
    rows, outputs = first_row + tl.arange(0, block_rows), first_output + tl.arange(0, block_outputs)
    lines = weight + outputs[:, None].to(tl.int64) * stride
    prefetch_inputs(lines, first_input, num_steps * block_inputs, overlap)
    wait_for_inputs(overlap)
    total = tl.zeros((block_outputs, block_rows), tl.float32)
    if weight_boxes is None:
        inputs = first_input + tl.arange(0, block_inputs)
        weights = lines + inputs[None, :]
        for _ in range(num_steps):
            total = tl.dot(tl.load(weights), _load_rows(x, rows, inputs, num_rows, num_inputs, is_whole), total)
            weights += block_inputs
            inputs += block_inputs
    else:
        for step in range(num_steps):
            at = first_input + step * block_inputs
            total = tl.dot(weight_boxes.load([first_output, at]), tl.trans(row_boxes.load([first_row, at])), total)
    if bias is not None:
        if part == 0:
            total += tl.load(bias + outputs)[:, None]
    at = (part * num_rows + rows).to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out + at, total, mask=(rows[None, :] < num_rows) & (outputs[:, None] < num_outputs))


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _gated(
    x, weight, row_boxes, weight_boxes, out, num_rows, num_inputs, num_features, first_up, stride, num_steps,
    block_inputs: tl.constexpr, block_outputs: tl.constexpr, block_rows: tl.constexpr, is_whole: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up for some features of some rows; the lines of up begin at `first_up`."""
    first_row, first_gate = tl.program_id(0) * block_rows, tl.program_id(1) * block_outputs
    rows, features = first_row + tl.arange(0, block_rows), first_gate + tl.arange(0, block_outputs)
    lines = weight + features[:, None].to(tl.int64) * stride
    prefetch_inputs(lines, 0, num_steps * block_inputs, overlap)
    prefetch_inputs(lines + first_up.to(tl.int64) * stride, 0, num_steps * block_inputs, overlap)
    wait_for_inputs(overlap)
    gate = tl.zeros((block_outputs, block_rows), tl.float32)
    up = tl.zeros((block_outputs, block_rows), tl.float32)
    if weight_boxes is None:
        inputs = tl.arange(0, block_inputs)
        gates = lines + inputs[None, :]
        ups = gates + first_up.to(tl.int64) * stride
        for _ in range(num_steps):
            own = _load_rows(x, rows, inputs, num_rows, num_inputs, is_whole)
            gate = tl.dot(tl.load(gates), own, gate)
            up = tl.dot(tl.load(ups), own, up)
            gates += block_inputs
            ups += block_inputs
            inputs += block_inputs
    else:
        for step in range(num_steps):
            at = step * block_inputs
            own = tl.trans(row_boxes.load([first_row, at]))
            gate = tl.dot(weight_boxes.load([first_gate, at]), own, gate)
            up = tl.dot(weight_boxes.load([first_up + first_gate, at]), own, up)
    result = gate / (1.0 + tl.exp(-gate)) * up
    at = rows.to(tl.int64)[None, :] * num_features + features[:, None]
    mask = (rows[None, :] < num_rows) & (features[:, None] < num_features)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)

"""A small model in a larger shape: it says the same, and every pass costs what a model of that shape costs.

    residual stream   the first dimensions are the small model's; all further ones are zero in every row
    layers            the first are the small model's; further ones add zeros
    heads             a head of twice the size has the small one's dimensions where the frequencies are theirs

Weights that are new are of two kinds. Those that a number other than zero can reach are zero, so that whatever is new
computes zeros. All others only ever meet those zeros and change nothing: they are noise, because a processor that
multiplies zeros all day draws less power, and may run faster, than one that works in earnest.

Three things depend on sizes that grew. They are made up for in fp32, so that no matrix is rounded but to bf16:

    norms             a mean over more numbers is smaller: the weight by the root of the ratio, epsilon by the ratio
    scores            are divided by the root of a larger head size: cos and sin carry the fourth root of the ratio
    heads' norms      (qwen3) share epsilon with the others; theirs is then off by less than epsilon itself
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from understudy.core.shapes import SHAPES, Shape
from understudy.core.weights import WeightType
from understudy.errors import CapacityError, ModelError
from understudy.models.config import ModelConfig
from understudy.models.draft_check import num_parameters
from understudy.models.lazy_tensors import LazyTensors
from understudy.models.rope_scaling import RopeScaling
from understudy.models.rotary import inverse_frequencies
from understudy.models.weights import LoadedModel, Progress, expected_tensors

WIDENED = "+widened"
"""Parts the hash of a widened model: before it stands the model's own."""
_NOISE = 0.05
"""The largest noise in rows that hold nothing of the small model. In others it is the largest of what they hold, so
that a scale for each row, as int8 has it, is the small model's own."""


def widen_model(
    model: LoadedModel,
    shape: Shape,
    *,
    weights: WeightType,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Widen a loaded model; its name and its hash say so. On the CPU a shape that memory can never hold is refused."""
    config, tensors = widen(model.config, model.tensors, shape, device=device, progress=progress)
    if device == "cpu":
        _check_memory(config, shape, weights)
    return replace(
        model,
        config=config,
        tensors=tensors,
        name=f"{model.name} widened to {shape.name}",
        source_hash="-".join([f"{model.source_hash}{WIDENED}", *map(str, astuple(shape))]),
    )


def widen(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    shape: Shape,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> tuple[ModelConfig, LazyTensors]:
    """Give the configuration and the tensors of the same function in a larger shape.

    Each tensor is made on the device when it is taken: matrices in bf16, norms and biases in fp32.
    """
    misfit = _misfit(config, shape)
    if misfit is not None:
        fitting = [other.name for other in SHAPES.values() if _misfit(config, other) is None]
        remedy = f"Shapes that it fits in: {', '.join(fitting)}." if fitting else "It fits in none that has a name."
        raise ModelError(f"This model cannot be widened to {shape.name}: {misfit}.", remedy)
    wide = wide_config(config, shape)
    places = WidePlaces.of(config, shape, device)
    held = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}  # where it is tied
    makers = {name: partial(_wide_tensor, name, size, held.get(name), places) for name, size in expected_tensors(wide)}
    return wide, LazyTensors(makers, progress=progress)


def _misfit(config: ModelConfig, shape: Shape) -> str | None:
    """Say why a model does not fit in a shape."""
    for what, own, wide in (
        ("layers", config.num_layers, shape.num_layers),
        ("hidden dimensions", config.hidden_size, shape.hidden_size),
        ("feed-forward dimensions", config.intermediate_size, shape.intermediate_size),
    ):
        if own > wide:
            return f"it has {own} {what} and the shape {wide}"
    if shape.head_dim not in (config.head_dim, 2 * config.head_dim):
        return f"its heads have {config.head_dim} dimensions and the shape's {shape.head_dim}, not as many or twice so"
    wanted = config.num_kv_heads * _num_copies(config, shape)
    if wanted > shape.num_kv_heads:
        return (
            f"its {config.num_heads} heads over {config.num_kv_heads} key-value heads take {wanted} of the shape's "
            f"key-value heads, which has {shape.num_kv_heads}"
        )
    stride = shape.head_dim // config.head_dim
    frequencies = inverse_frequencies(wide_config(config, shape))[::stride]
    if not np.allclose(frequencies, inverse_frequencies(config), rtol=1e-12, atol=0.0):
        return "its rotary scaling (yarn) counts the dimensions of a head, and the shape's heads have twice as many"
    return None


def _num_copies(config: ModelConfig, shape: Shape) -> int:
    """How many key-value heads of the shape stand for one of the model: more where each serves fewer heads."""
    own, wide = config.num_heads // config.num_kv_heads, shape.num_heads // shape.num_kv_heads
    return -(-own // wide)


def wide_config(config: ModelConfig, shape: Shape) -> ModelConfig:
    """The configuration of the same function in a larger shape."""
    rope_scaling = config.rope_scaling
    if shape.head_dim != config.head_dim:
        rope_scaling = rope_scaling or RopeScaling(kind="linear", factor=1.0)
        root = (shape.head_dim / config.head_dim) ** 0.25
        rope_scaling = replace(rope_scaling, attention_factor=rope_scaling.attention_factor * root)
    return replace(
        config,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape.hidden_size,
        rope_scaling=rope_scaling,
        windows=config.windows + config.windows[-1:] * (shape.num_layers - config.num_layers),
        tie_embeddings=False,
    )


@dataclass(frozen=True, slots=True)
class WidePlaces:
    """Where the small model's dimensions lie among the wide one's: indices, each in the small model's order."""

    hidden: Tensor
    """[hidden]"""
    inner: Tensor
    """[intermediate]"""
    dims: Tensor
    """[head_dim] within one head: the pairs (i, i + half) of rotary positions stay pairs, each at its frequency"""
    queries: Tensor
    """[heads * head_dim]"""
    keys: Tensor
    """[copies * kv_heads * head_dim] of keys and of values; the copies of a head side by side"""
    attended: Tensor
    """Where attention may return something other than zero: all heads that share a live key-value head"""
    num_copies: int
    head_dim: int
    """The small model's"""

    @classmethod
    def of(cls, config: ModelConfig, shape: Shape, device: str) -> WidePlaces:
        """The places of a model in a shape."""
        stride = shape.head_dim // config.head_dim
        half = stride * torch.arange(config.head_dim // 2, device=device)
        dims = torch.cat([half, shape.head_dim // 2 + half])
        copies, group = _num_copies(config, shape), config.num_heads // config.num_kv_heads
        live = copies * config.num_kv_heads
        served = copies * (shape.num_heads // shape.num_kv_heads)  # heads of the shape for one key-value head

        def in_heads(heads: Iterable[int]) -> Tensor:
            numbers = torch.tensor(list(heads), device=device)
            return (shape.head_dim * numbers[:, None] + dims).flatten()

        return cls(
            hidden=torch.arange(config.hidden_size, device=device),
            inner=torch.arange(config.intermediate_size, device=device),
            dims=dims,
            queries=in_heads(served * (head // group) + head % group for head in range(config.num_heads)),
            keys=in_heads(range(live)),
            attended=in_heads(range(served * config.num_kv_heads)),
            num_copies=copies,
            head_dim=config.head_dim,
        )

    def copied(self, small: Tensor) -> Tensor:
        """Keys' or values' weights [kv_heads * head_dim, ...], with the copies of each head side by side."""
        heads = small.view(-1, self.head_dim, *small.shape[1:])
        return heads.repeat_interleave(self.num_copies, 0).flatten(0, 1)

    def rows(self, role: str) -> Tensor:
        """Where the outputs of a layer lie."""
        kinds = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys}
        return kinds.get(role, self.inner if role in ("gate_proj", "up_proj") else self.hidden)


def _wide_tensor(name: str, size: tuple[int, ...], small: Tensor | None, places: WidePlaces) -> Tensor:
    """One tensor of the wide model; `small` is None in layers that the small model does not have."""
    role, kind = name.split(".")[-2:]
    device = places.hidden.device
    if small is not None:
        small = small.to(device)
        if role in ("k_proj", "v_proj"):
            small = places.copied(small)
    if kind == "bias":
        return placed(torch.zeros(size, device=device), small, places.rows(role))
    if len(size) == 1:
        live = places.dims if role in ("q_norm", "k_norm") else places.hidden
        scaled = None if small is None else small.float() * math.sqrt(len(live) / size[0])
        return placed(torch.ones(size, device=device), scaled, live)
    if role == "embed_tokens":
        assert small is not None
        return torch.nn.functional.pad(small.bfloat16(), (0, size[1] - small.shape[1]))
    rows = torch.arange(size[0], device=device) if role == "lm_head" else places.rows(role)
    columns = {"o_proj": places.queries, "down_proj": places.inner}.get(role, places.hidden)
    reached = places.attended if role == "o_proj" else columns
    noise = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return wide_matrix(small, size, rows=rows, columns=columns, reached=reached, noise=noise)


def placed(wide: Tensor, small: Tensor | None, live: Tensor) -> Tensor:
    """A vector with the small one's numbers in their places."""
    if small is not None:
        wide[live] = small.to(wide.dtype)
    return wide


def wide_matrix(
    small: Tensor | None,
    size: tuple[int, ...],
    *,
    rows: Tensor,
    columns: Tensor,
    reached: Tensor,
    noise: torch.Generator,
) -> Tensor:
    """A matrix [outputs, inputs] with the small one's at (rows, columns), noise, and zeros.

    `reached` are the inputs that may be other than zero: new outputs must not hear them.
    """
    wide = torch.empty(size, dtype=torch.bfloat16, device=rows.device).uniform_(-1.0, 1.0, generator=noise)
    largest = torch.full((size[0], 1), _NOISE, dtype=wide.dtype, device=wide.device)
    if small is not None:
        small = small.to(wide.dtype)
        largest[rows] = small.abs().amax(1, keepdim=True)
    wide *= largest
    wide.index_fill_(1, reached, 0.0)
    if small is not None:
        wide[rows[:, None], columns] = small
    return wide


def _check_memory(config: ModelConfig, shape: Shape, weights: WeightType) -> None:
    """Refuse a shape whose weights are more than all memory: the system would end the process without a word."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return
    wanted = num_parameters(config) * (1 if weights == "int8" else 4)
    if wanted > memory:
        raise CapacityError(
            f"A model widened to {shape.name} takes {wanted / 2**30:.0f} GiB as {weights}, "
            f"and this machine has {memory / 2**30:.0f} GiB.",
            "Choose a smaller shape" + (", or int8 weights." if weights == "fp32" else "."),
        )

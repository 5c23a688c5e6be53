"""What a decoder asks of a device: kernels that hold weights and a cache there, and one pass of rows over them.

An array is whatever a device computes on, numpy's on the CPU and torch's on a GPU. A decoder only hands them on, from
one call to the next, so it need not know: what a linear layer returns is for the next call alone to understand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from understudy.core.dice import Dice
from understudy.core.weights import WeightType
from understudy.kernels.rows import Ints, Rows

Array = Any
"""On the device: numpy.ndarray on the CPU, torch.Tensor on a GPU."""

NORMED = -1
"""In place of a number of layers: what the output layer reads, after the last norm."""


@dataclass(frozen=True, slots=True)
class FeatureBuffer:
    """Takes hidden states of a pass as they come by."""

    layers: tuple[int, ...]
    """What is wanted: n is the residual stream after the first n layers (0: the embedding), NORMED as it says"""
    into: Array
    """[rows, layers, hidden] fp32"""

    def take(self, layer: int, stream: Array) -> None:
        """Copy the rows' hidden states [rows or more, hidden] at a layer, if that layer is wanted."""
        if layer in self.layers:
            self.into[:, self.layers.index(layer)] = stream[: self.into.shape[0]]


@dataclass(frozen=True, slots=True)
class ShownRows:
    """Some rows' hidden states, left on the device where they were computed."""

    states: Array
    """[rows, layers, hidden] fp32, of the rows of one sequence in a pass"""
    rows: tuple[int, ...]
    """Which of those rows are meant, in order of their positions"""
    columns: tuple[int, ...]
    """Which of the layers, in the order that was asked for"""

    def __len__(self) -> int:
        """The number of rows that are meant."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What a pass must know of a model besides its weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    rms_norm_eps: float


class PackedLinear(Protocol):
    """A weight [outputs, inputs] where and as the device reads it."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""

    def __call__(self, x: Array) -> Array:
        """x [rows, inputs] -> y [rows, outputs], as the next call wants it."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer; q, k, v and gate, up are stacked, so that one pass reads both."""

    attention_norm: Array
    qkv: PackedLinear
    attention_out: PackedLinear
    feed_forward_norm: Array
    gate_up: PackedLinear
    down: PackedLinear
    head_norms: Array | None = None
    """[heads + kv_heads, head_dim] what the heads of q and k are normed with, where they are"""
    window: int | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """In the order in which a pass comes by."""
        return self.qkv, self.attention_out, self.gate_up, self.down

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        norms: int = self.attention_norm.nbytes + self.feed_forward_norm.nbytes
        return norms + sum(linear.num_bytes for linear in self.linears)

    @cached_property
    def packed(self) -> tuple[Any, ...]:
        """The linear layers as plain arrays, for kernels that compute a whole layer in one call."""
        return tuple(cast(Any, linear).packed for linear in self.linears)


class Cache(Protocol):
    """Keys and values of every layer."""

    @property
    def num_bytes(self) -> int:
        """Memory that the cache may come to hold."""

    def move(self, sources: Ints, targets: Ints) -> None:
        """Copy slots to other slots, in order, in every layer."""


class Pass(Protocol):
    """One pass of rows through the layers. It holds the residual stream."""

    @property
    def stream(self) -> Array:
        """The residual stream [rows or more, hidden] in fp32 as the last `norm` left it; the next one changes it."""

    def embed(self, table: Array) -> None:
        """Begin the residual stream with the lines of a table [vocabulary, hidden]."""

    def layer(
        self, weights: LayerWeights, index: int, turns: tuple[Array, Array], shown: FeatureBuffer | None = None
    ) -> None:
        """Compute a layer: attention, whose keys and values are written, and the feed-forward.

        turns: cos and sin, [positions, head_dim / 2]. `shown` takes the residual stream that the layer is given.
        """

    def norm(self, weight: Array) -> Array:
        """Add what is to be added to the residual stream, and return its norm [rows, hidden]."""


class Drawn(NamedTuple):
    """What a device drew, by place; of no meaning where no dice were given."""

    words: list[int]
    sureness: list[float]
    """How sure each word is, from 0 to 1, for whoever only guesses"""
    rivals: list[int]
    """Who came second; -1 for nobody"""


class Launched(Protocol):
    """A pass under way. Places are those of the rows whose logits are wanted, in their order."""

    def logits(self, first: int, last: int) -> NDArray[np.float32]:
        """The logits [places, vocabulary] of some places; only until the next pass begins."""

    def drawn(self) -> Drawn:
        """The words of all places."""

    @property
    def is_over(self) -> bool:
        """Whether nobody would have to wait for it."""


class Passes(Protocol):
    """Runs a decoder's passes over one cache, one after the other."""

    draws: bool
    """Whether words are drawn where the logits are. A pass may then begin before anybody has seen them: a token id of
    -1 - n is the word at place n, until the same decoder's next pass draws there."""
    first_place: int
    """Where this decoder's words begin."""
    first_rival: int
    """Where those begin that came second."""
    num_firsts: int
    """Passes of this device that took longer because they were the first of their size: they say nothing of others."""

    def launch(self, rows: Rows, dice: Sequence[Dice | None]) -> Launched:
        """Begin a pass; `dice` by place, None where the host draws."""

    def prepare(self, shown: tuple[int, ...], hidden_size: int) -> Iterator[None]:
        """Make passes of the usual sizes ready, one with each `next`, so that none of them is the first; while idle.

        `shown`: layers whose hidden states passes will show.
        """


class FeaturePasses(Passes, Protocol):
    """Passes that can show hidden states."""

    features_stay: bool
    """Whether hidden states stay on the device: drafters that read them there are the only ones that are shown any."""

    def new_features(self, shape: tuple[int, int, int]) -> Array:
        """Room for hidden states [rows, layers, hidden] in fp32, where they are to lie."""

    def launch_showing(self, rows: Rows, dice: Sequence[Dice | None], shown: FeatureBuffer) -> Launched:
        """As `launch`; `shown` lies in `new_features`.

        On the host it is full when the pass has landed: its words or logits are there. On a device it is full for
        whoever launches after this.
        """


class Compute(Protocol):
    """A decoder's pass over one cache."""

    def __call__(self, rows: Any, shown: FeatureBuffer | None = None, /) -> Array:
        """From placed rows to logits on the device; hidden states are copied if a buffer is given."""


class Kernels(Protocol):
    """Row-invariant arithmetic on one device."""

    page_tokens: int
    feature_multiple: int
    head_dim_multiple: int
    tails_alone: bool
    """Whether rows with tails are best read one by one: see kernels/rows.py"""
    rows_per_step: int
    """Rows of a pass, prompts and all, up to which each further one is cheaper, and which nobody minds waiting for"""
    sizes_apart: tuple[int, ...]
    """Numbers of rows that are computed in pieces of another size than few rows are: the self-test tries them"""
    number_bytes: int
    """Memory of one number of the cache"""
    output_weights: WeightType
    """How a target's output layer is held: as near to the model as the device can"""

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, weights: WeightType = "fp32") -> PackedLinear:
        """Pack a weight [outputs, inputs]."""

    def gated_linear(self, gate: Tensor, up: Tensor, *, weights: WeightType = "fp32") -> PackedLinear:
        """Pack gate and up, [intermediate, hidden] each, for `Pass.gate`."""

    def table(self, weight: Tensor) -> Array:
        """An embedding [vocabulary, hidden] where `Pass.embed` reads it."""

    def numbers(self, values: Tensor) -> Array:
        """Norms' weights and rotary angles, fp32, where the kernels read them."""

    def cache(self, *, num_layers: int, num_blocks: int, num_kv_heads: int, dim: int) -> Any:
        """Make room for keys and values."""

    def place(self, rows: Rows) -> Any:
        """Rows where the kernels read them; `logit_rows` are among them."""

    def start(self, rows: Any, cache: Any, shape: BodyShape) -> Pass:
        """Begin a pass over placed rows."""

    def logits(self, head: Any, hidden: Array, wanted: Array) -> Array:
        """The logits [N, vocabulary] of the rows of `hidden` that are wanted, by the packed output layer."""

    def passes(self, compute: Compute, cache: Any, *, vocab_size: int) -> Passes:
        """What runs passes."""

    def to_host(self, logits: Array) -> NDArray[np.float32]:
        """Logits as numpy's; waits for the device."""

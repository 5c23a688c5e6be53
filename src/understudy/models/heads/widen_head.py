"""A trained draft in a larger shape, beside its target that was widened: it guesses the same, at that shape's price.

The widened target's hidden states are the small one's, then zeros (models/widen.py). A draft keeps it so: its own
states are the small draft's, then zeros, and its norms, heads and feed-forward grow as the target's do. What has
nothing to do with the hidden size, the bias by the token before and the ids that it can guess, stays as it is.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from understudy.core.shapes import Shape
from understudy.models.config import ModelConfig
from understudy.models.heads.files import TrainedHead, make_head
from understudy.models.heads.spec import HeadSpec
from understudy.models.widen import WidePlaces, placed, wide_config, wide_matrix


def widen_head(trained: TrainedHead, config: ModelConfig, *, device: str = "cpu") -> TrainedHead:
    """Widen a draft to the configuration that its own target has after `models.widen.widen`.

    Its matrices are rounded to bf16, and held so on a GPU; on the CPU all is fp32. A configuration that its target
    cannot come to is refused.
    """
    spec = trained.spec
    shape = _shape_of(config)
    replace(spec, target=wide_config(spec.target, shape)).check_target(config)
    inner = -(-spec.intermediate_size * config.intermediate_size // spec.target.intermediate_size)
    wide = replace(spec, target=config, intermediate_size=max(spec.intermediate_size, inner))
    places = WidePlaces.of(spec.target, shape, device)
    with torch.device("meta"):
        head = make_head(wide)
    small = trained.head.state_dict()
    parameters = {
        name: _wide_parameter(name, tuple(empty.shape), small[name].to(device), spec, places)
        for name, empty in head.state_dict().items()
    }
    if device == "cpu":
        parameters = {name: tensor.float() for name, tensor in parameters.items()}
    head.load_state_dict(parameters, assign=True)
    head.requires_grad_(requires_grad=False)
    return replace(trained, spec=wide, head=head)


def _shape_of(config: ModelConfig) -> Shape:
    return Shape(
        name="wide",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _wide_parameter(name: str, size: tuple[int, ...], small: Tensor, spec: HeadSpec, places: WidePlaces) -> Tensor:
    """One parameter of the wide draft."""
    role = name.split(".")[-2] if "." in name else name
    hidden = places.hidden
    if role in ("markov_in", "markov_out") or name == "confidence_out.bias":
        return small
    if role == "mask_embeddings":
        return pad(small.float(), (0, size[1] - small.shape[1]))
    if role == "confidence_out":
        of_row = pad(small[:, : len(hidden)], (0, size[1] - small.shape[1]))
        return torch.cat([of_row, small[:, len(hidden) :]], dim=1)
    if name.endswith("bias"):
        return placed(torch.zeros(size, device=small.device), small, hidden)
    if len(size) == 1:  # a norm: the mean over more numbers is smaller
        return placed(torch.ones(size, device=small.device), small.float() * math.sqrt(len(hidden) / size[0]), hidden)
    return _wide_linear(name, role, size, small, spec=spec, places=places)


def _wide_linear(
    name: str, role: str, size: tuple[int, ...], small: Tensor, *, spec: HeadSpec, places: WidePlaces
) -> Tensor:
    """A linear layer: outputs and inputs of each role where the small draft's lie."""
    hidden, inner = places.hidden, torch.arange(spec.intermediate_size, device=small.device)
    if role in ("k", "v"):
        small = places.copied(small)
    rows = {"q": places.queries, "k": places.keys, "v": places.keys, "gate": inner, "up": inner}.get(role, hidden)
    if role in ("o", "down"):
        columns = places.queries if role == "o" else inner
    else:  # several states side by side: features of layers, or an embedding and a state
        num_states = small.shape[1] // len(hidden)
        stride = size[1] // num_states
        columns = torch.cat([place * stride + hidden for place in range(num_states)])
    reached = places.attended if role == "o" else columns
    noise = torch.Generator(small.device).manual_seed(zlib.crc32(name.encode()))
    return wide_matrix(small, size, rows=rows, columns=columns, reached=reached, noise=noise)

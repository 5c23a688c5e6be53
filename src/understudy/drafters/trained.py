"""A trained draft beside its target on the CPU: the drafter of its kind, with what its passes cost here."""

from __future__ import annotations

import time

import numpy as np

from understudy.control.cost import CostModel, profile
from understudy.core.request import SamplingParams
from understudy.core.weights import WeightType
from understudy.drafters.base import Context
from understudy.drafters.block import BlockDrafter
from understudy.drafters.eagle import EagleDrafter
from understudy.drafters.medusa import MedusaDrafter
from understudy.drafters.packed import Body
from understudy.drafters.seen import SeeingDrafter
from understudy.drafters.tree import Shape
from understudy.kernels.cpu import CpuKernels
from understudy.models.decoder import Decoder
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.files import TrainedHead
from understudy.models.heads.medusa import MedusaHead
from understudy.sampling.noise import NoiseKey

_TEXTS = (1, 2, 4, 8, 16, 32)
_LONG_CONTEXT = 512
_READ_ROWS = 64
_TRIALS = 8
_WORTH_WAITING = 1.1
"""So many times faster all threads must be than one, if they are to wait for each other. What is measured finds the
draft's weights in the processor's cache; beside a target's passes they come from memory, which threads share better."""


def make_trained_drafter(
    trained: TrainedHead,
    decoder: Decoder,
    *,
    shape: Shape,
    num_threads: int | None = None,
    weights: WeightType = "int8",
    cost: CostModel | None = None,
) -> SeeingDrafter:
    """Build the drafter of a trained head for a target on the CPU.

    It uses the target's threads unless their number is given. `weights` are those of its linear layers. Costs that are
    not given are measured, which takes some tenths of a second.
    """
    trained.spec.check_target(decoder.config)
    kernels = decoder.kernels if num_threads is None else CpuKernels(num_threads=num_threads)
    assert isinstance(kernels, CpuKernels), "this is the drafter for the CPU"
    body = Body(trained, decoder, kernels, weights=weights)
    drafter: SeeingDrafter
    if isinstance(trained.head, EagleHead):
        drafter = EagleDrafter(trained.head, body, shape=shape)
    elif isinstance(trained.head, MedusaHead):
        drafter = MedusaDrafter(trained.head, body, shape=shape)
    else:
        drafter = BlockDrafter(trained.head, body, shape=shape)
    if cost is None:
        _measure(drafter, body)
    else:
        drafter.cost = cost
    return drafter


def _measure(drafter: SeeingDrafter, body: Body) -> None:
    """Measure what its passes cost, and what reading does beside them."""
    most = body.config.max_positions - 32
    drafter.time_step(1, 0)  # the first pass pays for compiling and for touching memory
    drafter.time_step(8, 0)
    _choose_threads(drafter, body)
    cost = profile(drafter.time_step, long_context=max(1, min(_LONG_CONTEXT, most)), counts=_TEXTS)
    reading_s = _reading_s(drafter, body, num_rows=min(_READ_ROWS, most))
    row_s = (cost.rows_s[32] - cost.rows_s[1]) / 31
    drafter.reading_share = min(1.0, reading_s / row_s) if row_s > 0.0 else 1.0
    drafter.cost = cost


def _choose_threads(drafter: SeeingDrafter, body: Body) -> None:
    """Let one thread compute few rows, unless all of them together are faster.

    A small draft is dozens of linear layers of some microseconds each, before every one of which threads wait for each
    other. While another process has one of the cores, each of these waits takes as long as a whole draft should.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_TRIALS):
        for is_few_alone, measured in seconds.items():
            body.is_few_alone = is_few_alone
            measured.append(drafter.time_step(1, 0))
    body.is_few_alone = min(seconds[True]) < _WORTH_WAITING * min(seconds[False])


def _reading_s(drafter: SeeingDrafter, body: Body, *, num_rows: int) -> float:
    """Seconds that reading one row of many takes."""
    features = np.zeros((num_rows, len(drafter.feature_layers), body.config.hidden_size), np.float32)
    context = Context(-1, [0] * (num_rows + 1), 1, "", 0.0, NoiseKey(0), SamplingParams())
    fastest = np.inf
    for _ in range(3):
        drafter.see(context, 0, features)
        started = time.perf_counter()
        drafter.read(context)
        fastest = min(fastest, time.perf_counter() - started)
        drafter.stop(context, finished=False)
    return float(fastest) / num_rows

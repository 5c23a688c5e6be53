"""Puts a trained draft beside a target on a GPU (device_heads.py), and measures what it costs there."""

from __future__ import annotations

import time
from typing import Protocol, cast

from understudy.control.cost import CostModel, stepped
from understudy.drafters.device_heads import DeviceBlockDrafter, DeviceEagleDrafter, DeviceHeadDrafter, DraftFacts
from understudy.drafters.tree import Shape
from understudy.errors import ModelError
from understudy.kernels.cuda import CudaKernels
from understudy.kernels.cuda_blocks import BlockPasses, BlockWork
from understudy.kernels.cuda_rows import PAGE
from understudy.kv.pool import BlockPool
from understudy.models.decoder import Decoder
from understudy.models.heads.block import BlockHead
from understudy.models.heads.block_on_device import BlockOnDevice
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.eagle_on_device import EagleOnDevice
from understudy.models.heads.files import TrainedHead

_MOST_TOKENS = 1 << 18
"""Room of a draft's cache, in tokens of all texts: two gigabytes for two layers of an 8B shape."""
_LONG_CONTEXT = 1024
_REPEATS = 3


class HasBlocks(Protocol):
    """A runner, as far as a draft must know it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of its cache."""


def make_trained_drafter_on_device(
    trained: TrainedHead,
    target_runner: HasBlocks,
    target_decoder: Decoder,
    *,
    shape: Shape,
    cost: CostModel | None = None,
) -> DeviceHeadDrafter:
    """Put a trained draft beside a target on a device; `cost` is measured unless it is given.

    A `shape` with more than one child gives each guess a rival, and makes a block's drafts trees. Every feature layer
    must be shown by the runner.
    """
    spec, head = trained.spec, trained.head
    kernels = cast(CudaKernels, target_decoder.kernels)
    num_children = shape.num_children
    network: BlockOnDevice | EagleOnDevice
    drafter: type[DeviceHeadDrafter]
    if isinstance(head, BlockHead):
        network = BlockOnDevice(head, trained.vocabulary, target_decoder, num_children=num_children)
        drafter = DeviceBlockDrafter
    elif isinstance(head, EagleHead):
        network = EagleOnDevice(head, trained.vocabulary, target_decoder, num_children=num_children)
        drafter = DeviceEagleDrafter
    else:
        raise ModelError(f"A draft of kind {spec.kind} does not run on a GPU.", "Use one of kind block or eagle.")
    num_blocks = min(target_runner.num_blocks, -(-_MOST_TOKENS // kernels.page_tokens))
    cache = network.new_cache(num_blocks)
    passes = BlockPasses(
        lambda blocks: network.compute(blocks, cache),
        places=kernels.places,
        device=kernels.device,
        rows_each=network.num_tokens,
        tree=network.tree,
        feature_shape=(len(spec.feature_layers), spec.target.hidden_size),
        most_positions=spec.target.max_positions,
        scratch_slot=cache.scratch_slot,
        use_graphs=kernels.use_graphs,
        by_steps=network.by_steps,
    )
    facts = DraftFacts(
        feature_layers=spec.feature_layers,
        page_tokens=kernels.page_tokens,
        max_positions=min(spec.target.max_positions, target_decoder.config.max_positions),
        is_coupled=shape.is_coupled,
    )
    cost = cost or measure_blocks(passes, num_blocks=num_blocks, scratch_slot=cache.scratch_slot)
    return drafter(passes, BlockPool(num_blocks), facts, cost=cost)


def measure_blocks(passes: BlockPasses, *, num_blocks: int, scratch_slot: int) -> CostModel:
    """Measure what a guess costs, by texts: a pass costs the same however many of its guesses are looked at.

    Costs are those of one guess, since whoever plans multiplies them by the depth of a draft.
    """

    def seconds(num_texts: int, context: int) -> float:
        context = min(context, num_blocks * PAGE)
        work = BlockWork(
            context_positions=[0] * 2,
            context_slots=[scratch_slot] * 2,
            context_tokens=[0] * 2,
            blocks=[0] * -(-context // PAGE),
            row_slots=[scratch_slot] * passes.rows_each,
            row_positions=[1] * passes.rows_each,
            row_keys=[context] * passes.rows_each,
            position=1,
        )
        shown = passes.features[: 2 * num_texts].clone()
        times = []
        for _ in range(_REPEATS):  # the first one is captured
            started = time.perf_counter()
            passes.launch([work] * num_texts, [shown]).wait()
            times.append(time.perf_counter() - started)
        return min(times) / passes.rows_each

    counts = [1 << power for power in range(passes.most_texts.bit_length())]
    table = {count: seconds(count, 256) for count in counts}
    per_key_s = max(0.0, seconds(1, _LONG_CONTEXT) - table[1]) / _LONG_CONTEXT
    return stepped(CostModel(table, per_key_s))

"""An eagle draft on a GPU, out of the target's own kernels: what `EagleHead` computes, all its steps in one launch.

    context    true rows: fused features of new positions, embeddings of the tokens after them -> keys and values
    step 0     the last true row of each text attends; its state gives guess 0
    step k     a row behind it, fed the state before and the embedding of guess k - 1; its state gives guess k

A layer's keys and values hang on its input alone, so of the true rows only the last needs its attention. Drafted rows
are overwritten by true ones in the next pass. `EagleHead` is the definition: tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from understudy.core.static_tree import static_tree
from understudy.kernels import cuda_ops, cuda_sample
from understudy.kernels.cuda import CudaCache, CudaKernels
from understudy.kernels.cuda_blocks import MOST_TEXTS, PlacedBlocks
from understudy.kernels.cuda_rows import PlacedRows
from understudy.models.decoder import Decoder
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.parts_on_device import HeadParts, summed


class EagleOnDevice:
    """A trained eagle beside its target, whose embedding, output layer and rotary tables it uses."""

    by_steps = True

    def __init__(self, head: EagleHead, vocabulary: DraftVocabulary, decoder: Decoder, *, num_children: int) -> None:
        kernels = cast(CudaKernels, decoder.kernels)
        head.requires_grad_(requires_grad=False)
        self.num_tokens = head.spec.num_tokens
        # a further node at a depth would be a further row: one is expanded
        self.tree = static_tree(self.num_tokens, num_children=num_children, is_wide=False)
        self._parts = parts = HeadParts(kernels, head.spec.target)
        self._embedding: Tensor = decoder.embedding
        self._rotary = decoder.rotary
        self._fusion = parts.fusion(head.fusion)
        self._embedding_norm = kernels.numbers(head.embedding_norm.weight)
        norms = head.state_norm.weight, head.feed_forward_norm.weight
        self._layer = parts.layer(head.attention, head.feed_forward, norms)
        self._output_norm = kernels.numbers(head.output_norm.weight)
        self._output = parts.output(decoder, vocabulary)
        self._ids = vocabulary.ids.to(kernels.device, torch.int32)
        self._scratch = cuda_sample.DrawScratch.new(MOST_TEXTS, num_sayable=len(vocabulary), device=kernels.device)
        self._numbers = torch.arange(MOST_TEXTS + 1, dtype=torch.int32, device=kernels.device)

    @property
    def num_bytes(self) -> int:
        """What a pass reads of the weights: the layer and the output layer again for every guess."""
        once = self._fusion.linear.num_bytes
        return once + self.num_tokens * (self._layer.num_bytes + self._output.num_bytes)

    def new_cache(self, num_blocks: int) -> CudaCache:
        """Make room for keys and values."""
        return self._parts.new_cache(num_blocks, num_layers=1)

    def compute(self, blocks: PlacedBlocks, cache: CudaCache) -> None:
        """A pass. Nothing here waits for the GPU, so a graph can hold all of it."""
        size = blocks.size
        words, sureness, rivals = (line[: size.rows].view(size.rows_each, size.texts) for line in blocks.drawn)
        fused = summed(self._fusion(blocks.features))  # [context, hidden] fp32
        context = _part(blocks.rows, size.rows, size.rows + size.context)
        joined = self._joined(blocks.context_tokens, fused, context)
        last = blocks.last_rows.long()
        queries = self._parts.store(self._layer, joined, context, cache, 0, self._rotary)[last]
        state = fused[last]  # what rows are fed, [texts, hidden]
        for step in range(size.rows_each):
            rows = replace(
                _part(blocks.rows, step * size.texts, (step + 1) * size.texts),
                group_starts=self._numbers[: size.texts + 1],
                group_tables=self._numbers[: size.texts],
            )
            if step > 0:
                joined = self._joined(words[step - 1], state, rows)
                queries = self._parts.store(self._layer, joined, rows, cache, 0, self._rotary)
            hidden = self._finished(state, self._parts.attend(queries, rows, cache, 0))
            cuda_sample.draw(
                summed(self._output(hidden)),
                blocks.how.part(step * size.texts, (step + 1) * size.texts),
                words=words[step],
                sureness=sureness[step].view(torch.float32),
                rivals=rivals[step],
                scratch=self._scratch,
                ids=self._ids,
                is_greedy=not size.draws,
            )

    def _joined(self, tokens: Tensor, state: Tensor, rows: PlacedRows) -> Tensor:
        """What the layer reads: [norm of the embeddings ; norm of the states], [rows, 2 * hidden]."""
        taken = cuda_ops.take_rows(self._embedding, tokens, dtype=torch.float32, words=rows.words)
        embedded = self._parts.normed(taken, None, self._embedding_norm)
        return torch.cat([embedded, self._parts.normed(state, None, self._layer.attention_norm)], dim=1)

    def _finished(self, state: Tensor, attended: Tensor) -> Tensor:
        """Bring the states [texts, hidden] through the layer; returns what the output layer wants."""
        normed = self._parts.normed(state, self._layer.out(attended), self._layer.feed_forward_norm)
        return self._parts.normed(state, self._layer.feed_forward(normed), self._output_norm)


def _part(rows: PlacedRows, first: int, last: int) -> PlacedRows:
    """Some of the rows: where they stand, and what they see if they are rows that guess."""
    return replace(
        rows,
        positions=rows.positions[first:last],
        slots=rows.slots[first:last],
        prefix_lens=rows.prefix_lens[first:last],
    )

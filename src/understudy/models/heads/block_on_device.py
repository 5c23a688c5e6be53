"""A block draft on a GPU, out of the target's own kernels: what `BlockHead` computes, without recomputing its context.

Layers of a block are layers of a decoder whose rows see each other, so they are computed as the target's are: few
launches, weights read once. Keys and values of the context are written to pages when its hidden states come in. The
weights that make them also make those of the rows, so both go through one product:

    context    fused features of new positions, c          -> keys and values of every layer, kept
    rows       N for each text, x                          -> queries, keys and values, behind the context
    walk       depth k, all nodes expanded there: logits of row k + bias of the token before, drawn as the target draws

`BlockHead` is the definition: tests hold the two against each other.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from understudy.core.static_tree import static_tree
from understudy.kernels import cuda_ops, cuda_sample
from understudy.kernels.cuda import CudaCache, CudaKernels
from understudy.kernels.cuda_blocks import MOST_TEXTS, PlacedBlocks
from understudy.kernels.cuda_markov import Markov
from understudy.models.decoder import Decoder
from understudy.models.heads.block import BlockHead, BlockLayer
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.parts_on_device import HeadLayer, HeadParts, summed


class BlockOnDevice:
    """A trained block beside its target, whose embedding, output layer and rotary tables it uses."""

    by_steps = False

    def __init__(self, head: BlockHead, vocabulary: DraftVocabulary, decoder: Decoder, *, num_children: int) -> None:
        kernels = cast(CudaKernels, decoder.kernels)
        head.requires_grad_(requires_grad=False)
        spec = head.spec
        self.num_tokens = spec.num_tokens
        self.tree = static_tree(spec.num_tokens, num_children=num_children)
        self._spec = spec
        self._parts = parts = HeadParts(kernels, spec.target)
        self._embedding: Tensor = decoder.embedding
        self._rotary = decoder.rotary
        self._fusion = parts.fusion(head.fusion)
        self._context_norm = kernels.numbers(head.context_norm.weight)
        self._masks = kernels.numbers(head.mask_embeddings)
        self._layers = [self._layer(cast(BlockLayer, layer)) for layer in head.layers]
        self._output_norm = kernels.numbers(head.output_norm.weight)
        self._output = parts.output(decoder, vocabulary)
        self._ids = vocabulary.ids.to(kernels.device, torch.int32)
        self._markov = _markov(head, vocabulary, kernels)
        self._steps = torch.tensor(self.tree.depths, dtype=torch.int32, device=kernels.device)
        most_lines = MOST_TEXTS * self.tree.width
        self._scratch = cuda_sample.DrawScratch.new(most_lines, num_sayable=len(vocabulary), device=kernels.device)

    @property
    def num_bytes(self) -> int:
        """What every pass reads of the weights."""
        around = self._fusion.linear.num_bytes + self._output.num_bytes + self._markov.out.nbytes
        return around + sum(layer.num_bytes for layer in self._layers)

    def new_cache(self, num_blocks: int) -> CudaCache:
        """Make room for keys and values of the context, and of the rows that guess."""
        return self._parts.new_cache(num_blocks, num_layers=self._spec.num_layers)

    def compute(self, blocks: PlacedBlocks, cache: CudaCache) -> None:
        """A pass. Nothing here waits for the GPU, so a graph can hold all of it."""
        hidden = self._rows(blocks, cache)  # [texts * N, hidden]
        logits = summed(self._output(hidden))
        shape = blocks.size.texts, blocks.size.rows_each, -1
        self._walk(blocks, logits.view(shape), hidden.view(shape))

    def _rows(self, blocks: PlacedBlocks, cache: CudaCache) -> Tensor:
        rows, size, parts = blocks.rows, blocks.size, self._parts
        fused = self._fusion(blocks.features)
        nothing = torch.zeros(fused.shape[1:], dtype=torch.float32, device=fused.device)
        context = parts.normed(nothing, fused, self._context_norm)
        x = self._masks.repeat(size.texts, 1)
        taken = cuda_ops.take_rows(self._embedding, blocks.tokens, dtype=torch.float32, words=rows.words)
        x.view(size.texts, size.rows_each, -1)[:, 0] += taken
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            joined = torch.cat([parts.normed(x, delta, layer.attention_norm), context])
            queries = parts.store(layer, joined, rows, cache, index, self._rotary)
            delta = layer.out(parts.attend(queries[: size.rows], rows, cache, index))
            delta = layer.feed_forward(parts.normed(x, delta, layer.feed_forward_norm))
        return parts.normed(x, delta, self._output_norm)

    def _walk(self, blocks: PlacedBlocks, logits: Tensor, hidden: Tensor) -> None:
        """Depth after depth: each guess from the row of its depth and the guess that it follows."""
        size, before, placed = blocks.size, blocks.before, blocks.rows.words
        words, sureness, rivals = blocks.drawn[:, : size.lines]
        sureness = sureness.view(torch.float32)
        for step, level in enumerate(self.tree.levels):
            first, last = level.start * size.texts, level.stop * size.texts
            cuda_sample.draw(
                self._markov.biased(logits, step, before[first:last], words=placed),
                blocks.how.part(first, last),
                words=words[first:last],
                sureness=sureness[first:last],
                rivals=rivals[first:last],
                scratch=self._scratch,
                ids=self._ids,
                is_greedy=not size.draws,
            )
        self._markov.judge(hidden, self._steps, before, sureness, words=placed)

    def _layer(self, layer: BlockLayer) -> HeadLayer:
        norms = layer.attention_norm.weight, layer.feed_forward_norm.weight
        return self._parts.layer(layer.attention, layer.feed_forward, norms)


def _markov(head: BlockHead, vocabulary: DraftVocabulary, kernels: CudaKernels) -> Markov:
    hidden_size = head.spec.target.hidden_size
    sure = head.confidence_out.weight[0]
    return Markov(
        lines=kernels.table(head.markov_in.weight.detach()),
        out=kernels.table(head.markov_out.weight.detach()),
        places=vocabulary.places.to(kernels.device, torch.int32),
        sure_hidden=kernels.numbers(sure[:hidden_size]),
        sure_line=kernels.numbers(sure[hidden_size:]),
        sure_bias=kernels.numbers(head.confidence_out.bias),
    )

"""A block draft on a GPU, out of the target's own kernels: what `BlockHead` computes, without recomputing its context.

Layers of a block are layers of a decoder whose rows see each other, so they are computed as the target's are: few
launches, weights read once. Keys and values of the context are written to pages when its hidden states come in. The
weights that make them also make those of the rows, so both go through one product:

    context    fused features of new positions, c          -> keys and values of every layer, kept
    rows       N for each text, x                          -> queries, keys and values, behind the context
    walk       guess k: logits of row k + bias of the token before, drawn as the target draws

`BlockHead` is the definition: tests hold the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from understudy.kernels import cuda_attention, cuda_ops, cuda_sample
from understudy.kernels.cuda import CudaCache, CudaKernels
from understudy.kernels.cuda_blocks import MOST_TEXTS, PlacedBlocks
from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kernels.cuda_markov import Markov
from understudy.models.decoder import Decoder
from understudy.models.heads.block import BlockHead, BlockLayer
from understudy.models.heads.draft_vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    out: Linear
    feed_forward_norm: Tensor
    gate_up: GatedLinear
    down: Linear

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (self.qkv, self.out, self.gate_up, self.down))


class BlockOnDevice:
    """A trained block beside its target, whose embedding, output layer and rotary tables it uses."""

    def __init__(self, head: BlockHead, vocabulary: DraftVocabulary, decoder: Decoder) -> None:
        kernels = cast(CudaKernels, decoder.kernels)
        head.requires_grad_(requires_grad=False)
        spec = head.spec
        self.num_tokens = spec.num_tokens
        self._spec = spec
        self._eps = spec.target.rms_norm_eps
        self._kernels = kernels
        self._embedding: Tensor = decoder.embedding
        self._cos, self._sin = decoder.rotary
        self._ones = kernels.numbers(torch.ones(spec.target.hidden_size))
        self._fusion = self._packed(_fusion_weight(head))
        self._context_norm = kernels.numbers(head.context_norm.weight)
        self._masks = kernels.numbers(head.mask_embeddings)
        self._layers = [self._layer(cast(BlockLayer, layer)) for layer in head.layers]
        self._output_norm = kernels.numbers(head.output_norm.weight)
        output = cast(Linear, decoder.output)
        ids = vocabulary.ids.to(kernels.device)
        self._output = self._packed(output.weight[ids, : output.num_inputs])
        self._ids = ids.to(torch.int32)
        self._markov = _markov(head, vocabulary, kernels)
        self._scratch = cuda_sample.DrawScratch.new(MOST_TEXTS, num_sayable=len(ids), device=kernels.device)

    @property
    def num_bytes(self) -> int:
        """What every pass reads of the weights."""
        around = self._fusion.num_bytes + self._output.num_bytes + self._markov.out.nbytes
        return around + sum(layer.num_bytes for layer in self._layers)

    def new_cache(self, num_blocks: int) -> CudaCache:
        """Make room for keys and values of the context, and of the rows that guess."""
        target = self._spec.target
        return self._kernels.cache(
            num_layers=self._spec.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=target.num_kv_heads,
            dim=target.head_dim,
        )

    def compute(self, blocks: PlacedBlocks, cache: CudaCache) -> None:
        """A pass. Nothing here waits for the GPU, so a graph can hold all of it."""
        hidden = self._rows(blocks, cache)  # [texts * N, hidden]
        parts = self._output(hidden)
        logits = parts[0] if parts.shape[0] == 1 else parts.sum(0)
        shape = blocks.size.texts, blocks.size.rows_each, -1
        self._walk(blocks, logits.view(shape), hidden.view(shape))

    def _rows(self, blocks: PlacedBlocks, cache: CudaCache) -> Tensor:
        rows, size, target = blocks.rows, blocks.size, self._spec.target
        context = self._context(blocks.features)
        x = self._masks.repeat(size.texts, 1)
        taken = cuda_ops.take_rows(self._embedding, blocks.tokens, dtype=torch.float32, words=rows.words)
        x.view(size.texts, size.rows_each, -1)[:, 0] += taken
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = self._normed(x, delta, layer.attention_norm)
            keys, values = cache.keys[index], cache.values[index]
            queries = cuda_ops.rotate_and_store(
                layer.qkv(torch.cat([normed, context])), rows, self._cos, self._sin, keys, values,
                num_heads=target.num_heads, head_norms=None, eps=self._eps,
            )  # fmt: skip
            attended = cuda_attention.attend(
                queries[: size.rows], keys, values, rows, counters=self._kernels.counters
            )  # fmt: skip
            delta = layer.out(attended.flatten(1))
            delta = layer.down(layer.gate_up(self._normed(x, delta, layer.feed_forward_norm)))
        return self._normed(x, delta, self._output_norm)

    def _context(self, features: Tensor) -> Tensor:
        """Features [rows, layers, hidden] -> what layers make keys and values of, [rows, hidden]."""
        num_rows, num_layers, num_features = features.shape
        normed = self._normed(features.view(-1, num_features), None, self._ones)
        parts = self._fusion(normed.view(num_rows, num_layers * num_features))
        nothing = torch.zeros((num_rows, num_features), dtype=torch.float32, device=features.device)
        return self._normed(nothing, parts, self._context_norm)

    def _walk(self, blocks: PlacedBlocks, logits: Tensor, hidden: Tensor) -> None:
        """Guess after guess: each from its row and the one before."""
        size, how = blocks.size, blocks.how
        words, sureness, rivals = (line[: size.rows].view(size.rows_each, size.texts) for line in blocks.drawn)
        before = blocks.tokens
        for step in range(size.rows_each):
            cuda_sample.draw(
                self._markov.biased(logits, step, before, words=blocks.rows.words),
                how.part(step * size.texts, (step + 1) * size.texts),
                words=words[step],
                sureness=sureness[step].view(torch.float32),
                rivals=rivals[step],
                scratch=self._scratch,
                ids=self._ids,
            )
            before = words[step]
        self._markov.judge(
            hidden, blocks.tokens, words.view(-1), sureness.view(-1).view(torch.float32), words=blocks.rows.words
        )

    def _normed(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """x += delta; returns its norm."""
        return cuda_ops.add_rms_norm(x, delta, weight, self._eps, dtype=self._kernels.dtype)

    def _packed(self, weight: Tensor) -> Linear:
        return self._kernels.linear(weight.detach(), weights=self._kernels.output_weights)

    def _layer(self, layer: BlockLayer) -> _Layer:
        attention, feed_forward, numbers = layer.attention, layer.feed_forward, self._kernels.numbers
        gate, up = feed_forward.gate.weight.detach(), feed_forward.up.weight.detach()
        return _Layer(
            attention_norm=numbers(layer.attention_norm.weight),
            qkv=self._packed(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])),
            out=self._packed(attention.o.weight),
            feed_forward_norm=numbers(layer.feed_forward_norm.weight),
            gate_up=self._kernels.gated_linear(gate, up, weights=self._kernels.output_weights),
            down=self._packed(feed_forward.down.weight),
        )


def _fusion_weight(head: BlockHead) -> Tensor:
    """The fusing matrix with the features' norms in its columns."""
    weights = torch.cat([cast(Tensor, norm.weight) for norm in head.fusion.norms])
    return head.fusion.linear.weight.float() * weights.float()


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

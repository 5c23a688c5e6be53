"""A model's forward pass on a GPU: how near its logits are to the CPU's, and whether rows are the same bits everywhere.

    PYTHONPATH=src python benchmarks/gpu_exact.py [MODEL]

MODEL is a folder or a GGUF file, the embedded model if none is given. The text is this file's. Every comparison is of
all logits of the rows concerned, and is for equality. The exit code is 1 if one fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cuda import CudaKernels
from understudy.kernels.cuda_attention import SPAN
from understudy.kernels.interface import Kernels
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.decoder import Decoder
from understudy.models.load import load_model
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Floats, Runner

PAGE = CudaKernels.page_tokens
NUM_TOKENS = 3 * SPAN + 20
NUM_BLOCKS = 40 * (-(-NUM_TOKENS // PAGE) + 1)
NUM_STREAMS = 32


class Texts:
    """Sequences of one decoder that are read in pieces, side by side."""

    def __init__(self, decoder: Decoder, count: int = 1) -> None:
        self.runner = Runner(decoder, num_blocks=NUM_BLOCKS, page_tokens=PAGE)
        pool = BlockPool(NUM_BLOCKS)
        self.caches = [SequenceCache(pool, PAGE, None, "") for _ in range(count)]

    def read(self, *pieces: list[int], draft: Draft = EMPTY) -> list[Floats]:
        """The logits of each sequence's next tokens and of a draft behind them; the tokens are committed."""
        works = []
        for cache, tokens in zip(self.caches, pieces, strict=True):
            cache.reserve(len(tokens) + len(draft))
            works.append(Work(cache, tokens, draft, wants_logits=True, scored=range(len(tokens) - 1)))
        found = self.runner.forward(works)
        for cache, tokens in zip(self.caches, pieces, strict=True):
            cache.commit(len(tokens), [])
        return found


def build(kernels: Kernels, model: str | None, *, rounded: bool = False) -> tuple[Decoder, list[int]]:
    """The model on some kernels, its weights as they are or rounded to bf16, and the text in its tokens."""
    loaded = load_model(model)
    if rounded:
        loaded.tensors.update({name: tensor.bfloat16().float() for name, tensor in loaded.tensors.items()})
    text = loaded.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    return Decoder(loaded.config, loaded.tensors, kernels, weights=kernels.output_weights), list(text)[:NUM_TOKENS]


def in_chunks(decoder: Decoder, text: list[int], size: int) -> Floats:
    """The text read in pieces of one size."""
    texts = Texts(decoder)
    return np.concatenate([texts.read(text[first : first + size])[0] for first in range(0, len(text), size)])


def in_a_tree(decoder: Decoder, text: list[int], known: int) -> Floats:
    """Some of the text, then five more tokens as the nodes of a tree, each between two decoys."""
    tokens, parents, places = [], [], []
    for token in text[known : known + 5]:
        parent = places[-1] if places else ROOT
        tokens += [token + 1, token, token + 2]
        parents += [parent] * 3
        places.append(len(tokens) - 2)
    tree = Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens), ("decoys",) * len(tokens))
    (found,) = Texts(decoder).read(text[:known], draft=tree)
    return found[[*range(known), *(known + place for place in places)]]


def after_a_prefix(decoder: Decoder, text: list[int], known: int) -> Floats:
    """The rest of the text behind a prefix whose keys are in the cache from before, among other texts."""
    texts = Texts(decoder, 5)
    texts.read(text, *(text[skip:] for skip in range(1, 5)))
    texts.caches[0].length = known
    return texts.read(text[known:], *([token] for token in text[:4]))[0]


def beside_others(decoder: Decoder, text: list[int]) -> Floats:
    """The last 30 tokens one by one, beside 31 other texts of other lengths."""
    texts = Texts(decoder, NUM_STREAMS)
    texts.read(text[:-30], *(text[: 10 * stream] for stream in range(1, NUM_STREAMS)))
    steps = [texts.read([token], *([token + 1] for _ in range(1, NUM_STREAMS)))[0] for token in text[-30:]]
    return np.concatenate(steps)


def main() -> int:
    """Compare, print, and return the exit code."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    console = Console(width=160, highlight=False)
    decoder, text = build(CudaKernels(), model)
    whole = Texts(decoder).read(text)[0]
    for name, rounded in (("fp32 weights", False), ("the same bf16 weights", True)):
        expected = Texts(build(CpuKernels(), model, rounded=rounded)[0]).read(text)[0]
        worst, spread = np.abs(whole - expected).max(), np.sqrt(np.mean((whole - expected) ** 2))
        agreeing = (whole.argmax(1) == expected.argmax(1)).sum()
        console.print(f"Against the CPU with {name}: largest difference {worst:.3f}, root mean square {spread:.4f},")
        console.print(f"  of logits up to {np.abs(expected).max():.1f}; {agreeing} of {len(text)} best words agree")
    checks = {
        **{f"chunks of {size}": (in_chunks(decoder, text, size), whole) for size in (1, 5, 16, 37, 64, 128, 256)},
        **{
            f"a tree behind {known} tokens": (in_a_tree(decoder, text, known), whole[: known + 5])
            for known in (3, SPAN - 2, 2 * SPAN + 50)
        },
        **{
            f"behind a cached prefix of {known}": (after_a_prefix(decoder, text, known), whole[known:])
            for known in (PAGE, 5 * PAGE, 12 * PAGE)
        },
        f"beside {NUM_STREAMS - 1} other streams": (beside_others(decoder, text), whole[-30:]),
    }
    for name, (found, expected) in checks.items():
        console.print(f"{name}: {'equal' if np.array_equal(found, expected) else 'NOT EQUAL'}, {len(found)} rows")
    torch.cuda.synchronize()
    return 0 if all(np.array_equal(found, expected) for found, expected in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

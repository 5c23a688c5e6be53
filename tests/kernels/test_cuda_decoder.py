"""A whole forward pass on the GPU's kernels: close to the CPU's, and equal bits however its rows come together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, needs_gpu
from tests.tiny_models import TinyArchitecture, tiny_config, tiny_tensors
from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.errors import ModelError
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.cuda import CudaKernels
from understudy.kernels.cuda_attention import SPAN
from understudy.kernels.interface import NORMED, FeatureBuffer
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work, build_rows
from understudy.runtime.runner import Floats, Runner
from understudy.runtime.selftest import is_row_invariant

NUM_LAYERS = 2 if ON_GPU else 1


def new_kernels() -> CudaKernels:
    return CudaKernels(device=DEVICE.type, dtype=DTYPE)


def decoders(architecture: TinyArchitecture) -> tuple[Decoder, Decoder]:
    """The same tiny model on the CPU's kernels and on the GPU's."""
    config = tiny_config(architecture, num_hidden_layers=NUM_LAYERS)
    parsed = ModelConfig.from_hugging_face(config, None)
    on_cpu = Decoder(parsed, tiny_tensors(config), CpuKernels(num_threads=1))
    return on_cpu, Decoder(parsed, tiny_tensors(config), new_kernels(), weights=new_kernels().output_weights)


class Reader:
    """One text of one decoder, read in pieces."""

    def __init__(self, decoder: Decoder, num_blocks: int = 16) -> None:
        self.runner = Runner(decoder, num_blocks=num_blocks, page_tokens=CudaKernels.page_tokens)
        self.cache = SequenceCache(BlockPool(num_blocks), CudaKernels.page_tokens, None, "")

    def read(self, tokens: list[int], draft: Draft = EMPTY) -> Floats:
        """The logits of all these tokens and of a draft behind them; the tokens are committed."""
        self.cache.reserve(len(tokens) + len(draft))
        work = Work(self.cache, tokens, draft, wants_logits=True, scored=range(len(tokens) - 1))
        (logits,) = self.runner.forward([work])
        self.cache.commit(len(tokens), [])
        return logits


def text_of(length: int, vocab_size: int = 304) -> list[int]:
    return [(7 + 31 * place) % vocab_size for place in range(length)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_close_to_the_cpu_and_row_invariant(architecture: TinyArchitecture) -> None:
    on_cpu, on_gpu = decoders(architecture)
    text = text_of(20)
    expected, found = (Reader(decoder).read(text) for decoder in (on_cpu, on_gpu))
    assert np.abs(found - expected).max() < (0.05 if ON_GPU else 0.01) * np.abs(expected).max()
    assert is_row_invariant(on_gpu, CudaKernels.page_tokens)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_chunks_trees_and_prefixes_of_a_text_beyond_a_span(architecture: TinyArchitecture) -> None:
    _, decoder = decoders(architecture)
    text = text_of(SPAN + 90)
    whole = Reader(decoder).read(text)
    for size in (1, 7, 37, 64, 256):
        reader = Reader(decoder)
        pieces = [reader.read(text[first : first + size]) for first in range(0, len(text), size)]
        assert np.array_equal(np.concatenate(pieces), whole), f"chunks of {size}"
    for known in (5, SPAN - 2, SPAN + 40):
        tokens, parents, places = [], [], []
        for token in text[known : known + 6]:
            parent = places[-1] if places else ROOT
            tokens += [token + 1, token, token + 2]
            parents += [parent] * 3
            places.append(len(tokens) - 2)
        tree = Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens), ("test",) * len(tokens))
        found = Reader(decoder).read(text[:known], tree)
        assert np.array_equal(found[:known], whole[:known])
        assert np.array_equal(found[[known + place for place in places]], whole[known : known + 6])


@pytest.mark.gpu
@needs_gpu
def test_moved_slots_are_read_as_if_they_were_written_there() -> None:
    _, decoder = decoders("llama")
    text = text_of(60)
    reader = Reader(decoder)
    whole = reader.read(text)
    slots = [block * 32 + offset for block in reader.cache.blocks for offset in range(32)]
    away = range(10 * 32, 10 * 32 + 20)
    reader.runner.move(slots[40:60], list(away))
    reader.runner.cache.keys[:, reader.cache.blocks[1], :, 8:] = torch.nan
    reader.runner.move(list(away), slots[40:60])
    reader.cache.length = 59
    assert np.array_equal(reader.read(text[59:]), whole[59:])


def test_no_logits_are_no_work() -> None:
    _, decoder = decoders("llama")
    runner = Runner(decoder, num_blocks=2, page_tokens=32)
    cache = SequenceCache(BlockPool(2), 32, None, "")
    cache.reserve(3)
    (logits,) = runner.forward([Work(cache, [1, 2, 3], EMPTY, wants_logits=False)])
    assert logits.shape == (0, 304)


def test_what_a_gpu_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="power of two"):
        new_kernels().cache(num_layers=1, num_blocks=1, num_kv_heads=1, dim=48)


def test_hidden_states_are_close_to_the_cpu_s() -> None:
    """A pass can take them on the device, where they stay."""
    layers, text = (0, NUM_LAYERS, NORMED), text_of(5)
    shape = (len(text), len(layers), 64)
    on_cpu, on_gpu = decoders("llama")
    expected, taken = np.zeros(shape, np.float32), torch.zeros(shape, device=DEVICE)
    for decoder, into in ((on_cpu, expected), (on_gpu, taken)):
        reader = Reader(decoder)
        reader.cache.reserve(len(text))
        rows = build_rows([Work(reader.cache, text, EMPTY, wants_logits=True)], heads_per_kv_head=2)
        decoder.compute(decoder.kernels.place(rows), reader.runner.cache, FeatureBuffer(layers, into))
    difference = np.abs(taken.cpu().numpy() - expected)
    assert expected.any(axis=(0, 2)).all()
    assert difference.max() < (0.05 if ON_GPU else 0.01) * np.abs(expected).max()
    assert [Reader(decoder).runner.features_stay for decoder in (on_cpu, on_gpu)] == [False, True]

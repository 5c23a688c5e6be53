"""A decoder in fp32 and in int8: memory, closeness, and rows that do not depend on their neighbours, in any shape."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.tiny_models import tiny_config, tiny_tensors
from understudy.core.draft import Draft
from understudy.core.weights import WeightType
from understudy.kernels.cpu import CpuKernels
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner
from understudy.runtime.selftest import is_row_invariant

PAGE = CpuKernels.page_tokens
Architecture = Literal["llama", "qwen2"]

SHAPES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False},
    {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1},
    {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 301},
]


def built(
    architecture: Architecture, shape: dict[str, Any], weights: WeightType, *, int8_output: bool = False
) -> tuple[Decoder, dict[str, torch.Tensor]]:
    config = tiny_config(architecture, **shape)
    tensors = tiny_tensors(config)
    kernels = CpuKernels(num_threads=1)
    decoder = Decoder(
        ModelConfig.from_hugging_face(config, None), tensors, kernels, weights=weights, int8_output=int8_output
    )
    return decoder, tensors


def logits(decoder: Decoder) -> NDArray[np.float32]:
    """What it says after each of 20 tokens."""
    cache = SequenceCache(BlockPool(2), PAGE, None, "")
    draft = Draft.chain(list(range(30, 49)), confidence=[1.0] * 19, source="test")
    cache.reserve(20)
    runner = Runner(decoder, num_blocks=2, page_tokens=PAGE)
    return runner.forward([Work(cache, [29], draft, wants_logits=True)])[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("int8_output", [False, True])
def test_int8_is_row_invariant_and_close(architecture: Architecture, shape: dict[str, Any], int8_output: bool) -> None:
    decoder, _ = built(architecture, shape, "int8", int8_output=int8_output)
    assert is_row_invariant(decoder, PAGE)
    wanted, found = logits(built(architecture, shape, "fp32")[0]), logits(decoder)
    assert not np.array_equal(found, wanted)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.05 * np.std(wanted)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_packing_lets_go_of_what_it_was_given(shape: dict[str, Any], weights: WeightType) -> None:
    assert built("qwen2", shape, weights)[1] == {}


def test_memory_is_that_of_the_packed_weights() -> None:
    """Tiny llama: hidden 64, 2 layers, 304 words, tied; 16 outputs and 32 inputs divide everything."""
    body = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128)
    norms = 5 * 64 * 4
    outputs = 2 * (64 + 32 + 32 + 64 + 2 * 128 + 64)
    embedding, head_bias = 304 * 64 * 4, 304 * 4
    fp32 = built("llama", {}, "fp32")[0]
    assert fp32.num_bytes == 4 * body + 4 * outputs + norms + 2 * embedding + head_bias
    int8 = built("llama", {}, "int8")[0]
    assert int8.num_bytes == body + 8 * outputs + norms + 2 * embedding + head_bias
    drafting = built("llama", {}, "int8", int8_output=True)[0]
    assert drafting.num_bytes == body + 8 * outputs + norms + embedding + embedding // 4 + 2 * head_bias
    for decoder in (fp32, int8, drafting):
        assert decoder.pass_bytes == decoder.num_bytes - embedding, "an output layer that is tied is still read"

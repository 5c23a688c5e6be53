"""Our decoder against `transformers` on the same files: others' implementation of the same models.

All on one thread: what is compared does not depend on it, and test machines are busy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.tiny_models import VOCAB_SIZE, write_tiny_gguf, write_tiny_model
from understudy.assembly import Target, load_target
from understudy.cache import cache_folder
from understudy.core.draft import EMPTY
from understudy.core.request import SamplingParams
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.llm import LLM
from understudy.models.embedded import FORMAT, GGUF_SHA256, NAME
from understudy.runtime.inputs import Work, build_rows
from understudy.runtime.runner import Runner

Floats = NDArray[np.float32]

NUM_TOKENS = 100  # more than three pages of keys
CLOSE = 2e-4
"""Largest difference of two logits that may come from rounding, as a share of the spread of the logits."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # shorter than the text, so that the scaling matters
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
THETA = {"rope_type": "default", "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARNS = [
    YARN,
    {**YARN, "attention_factor": 0.7},
    {**YARN, "beta_fast": 12.0, "beta_slow": 0.3},
    {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.6},
    {**YARN, "truncate": False, "rope_theta": 500000.0},
    {**YARN, "factor": 1.0},
    {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 2.0},
]
HALF_WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 4, "max_window_layers": 2}
ALTERNATING = {**HALF_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class Case:
    """A configuration to write to disk."""

    architecture: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return " ".join([self.architecture, *(f"{key}={short(value)}" for key, value in self.settings.items())])


def short(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    rest = [f"{key}={setting}" for key, setting in value.items() if key not in YARN]
    return " ".join([str(value["rope_type"]), *rest])


NAMED_CASES = [
    Case("llama", {}),
    Case("llama", {"tie_word_embeddings": False}),
    Case("llama", {"rope_parameters": THETA}),
    Case("llama", {"rope_parameters": LLAMA3}),
    Case("llama", {"rope_parameters": LLAMA3, "head_dim": 64, "tie_word_embeddings": False}),
    Case("llama", {"rope_parameters": LINEAR}),
    Case("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    Case("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 48}),
    Case("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48}),
    Case("qwen2", {}),
    Case("qwen2", {"tie_word_embeddings": False, "rope_parameters": THETA}),
    Case("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 32}),
    Case("qwen2", HALF_WINDOWED),
    Case("qwen2", ALTERNATING),
    Case("mistral", {}),
    Case("mistral", {"sliding_window": 1}),
    Case("mistral", {"sliding_window": 17, "tie_word_embeddings": False}),
    Case("mistral", {"sliding_window": 32, "head_dim": 32, "rope_parameters": THETA}),
    Case("mistral", {"sliding_window": 33, "num_attention_heads": 6, "hidden_size": 96}),
    Case("qwen3", {}),
    Case("qwen3", {"head_dim": 64, "rms_norm_eps": 1e-3, "tie_word_embeddings": False}),
    Case("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "rope_parameters": YARN}),
    Case("qwen3", HALF_WINDOWED),
    Case("qwen3", ALTERNATING),
    *(Case("llama", {"rope_parameters": rope, "head_dim": 64}) for rope in YARNS),
]


def random_case(seed: int) -> Case:
    """Any shape that is supported, small."""
    choose = random.Random(seed)
    num_kv_heads, head_dim = choose.randint(1, 3), choose.choice([16, 32, 48, 64])
    num_heads = num_kv_heads * choose.randint(1, 4)
    return Case(
        choose.choice(["llama", "mistral", "qwen2", "qwen3"]),
        {
            **choose.choice([{}, {"sliding_window": choose.randint(1, 40)}]),
            "use_sliding_window": True,
            "max_window_layers": choose.randint(0, 4),
            "hidden_size": 16 * num_heads * choose.randint(1, 3),
            "num_hidden_layers": choose.randint(1, 4),
            "intermediate_size": choose.choice([64, 72, 200]),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": choose.random() < 0.5,
            "rms_norm_eps": choose.choice([1e-6, 1e-5]),
            "rope_parameters": choose.choice([THETA, LLAMA3, LINEAR, *YARNS]),
        },
    )


def can_be_gguf(case: Case) -> bool:
    """Whether a GGUF file can say it: no windows in some layers, no scaling by settings that it does not keep."""
    rope = case.settings.get("rope_parameters", THETA)
    return (
        "use_sliding_window" not in case.settings
        and rope["rope_type"] in ("default", "yarn")
        and not {"mscale", "truncate"} & rope.keys()
    )


def logits_by_us(target: Target, token_ids: list[int]) -> Floats:
    """One pass over a text: [tokens, vocabulary]."""
    num_blocks = len(token_ids) // target.page_tokens + 1
    runner = Runner(target.decoder, num_blocks=num_blocks, page_tokens=target.page_tokens)
    cache = SequenceCache(BlockPool(num_blocks), target.page_tokens, None, "")
    assert cache.reserve(len(token_ids))
    config = target.decoder.config
    work = Work(cache, token_ids, EMPTY, wants_logits=True)
    rows = build_rows([work], heads_per_kv_head=config.num_heads // config.num_kv_heads)
    return target.decoder.forward(rows._replace(logit_rows=np.arange(len(token_ids))), runner.cache)


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def logits_by_transformers(folder: Path, token_ids: list[int]) -> Floats:
    """One pass over a text: [tokens, vocabulary]."""
    logits: Floats = load_transformers(folder)(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def some_tokens(seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=NUM_TOKENS)


def largest_difference(ours: Floats, theirs: Floats) -> float:
    """As a share of the spread of the logits."""
    return float(np.abs(ours - theirs).max() / theirs.std())


def assert_agree(ours: Floats, theirs: Floats) -> None:
    """Close everywhere, and the same best token wherever the best is clear."""
    assert ours.shape == theirs.shape
    assert largest_difference(ours, theirs) < CLOSE
    second, first = np.sort(theirs, axis=1)[:, -2:].T
    clear = first - second > 2 * CLOSE * theirs.std()
    assert clear.sum() > 0.9 * len(clear)
    assert np.array_equal(ours.argmax(axis=1)[clear], theirs.argmax(axis=1)[clear])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(torch_threads)
    numba.set_num_threads(numba_threads)


class TestLogits:
    @pytest.mark.parametrize("case", NAMED_CASES, ids=str)
    def test_every_kind_of_model(self, case: Case, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model", case.architecture, seed=1, **case.settings)
        tokens = some_tokens(1)
        assert_agree(logits_by_us(load_target(folder, weights="fp32"), tokens), logits_by_transformers(folder, tokens))

    @pytest.mark.parametrize("seed", range(24))
    def test_random_shapes(self, seed: int, tmp_path: Path) -> None:
        case = random_case(seed)
        folder = write_tiny_model(tmp_path / "model", case.architecture, seed=seed, **case.settings)
        tokens = some_tokens(seed)
        assert_agree(logits_by_us(load_target(folder, weights="fp32"), tokens), logits_by_transformers(folder, tokens))

    @pytest.mark.parametrize("case", [case for case in NAMED_CASES if can_be_gguf(case)], ids=str)
    def test_every_kind_of_model_as_gguf(self, case: Case, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model", case.architecture, seed=1, **case.settings)
        file = write_tiny_gguf(folder, tmp_path / "model.gguf")
        tokens = some_tokens(1)
        assert_agree(logits_by_us(load_target(file, weights="fp32"), tokens), logits_by_transformers(folder, tokens))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_weights_of_half_precision_are_read_as_they_are(self, dtype: torch.dtype, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "model", dtype=dtype, sharded=True, tie_word_embeddings=False)
        tokens = some_tokens(2)
        assert_agree(logits_by_us(load_target(folder, weights="fp32"), tokens), logits_by_transformers(folder, tokens))

    @pytest.mark.parametrize("scaling", [LLAMA3, LINEAR, THETA, *YARNS[:5]], ids=short)
    def test_a_forgotten_scaling_would_be_seen(self, scaling: dict[str, Any], tmp_path: Path) -> None:
        """The tolerance has teeth: the same weights with plain rotary angles are far outside of it."""
        scaled = write_tiny_model(tmp_path / "scaled", rope_parameters=scaling)
        plain = write_tiny_model(tmp_path / "plain")
        tokens = some_tokens(3)
        ours, theirs = logits_by_us(load_target(plain, weights="fp32"), tokens), logits_by_transformers(scaled, tokens)
        assert largest_difference(ours, theirs) > 100 * CLOSE

    def test_a_window_of_another_length_would_be_seen(self, tmp_path: Path) -> None:
        windowed = write_tiny_model(tmp_path / "windowed", "mistral", sliding_window=20)
        tokens = some_tokens(4)
        theirs = logits_by_transformers(windowed, tokens)
        for window in (19, 21, None):
            other = write_tiny_model(tmp_path / f"{window}", "mistral", sliding_window=window)
            assert largest_difference(logits_by_us(load_target(other, weights="fp32"), tokens), theirs) > 100 * CLOSE


PROMPTS = [
    "Once upon a time there was a small village at the foot of a mountain.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The capital of France is",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Step 1: Preheat the oven.\nStep 2: Mix the flour and the sugar.\nStep 3:",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
]
NUM_NEW_TOKENS = 48
NEAR_TIE = 5e-3


@pytest.fixture(scope="module")
def embedded() -> tuple[LLM, Any]:
    """The embedded model, by us and by transformers, from the same converted files."""
    llm = LLM(drafters=(), kv_tokens=2048, weights="fp32")
    return llm, load_transformers(cache_folder() / "models" / f"{NAME}-{GGUF_SHA256[:12]}-{FORMAT}")


@torch.inference_mode()
def logits_after_prompt(model: Any, prompt_ids: list[int], said: list[int]) -> torch.Tensor:
    """What transformers thinks before each word that we said: [said, vocabulary].

    Its greedy text is ours as long as its largest logit at each place is the word that we said there.
    """
    logits: torch.Tensor = model(torch.tensor([prompt_ids + said])).logits[0, len(prompt_ids) - 1 : -1]
    return logits


@pytest.mark.embedded
class TestEmbedded:
    def test_logits_agree(self, embedded: tuple[LLM, Any]) -> None:
        llm, model = embedded
        tokens = llm.target.tokenizer.encode("\n".join(PROMPTS))
        with torch.inference_mode():
            theirs = model(torch.tensor([tokens])).logits[0].numpy()
        assert_agree(logits_by_us(llm.target, tokens), theirs)

    def test_greedy_text_agrees_up_to_near_ties(self, embedded: tuple[LLM, Any]) -> None:
        llm, model = embedded
        prompts = [llm.target.tokenizer.encode(prompt) for prompt in PROMPTS]
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        num_equal = 0
        for prompt, result in zip(prompts, llm.generate(prompts, sampling), strict=True):
            assert len(result.token_ids) == NUM_NEW_TOKENS
            theirs = logits_after_prompt(model, prompt, result.token_ids)
            differing = (theirs.argmax(dim=1) != torch.tensor(result.token_ids)).nonzero()
            num_equal += not differing.numel()
            if differing.numel():  # from here on transformers would have gone another way
                first, second = theirs[differing[0, 0]].topk(2).values.tolist()
                assert first - second < NEAR_TIE
        assert num_equal >= 4

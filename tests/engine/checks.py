"""The checks of this folder as functions, so that the tests can run them at length and the mutants briefly.

Each raises an AssertionError (or whatever the engine raises) where a promise is broken, and names the seed.
"""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tests.engine.cases import Case, Library, Question, Tally, play, random_case
from tests.engine.engines import PAGE, new_engine, run_alone, steps
from understudy.assembly import Target
from understudy.core.draft import EMPTY
from understudy.core.request import Request, SamplingParams
from understudy.engine.engine import Engine
from understudy.kernels.cpu import Cache
from understudy.kv.pool import BlockPool
from understudy.kv.prefix import Node
from understudy.kv.sequence import SequenceCache
from understudy.runtime.inputs import Work
from understudy.runtime.runner import Runner

Floats = NDArray[np.float32]
Text = tuple[int, ...]

SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", secrets.randbits(32)))
"""Fresh in every run; set UNDERSTUDY_TEST_SEED to repeat one."""

CASES_PER_ROUND = 100
QUESTIONS_PER_ROUND = 60


def same_words(
    target: Target,
    seed: str,
    *,
    num_cases: int = CASES_PER_ROUND,
    num_questions: int = QUESTIONS_PER_ROUND,
    max_context: int | None = None,
) -> Tally:
    """Every request says what it says alone and without drafts, in every one of these cases."""
    rng = random.Random(seed)
    library = Library(target, rng, max_context=max_context)
    questions = [library.question() for _ in range(num_questions)]
    tally = Tally()
    for number in range(num_cases):
        case = random_case(library, questions, rng)
        try:
            play(target, case, tally)
        except Exception as error:
            raise AssertionError(f"{_again(seed)}, case {number}: {error}\nin {case}") from error
    return tally


def _again(seed: str) -> str:
    return f"seed {seed}, repeat with UNDERSTUDY_TEST_SEED={seed.partition('-')[0]}"


def live_cache(target: Target, seed: str, *, num_steps: int, num_questions: int = 40) -> Tally:
    """After every step, all committed keys and values are those of a fresh prefill, bit for bit."""
    rng = random.Random(seed)
    library = Library(target, rng, max_context=96)
    questions = [library.question() for _ in range(num_questions)]
    prefills = Prefills(target)
    tally = Tally()
    while tally.steps < num_steps:
        case = _roomy(random_case(library, questions, rng))
        texts = _committed_texts([entry.question for entry in case.entries])
        try:
            play(target, case, tally, on_step=lambda engine, texts=texts: prefills.compare(engine, texts))
        except Exception as error:
            raise AssertionError(f"{_again(seed)}: {error}\nin {case}") from error
    return tally


def _roomy(case: Case) -> Case:
    """The same case with enough rows in a step that there is room for drafts beside the prompts."""
    return replace(case, settings=case.settings | {"max_rows_per_step": max(16, case.settings["max_rows_per_step"])})


def _committed_texts(questions: list[Question]) -> dict[str, list[Text]]:
    """All that may ever be committed, by tenant."""
    texts: dict[str, list[Text]] = {}
    for question in questions:
        for answer in question.answers:
            texts.setdefault(question.tenant, []).append((*question.prompt_ids, *answer.token_ids))
    return texts


class Prefills:
    """Keys and values of whole texts, each computed once, alone, in one pass into an empty cache."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[Text, tuple[Floats, Floats]] = {}

    def of(self, text: Text) -> tuple[Floats, Floats]:
        """Keys and values by position: see `gather`."""
        if text not in self._known:
            runner = Runner(self._target.decoder, num_blocks=-(-len(text) // PAGE), page_tokens=PAGE)
            cache = SequenceCache(BlockPool(runner.num_blocks), PAGE, None, "")
            assert cache.reserve(len(text))
            runner.forward([Work(cache, text, EMPTY, wants_logits=False)])
            self._known[text] = gather(runner.cache, cache.blocks, len(text))
        return self._known[text]

    def compare(self, engine: Engine, texts: dict[str, list[Text]]) -> None:
        """Compare what is live in an engine: every running sequence, and every cached prefix."""
        engine.check()
        for sequence in engine._scheduler.running:
            text = tuple(sequence.tokens)
            whole = next((t for t in texts[sequence.request.tenant] if t[: len(text)] == text), None)
            assert whole is not None, f"{text} begins no plain answer"
            self._compare_blocks(engine, sequence.cache.blocks, sequence.cache.length, whole)
        if engine._prefix is not None:
            for tenant, root in engine._prefix._roots.items():
                self._compare_cached(engine, root, texts.get(tenant, []))

    def _compare_cached(self, engine: Engine, root: Node, texts: list[Text]) -> None:
        """Every cached block of a tenant holds committed text of that tenant."""
        assert engine._prefix is not None
        for leaf in [node for node in engine._prefix._nodes.values() if not node.num_children]:
            path = _path(leaf)
            if path[0] is root:
                text = tuple(token for node in path for token in node.tokens)
                whole = next((t for t in texts if t[: len(text)] == text), None)
                assert whole is not None, "the prefix cache holds text that was never committed"
                self._compare_blocks(engine, [node.block for node in path[1:]], len(text), whole)

    def _compare_blocks(self, engine: Engine, blocks: list[int], length: int, whole: Text) -> None:
        keys, values = gather(engine._runner.cache, blocks, length)
        whole_keys, whole_values = self.of(whole)
        assert np.array_equal(keys, whole_keys[..., :length]), f"keys differ within {length} positions of {whole}"
        assert np.array_equal(values, whole_values[:, :, :length]), (
            f"values differ within {length} positions of {whole}"
        )


def gather(cache: Cache, blocks: list[int], length: int) -> tuple[Floats, Floats]:
    """Read keys [layers, kv_heads, dim, length] and values [layers, kv_heads, length, dim] through a block table."""
    layers, _, heads, dim, _ = cache.keys.shape
    keys = cache.keys[:, blocks].transpose(0, 2, 3, 1, 4).reshape(layers, heads, dim, -1)
    values = cache.values[:, blocks].transpose(0, 2, 1, 3, 4).reshape(layers, heads, -1, dim)
    return keys[..., :length], values[:, :, :length]


def _path(node: Node) -> list[Node]:
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def tenants_apart(target: Target) -> None:
    """A tenant finds its own prefixes in the cache, and nobody else's."""
    engine = new_engine(target)
    prompt = tuple(range(3, 3 + 3 * PAGE))

    def cached_tokens(tenant: str) -> int:
        request = Request(
            request_id="r", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=1), tenant=tenant
        )
        (sequence,) = engine.submit(request)
        for _ in steps(engine):
            pass
        return sequence.cached_tokens

    assert cached_tokens("ann") == 0
    assert cached_tokens("bob") == 0, "one tenant was given another's prefix"
    assert cached_tokens("ann") == 2 * PAGE, "all but the last block of one's own prompt should be found"


def choices_apart(target: Target) -> None:
    """Choice 0 of several is what a single one is, and the others are draws of their own."""
    engine = new_engine(target)

    def tokens(num_choices: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=11, n=num_choices, ignore_eos=True)
        return [
            answer.token_ids
            for answer in run_alone(engine, Request(request_id="r", prompt_ids=(7, 8), sampling=sampling))
        ]

    three = tokens(3)
    assert three[:1] == tokens(1)
    assert len({tuple(line) for line in three}) == 3, "two choices said the same"


def draws_apart(target: Target) -> None:
    """A seed repeats its words; another seed says others; and every position has noise of its own."""
    engine = new_engine(target)

    def words(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=100.0, max_tokens=12, seed=seed, ignore_eos=True)
        return run_alone(engine, Request(request_id="r", prompt_ids=(7, 8), sampling=sampling))[0].token_ids

    assert words(1) == words(1)
    assert words(1) != words(2), "two seeds said the same"
    assert len(set(words(1))) > 6, "at temperature 100 the noise decides, and it did not change from word to word"

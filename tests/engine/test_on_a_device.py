"""The engine on kernels that draw words by themselves: passes begin before words are seen, and no word changes.

On a GPU with graphs, else small, in Triton's interpreter, where every pass is launched kernel by kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.engine.recorder import Recorder
from tests.fresh_features import fresh_features
from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, needs_gpu
from tests.tiny_models import write_tiny_model
from understudy.assembly import DraftModel, Target, build_engine
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.core.events import Cycle, Event, Fallback
from understudy.core.request import Output, Request, SamplingParams, Speculation
from understudy.drafters.base import Context, Drafter
from understudy.drafters.ngram import NgramDrafter
from understudy.engine.engine import Engine
from understudy.kernels.cuda import CudaKernels
from understudy.kernels.cuda_passes import CudaPasses, usual_sizes
from understudy.kernels.interface import NORMED
from understudy.kernels.rows import NO_ROWS
from understudy.models.decoder import Decoder
from understudy.models.load import load_model
from understudy.text.vocabulary import compare_vocabularies

NUM_LAYERS = 2 if ON_GPU else 1
NUM_WORDS = 24 if ON_GPU else 9
PROMPTS = [[5 + (7 * start + place) % 250 for place in range(3 + 5 * start)] for start in range(4)]
COST = CostModel({1: 1.0, 2: 1.0, 32: 1.0})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A tiny model, and one layer less of it as a draft."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=NUM_LAYERS)
    loaded = load_model(folder)
    kernels = CudaKernels(device=DEVICE.type, dtype=DTYPE)
    decoder = Decoder(loaded.config, loaded.tensors, kernels, weights=kernels.output_weights)
    rows = loaded.config.vocab_size
    same = compare_vocabularies(
        loaded.tokenizer, loaded.tokenizer, target_rows=rows, draft_rows=rows, cross_tokenizer=False
    )
    target = Target(decoder, loaded.tokenizer, kernels.page_tokens, loaded.name, loaded.source_hash, None, True)
    return replace(target, draft=DraftModel(decoder, same, "itself", 0))


@dataclass
class Clock:
    """A second passes whenever it is looked at."""

    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def engine_of(target: Target, *drafters: str, **settings: object) -> Engine:
    values = {"drafters": drafters, "kv_tokens": 2048, "max_rows_per_step": 64} | settings
    return build_engine(target, EngineConfig.from_mapping(values), cost=COST, draft_cost=replace(COST))


def answers(
    engine: Engine,
    *,
    streams: int,
    temperature: float = 0.0,
    speculation: Speculation | None = None,
    prompts: Sequence[Sequence[int]] = tuple(PROMPTS),
    **sampling: object,
) -> list[tuple[int, ...]]:
    """All prompts' words, so many texts at once."""
    said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    waiting = list(enumerate(prompts))[::-1]
    while waiting or engine.has_work:
        while waiting and engine.num_live_requests < streams:
            number, ids = waiting.pop()
            values = {"max_tokens": NUM_WORDS, "seed": number, "ignore_eos": True, "temperature": temperature}
            params = SamplingParams(**(values | sampling))  # type: ignore[arg-type]
            engine.submit(
                Request(
                    request_id=str(number),
                    prompt_ids=tuple(ids),
                    sampling=params,
                    speculation=speculation or Speculation(),
                )
            )
        for output in engine.step():
            said[output.request_id].extend(output.token_ids)
    engine.check()
    return [tuple(words) for words in said.values()]


@pytest.fixture(scope="module")
def expected(target: Target) -> dict[float, list[tuple[int, ...]]]:
    """What each text says alone and plainly."""
    return {temperature: answers(engine_of(target), streams=1, temperature=temperature) for temperature in (0.0, 1.0)}


@pytest.mark.parametrize("drafters", [(), ("ngram",), ("model",), ("lookahead",), ("suffix", "model")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_words(
    target: Target, expected: dict[float, list[tuple[int, ...]]], drafters: tuple[str, ...], temperature: float
) -> None:
    engine = engine_of(target, *drafters)
    forced = Speculation(forced=bool(drafters), max_depth=3)
    for streams in (1, 4):
        assert answers(engine, streams=streams, temperature=temperature, speculation=forced) == expected[temperature]


@needs_gpu
def test_what_is_made_ready_is_not_the_first_of_its_size(
    target: Target, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    engine = engine_of(target, "model")
    while engine.prepare():
        pass
    num_ready = engine._runner.num_firsts
    assert num_ready > 2 * len(usual_sizes(())) - 40, "the target's and the draft's, but for those that were measured"
    for temperature in (0.0, 1.0):
        assert answers(engine, streams=1, temperature=temperature) == expected[temperature]
    assert engine._runner.num_firsts == num_ready
    forced = Speculation(forced=True, max_depth=3)
    for streams in (1, 4):
        assert answers(engine, streams=streams, temperature=1.0, speculation=forced) == expected[1.0]


def test_rows_that_are_all_padding_leave_no_trace(target: Target, expected: dict[float, list[tuple[int, ...]]]) -> None:
    """What is made ready is computed over such rows, between two texts and with keys of others in the cache."""
    engine = engine_of(target, "ngram", prefix_cache=True)
    passes = engine._runner._passes
    assert isinstance(passes, CudaPasses)
    before = answers(engine, streams=4, temperature=1.0)
    held = [array.clone() for array in (engine._runner.cache.keys[:, :-1], engine._runner.cache.values[:, :-1])]
    for size in usual_sizes(())[:: len(usual_sizes(())) // 2]:
        passes._launch(size._replace(rows=4, groups=2, tails=32), NO_ROWS, ())
    after = [engine._runner.cache.keys[:, :-1], engine._runner.cache.values[:, :-1]]
    assert all(torch.equal(one, other) for one, other in zip(held, after, strict=True))
    assert before == answers(engine, streams=4, temperature=1.0) == expected[1.0]


def test_a_draft_that_is_the_target_is_always_right(target: Target) -> None:
    engine = engine_of(target, "model")
    forced = Speculation(forced=True, max_depth=3)
    for temperature in (0.0, 1.0):
        engine.submit(
            Request(
                request_id="0",
                prompt_ids=tuple(PROMPTS[2]),
                sampling=SamplingParams(temperature=temperature, seed=3, max_tokens=9),
                speculation=forced,
            )
        )
        outputs: list[Output] = []
        while engine.has_work:
            outputs += engine.step()
        facts = outputs[-1].facts
        assert facts is not None
        assert facts.counts.accepted > 0
        assert facts.counts.rejected == 0


def test_words_that_the_host_draws_beside_others(target: Target, expected: dict[float, list[tuple[int, ...]]]) -> None:
    """Log probabilities are wanted of all texts: no pass begins ahead, and the words are the same."""
    assert answers(engine_of(target), streams=4, logprobs=2) == expected[0.0]
    banned = expected[0.0][0][0]
    biased = [answers(engine_of(target), streams=count, logit_bias={banned: -100.0}) for count in (1, 4)]
    assert biased[0] == biased[1]
    assert biased[0][0][0] != banned


def test_a_text_that_ends_while_its_next_pass_is_under_way(
    target: Target, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    """A stop id comes up while the next row of that text is being computed: it is dropped, and others go on."""
    words = expected[1.0]
    stop = words[1][3]
    ended = [line[: line.index(stop) + 1] if stop in line else line for line in words]
    assert answers(engine_of(target), streams=4, temperature=1.0, stop_token_ids=(stop,)) == ended


def test_an_abort_while_passes_are_under_way(target: Target, expected: dict[float, list[tuple[int, ...]]]) -> None:
    engine = engine_of(target)
    for number in (0, 1):
        sampling = SamplingParams(temperature=0.0, seed=number, max_tokens=NUM_WORDS, ignore_eos=True)
        engine.submit(Request(request_id=str(number), prompt_ids=tuple(PROMPTS[number]), sampling=sampling))
    said: list[int] = []
    for step in itertools.count():
        if not engine.has_work:
            break
        if step == 3:
            engine.abort("0")
        said += [token for output in engine.step() if output.request_id == "1" for token in output.token_ids]
    assert tuple(said) == expected[0.0][1]
    engine.check()
    assert engine.num_live_requests == 0


def test_time_in_which_nobody_asks_is_no_pass(target: Target) -> None:
    """A text ends by a word that nobody foresaw: the pass begun ahead is dropped, or it would last until the next."""
    idle_s, clock = 1e6, Clock()
    told: list[Event] = []
    config = EngineConfig(drafters=(), kv_tokens=2048)
    engine = build_engine(target, config, cost=COST, emit=told.append, clock=clock)
    (said,) = answers(engine, streams=1, prompts=PROMPTS[:1], temperature=1.0)
    ended = said[: said.index(said[3]) + 1]
    for _ in range(2):
        clock.now_s += idle_s
        again = answers(engine, streams=1, prompts=PROMPTS[:1], temperature=1.0, stop_token_ids=(said[3],))
        assert again == [ended]
    cycles = [event for event in told if isinstance(event, Cycle)]
    assert all(cycle.num_emitted for cycle in cycles)
    assert sum(cycle.total_s for cycle in cycles) < idle_s


def test_too_few_blocks_for_all(target: Target, expected: dict[float, list[tuple[int, ...]]]) -> None:
    """Texts are put off and computed again, with words under way."""
    long = [line * 3 for line in PROMPTS]
    alone = answers(engine_of(target), streams=1, prompts=long)
    crowded = engine_of(target, kv_tokens=160, prefix_cache=False, max_context=96)
    assert answers(crowded, streams=4, prompts=long) == alone


class DeviceRecorder(Recorder):
    """Copies what it may read on the device."""

    reads_on_device: ClassVar[bool] = True

    def see(self, context: Context, first: int, features: Any) -> None:
        chosen = features.states[list(features.rows)][:, list(features.columns)]
        super().see(context, first, chosen.cpu().numpy())


def test_hidden_states_stay_on_the_device(target: Target, expected: dict[float, list[tuple[int, ...]]]) -> None:
    """Whoever reads them there finds those of each text, drafted or not, also of passes that began ahead."""
    for forced, depth in ((True, 3), (False, 16), (False, 0)):
        recorder = DeviceRecorder(0, NUM_LAYERS, NORMED)
        drafters: list[Drafter] = [recorder, NgramDrafter()] if forced else [recorder]
        engine = build_engine(target, EngineConfig(kv_tokens=2048), drafters=drafters, cost=COST)
        wanted = Speculation(forced=forced, max_depth=depth)
        assert answers(engine, streams=2, prompts=PROMPTS[:2], speculation=wanted) == expected[0.0][:2]
        assert bool(recorder.seen) == (depth > 0)
        for sequence_id, context in recorder.contexts.items():
            positions = recorder.positions(context)
            assert positions == list(range(len(positions)))
            assert len(positions) >= len(context.tokens) - 5, "all but those of the pass in which the text ended"
            shown = np.concatenate([features for _, features in recorder.seen[sequence_id]])
            whole = fresh_features(target, context.tokens, recorder.feature_layers)
            assert np.array_equal(shown, whole.cpu().numpy()[positions])  # type: ignore[attr-defined]


def test_a_drafter_that_reads_hidden_states_on_the_host_is_left_out(
    target: Target, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    told: list[Event] = []
    config, recorder = EngineConfig(kv_tokens=2048), Recorder(0)
    engine = build_engine(target, config, drafters=[recorder], cost=COST, emit=told.append)
    assert engine.drafter_names == []
    reasons = [event.reason for event in told if isinstance(event, Fallback)]
    assert len(reasons) == 1
    assert "hidden states" in reasons[0]
    assert answers(engine, streams=2, prompts=PROMPTS[:2]) == expected[0.0][:2]
    assert not recorder.seen

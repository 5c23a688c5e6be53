"""A trained block beside a target on a device: the words stay the target's, and guesses are looked at only afterwards.

On a GPU with graphs, else small, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.kernels.cuda_device import DEVICE, DTYPE, ON_GPU, needs_gpu
from tests.tiny_heads import tiny_spec
from tests.tiny_models import write_tiny_model

from understudy.assembly import Target, build_engine
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.core.draft import Draft, is_tree
from understudy.core.events import Event, EventSink, Fallback, ignore
from understudy.core.request import Facts, Request, SamplingParams, Speculation
from understudy.drafters import device_heads, trained_cuda
from understudy.drafters.base import Budget, Context
from understudy.drafters.device_heads import _MOST_PIECES, DeviceHeadDrafter, _Piece, _Text
from understudy.drafters.trained_cuda import make_trained_drafter_on_device
from understudy.drafters.tree import Shape
from understudy.engine.engine import Engine
from understudy.errors import ModelError
from understudy.kernels import cuda_blocks
from understudy.kernels.cuda import CudaKernels
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.decoder import Decoder
from understudy.models.heads.block import BlockHead
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import TrainedHead
from understudy.models.load import load_model
from understudy.runtime.runner import Runner
from understudy.train.run import new_head

NUM_WORDS = 24 if ON_GPU else 9
NUM_TOKENS = 3
PROMPTS = [[5 + (7 * start + place) % 250 for place in range(3 + 5 * start)] for start in range(3)]
COST = CostModel({1: 1.0, 2: 1.0, 32: 1.0})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_in(tmp_path_factory.mktemp("tiny"), num_layers=1)


def target_in(folder: Path, *, num_layers: int) -> Target:
    loaded = load_model(write_tiny_model(folder, num_hidden_layers=num_layers))
    kernels = CudaKernels(device=DEVICE.type, dtype=DTYPE)
    decoder = Decoder(loaded.config, loaded.tensors, kernels, weights=kernels.output_weights)
    return Target(decoder, loaded.tokenizer, kernels.page_tokens, loaded.name, loaded.source_hash, None, True)


def parrot(target: Target, *, always: bool = True) -> TrainedHead:
    """A draft that repeats the token before, as the tiny target does; else it has only its untrained rows to go by."""
    config = target.decoder.config
    vocabulary = DraftVocabulary(torch.arange(7, config.vocab_size, 12), config.vocab_size)
    count = len(vocabulary)
    spec = replace(
        tiny_spec("block", config), num_tokens=NUM_TOKENS, num_layers=1, markov_rank=count, num_draft_ids=count
    )
    head = new_head(spec, seed=2)
    assert isinstance(head, BlockHead)
    with torch.no_grad():
        head.markov_in.weight[:count] = torch.eye(count)
        head.markov_out.weight.copy_(1e3 * torch.eye(count) if always else torch.zeros(count, count))
    return TrainedHead(spec, head, vocabulary, {})


def engine_of(
    target: Target, trained: TrainedHead, *, num_children: int = 2, emit: EventSink = ignore
) -> tuple[Engine, DeviceHeadDrafter]:
    runner = Runner(target.decoder, num_blocks=64, page_tokens=target.page_tokens)
    drafter = make_trained_drafter_on_device(
        trained, runner, target.decoder, shape=Shape(num_children=num_children), cost=replace(COST)
    )
    config = EngineConfig(kv_tokens=2048, max_rows_per_step=64)
    return build_engine(target, config, drafters=[drafter], cost=COST, emit=emit), drafter


def answers(
    engine: Engine, *, streams: int, temperature: float = 0.0, prompts: Sequence[Sequence[int]] = tuple(PROMPTS)
) -> tuple[list[tuple[int, ...]], list[Facts]]:
    """All prompts' words, so many texts at once, and what came of their drafts."""
    said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    facts: list[Facts] = []
    waiting = list(enumerate(prompts))[::-1]
    while waiting or engine.has_work:
        while waiting and engine.num_live_requests < streams:
            number, ids = waiting.pop()
            sampling = SamplingParams(max_tokens=NUM_WORDS, seed=number, ignore_eos=True, temperature=temperature)
            wanted = Speculation(forced=True, max_depth=NUM_TOKENS) if engine.drafter_names else Speculation()
            engine.submit(Request(request_id=str(number), prompt_ids=tuple(ids), sampling=sampling, speculation=wanted))
        for output in engine.step():
            said[output.request_id].extend(output.token_ids)
            if output.facts is not None:
                facts.append(output.facts)
    engine.check()
    return [tuple(words) for words in said.values()], facts


@pytest.fixture(scope="module")
def expected(target: Target) -> dict[float, list[tuple[int, ...]]]:
    plain = build_engine(target, EngineConfig(drafters=(), kv_tokens=2048), cost=COST)
    return {temperature: answers(plain, streams=1, temperature=temperature)[0] for temperature in (0.0, 2.5)}


@pytest.mark.parametrize("temperature", [0.0, 2.5])
@pytest.mark.parametrize("streams", [1, 3])
def test_the_same_words(
    target: Target, expected: dict[float, list[tuple[int, ...]]], streams: int, temperature: float
) -> None:
    """Also for a draft that is mostly wrong: what it kept of rejected guesses is overwritten."""
    for trained in (parrot(target), parrot(target, always=False)):
        engine, _ = engine_of(target, trained)
        said, facts = answers(engine, streams=streams, temperature=temperature)
        assert said == expected[temperature]
        assert sum(one.counts.drafted for one in facts) > 0


def test_a_draft_that_is_always_right(target: Target) -> None:
    """The tiny target repeats a word for ever: all of a chain is right, and the words say so."""
    engine, drafter = engine_of(target, parrot(target), num_children=1)
    (said,), (facts,) = answers(engine, streams=1, prompts=PROMPTS[:1])
    assert len(set(said[1:])) == 1, "else this test tests nothing"
    assert facts.counts.accepted >= NUM_WORDS // 2
    assert facts.counts.rejected <= NUM_TOKENS
    assert not drafter._texts


def test_a_rival_that_is_right_is_followed_by_guesses(target: Target) -> None:
    """A draft whose first is always wrong, and whose second always right: behind one rival there is the next."""
    trained = parrot(target)
    assert isinstance(trained.head, BlockHead)
    wrong = 3
    with torch.no_grad():
        trained.head.markov_out.weight[wrong] += 2e3
    engine, _ = engine_of(target, trained)
    (said,), (facts,) = answers(engine, streams=1, prompts=PROMPTS[:1])
    assert len(set(said[1:])) == 1, "else this test tests nothing"
    assert int(trained.vocabulary.ids[wrong]) not in said
    num_cycles = NUM_WORDS - 1 - facts.counts.accepted  # the first word comes with the prompt
    assert facts.counts.accepted > 1.5 * num_cycles, "one rival alone would be one accepted word a cycle"


@pytest.mark.parametrize("num_children", [1, 2])
def test_budgets_are_kept_and_every_name_is_told(target: Target, num_children: int) -> None:
    engine, drafter = engine_of(target, parrot(target, always=False), num_children=num_children)
    begin = drafter.propose
    sizes: set[int] = set()

    def propose(contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        known: dict[int, tuple[int, float]] = {}
        for max_depth, max_rows in [(NUM_TOKENS + 1, 100), (1, 100), (NUM_TOKENS, 1), (2, 5), (NUM_TOKENS, 6)]:
            (draft,) = begin(contexts, [Budget(max_depth, max_rows)])
            words = drafter.take_words()
            known = known or words
            assert is_tree(draft)
            assert draft.depth <= max_depth
            assert len(draft) <= max_rows
            assert set(words) == set(draft.tokens) == drafter.unseen
            assert words.items() <= known.items(), "a budget chooses among guesses"
            sizes.add(len(draft))
        return begin(contexts, budgets)

    drafter.propose = propose  # type: ignore[method-assign]
    answers(engine, streams=1, prompts=PROMPTS[:1])
    assert sizes == ({1, 2, 3} if num_children == 1 else {1, 2, 5, 6, 14})


def test_a_full_cache_of_the_draft_costs_words_nothing(
    target: Target, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    engine, drafter = engine_of(target, parrot(target))
    drafter._pool = BlockPool(2)  # two texts of the three
    assert answers(engine, streams=3)[0] == expected[0.0]


@needs_gpu
def test_what_is_made_ready_is_not_the_first_of_its_size(
    target: Target, expected: dict[float, list[tuple[int, ...]]]
) -> None:
    engine, drafter = engine_of(target, parrot(target))
    while engine.prepare():
        pass
    sizes = set(drafter._passes._captured)
    assert len(sizes) > 50
    for temperature in (0.0, 2.5):
        assert answers(engine, streams=3, temperature=temperature)[0] == expected[temperature]
    assert set(drafter._passes._captured) == sizes


@pytest.mark.parametrize("most", [4, 8, 16])
def test_what_one_pass_cannot_hold_is_read_before_it(
    target: Target, expected: dict[float, list[tuple[int, ...]]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts whose words were read are shown their last one again, and that has to fit as well."""
    monkeypatch.setattr(device_heads, "MOST_CONTEXT", most)
    monkeypatch.setattr(cuda_blocks, "MOST_CONTEXT", most)
    monkeypatch.setattr(cuda_blocks, "_CONTEXTS", (most,))
    failures: list[Event] = []
    engine, _ = engine_of(
        target, parrot(target), emit=lambda event: failures.append(event) if isinstance(event, Fallback) else None
    )
    said, facts = answers(engine, streams=3)
    assert said == expected[0.0]
    assert not failures
    assert all(one.counts.accepted for one in facts), "whoever was read beforehand is drafted for as well"


def test_drafts_for_one_text_begin_before_anybody_asks(target: Target) -> None:
    engine, drafter = engine_of(target, parrot(target))
    launches: list[int] = []
    begin = drafter._launch
    drafter._launch = lambda contexts: (launches.append(len(contexts[0].tokens)), begin(contexts))[1]  # type: ignore[method-assign, func-returns-value]
    _, (facts,) = answers(engine, streams=1, prompts=PROMPTS[:1])
    assert len(launches) == len(set(launches)), "no draft was launched twice"
    assert facts.counts.accepted > 0


def test_eagle_leaves_the_words_alone(tmp_path: Path) -> None:
    """An untrained one, mostly wrong: rows that it drafted are overwritten by true ones."""
    target = target_in(tmp_path, num_layers=3)
    spec = tiny_spec("eagle", target.decoder.config)
    vocabulary = DraftVocabulary(torch.arange(7, 7 + 5 * spec.num_draft_ids, 5), target.decoder.config.vocab_size)
    engine, drafter = engine_of(target, TrainedHead(spec, new_head(spec, seed=1), vocabulary, {}))
    assert drafter.name == "eagle"
    plain = build_engine(target, EngineConfig(drafters=(), kv_tokens=2048), cost=COST)
    (expected, _), (said, facts) = (answers(one, streams=2, prompts=PROMPTS[:2]) for one in (plain, engine))
    assert said == expected
    assert sum(one.counts.drafted for one in facts) > 0


def test_kinds_that_it_cannot_run_are_refused(target: Target) -> None:
    spec = tiny_spec("medusa", target.decoder.config)
    trained = replace(parrot(target), spec=spec, head=new_head(spec, seed=0))
    runner = Runner(target.decoder, num_blocks=4, page_tokens=target.page_tokens)
    with pytest.raises(ModelError, match="medusa"):
        make_trained_drafter_on_device(trained, runner, target.decoder, shape=Shape(), cost=COST)


def test_what_a_guess_costs_is_measured(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_blocks, "MOST_TEXTS", 2)
    monkeypatch.setattr(trained_cuda, "_REPEATS", 1)
    runner = Runner(target.decoder, num_blocks=4, page_tokens=target.page_tokens)
    drafter = make_trained_drafter_on_device(parrot(target), runner, target.decoder, shape=Shape())
    assert set(drafter.cost.rows_s) == {1, 2}
    assert min(drafter.cost.rows_s.values()) > 0.0


def test_what_nobody_asks_for_is_kept_in_few_pieces() -> None:
    """Else every word of every text would count all words before it, and hold the states of its whole pass."""
    text = _Text(SequenceCache(BlockPool(1), 32, None, ""))
    states = torch.arange(200.0 * 6).reshape(200, 2, 3).to(DEVICE)
    shown = [position for position in range(200) if position != 77]  # one was never shown
    for number, position in enumerate(shown, 1):
        text.add(_Piece(position, states, position, 1))
        assert text.num_pending == number
        assert len(text.pending) <= _MOST_PIECES
    (first, begun), (others, rest) = text.take(60), text.take(500)
    assert [len(first), len(others)] == [60, 139]
    assert first + others == shown
    assert torch.equal(torch.cat(begun + rest), states[shown])
    assert (text.num_pending, text.take(1)) == (0, ([], []))
    text.go_back()
    positions, (last,) = text.take(5)
    assert positions == [199]
    assert torch.equal(last, states[199:])

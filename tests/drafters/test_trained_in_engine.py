"""Words from hidden states, through the engine: chains and trees of every kind, and no word but the target's own.

A draft that was never trained guesses badly. So there is one more that cheats: it knows what followed wherever it has
met these very hidden states before. Were a single bit of what it is shown different, it would say nothing.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.engines import EOS_IDS, PAGE, Answer, FixedCost, new_engine, run_alone, steps
from tests.fresh_features import fresh_features
from tests.tiny_heads import NUM_DRAFT_IDS, tiny_spec
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

from understudy.assembly import Target, load_target
from understudy.core.draft import Draft
from understudy.core.events import Cycle, Event, Fallback, Preempted
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import ALL_ON, OFF
from understudy.drafters.base import Budget, Context
from understudy.drafters.medusa import MedusaDrafter
from understudy.drafters.packed import Body
from understudy.drafters.seen import SeeingDrafter, Text
from understudy.drafters.trained import make_trained_drafter
from understudy.drafters.tree import Growth, Guesses, Shape, children
from understudy.kernels.cpu import CpuKernels
from understudy.kernels.interface import NORMED
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import TrainedHead
from understudy.models.heads.medusa import MedusaHead
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.train.run import new_head

Floats = NDArray[np.float32]
NUM_WORDS = 60
NUM_TEXTS = 4
DEPTH = 4


def untrained(kind: HeadKind, target: Target) -> TrainedHead:
    spec = tiny_spec(kind, target.decoder.config)
    vocabulary = DraftVocabulary(torch.arange(0, 7 * NUM_DRAFT_IDS, 7), VOCAB_SIZE)
    return TrainedHead(spec, new_head(spec, seed=4), vocabulary, {})


def drafter_of(kind: HeadKind, target: Target, shape: Shape) -> SeeingDrafter:
    cost = FixedCost({1: 1e-6, 64: 2e-6})
    return make_trained_drafter(untrained(kind, target), target.decoder, shape=shape, cost=cost)


class Remembering(MedusaDrafter):
    """A draft that has read the answers."""

    def __init__(self, target: Target, *, shape: Shape, right: float = 0.7) -> None:
        """`right`: how sure it is of what it knows; the rest goes to three tokens that it makes up."""
        trained, kernels = untrained("medusa", target), target.decoder.kernels
        assert isinstance(trained.head, MedusaHead)
        assert isinstance(kernels, CpuKernels)
        super().__init__(trained.head, Body(trained, target.decoder, kernels, weights="fp32"), shape=shape)
        self.cost = FixedCost({1: 1e-6})
        self._right = right
        self._known: dict[tuple[bytes, int], list[Sequence[int]]] = {}
        self.num_found = self.num_missed = 0

    def learn(self, text: Sequence[int], features: Floats) -> None:
        """Remember what follows every token, by the hidden states at the one before it."""
        for place in range(len(text) - 2):
            following = text[place + 2 : place + 2 + DEPTH]
            self._known.setdefault((features[place, 0].tobytes(), text[place + 1]), []).append(following)

    def _draft(self, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._grown(*each) for each in zip(texts, contexts, budgets, strict=True)]

    def _grown(self, text: Text, context: Context, budget: Budget) -> Draft:
        growth = Growth(context, budget, shape=self._shape, width=budget.max_rows, source=self.name)
        for guesses in self.guess(text, context):
            offered = children(guesses, context, position=growth.position, shape=self._shape)
            if growth.level:
                growth.add([offered] * len(growth.level))
        return growth.draft()

    def guess(self, text: Text, context: Context) -> list[Guesses]:
        """The guesses by depth."""
        assert text.last is not None
        lines = self._known.get((text.last.tobytes(), context.tokens[-1]), [])
        self.num_found += bool(lines)
        self.num_missed += not lines
        return [self._guesses({line[d] for line in lines if d < len(line)}) for d in range(DEPTH)]

    def _guesses(self, known: set[int]) -> Guesses:
        wrong = [token for token in (17, 18, 19, 20, 21) if token not in known][:3]
        q = [self._right / max(1, len(known))] * len(known) + [(1.0 - self._right) / 3] * 3
        return Guesses(np.array([*known, *wrong], np.int64), np.log(np.array(q, np.float32)))


def request(number: int, temperature: float, speculation: Speculation | None = None) -> Request:
    """Prompts that share their first block; with its answer each needs twice the blocks that its prompt does."""
    prompt = [(7 + 31 * place) % 300 for place in range(PAGE + 10)] + [10 + number, 20 + number]
    sampling = SamplingParams(temperature=temperature, max_tokens=NUM_WORDS, seed=number, ignore_eos=True)
    return Request(
        request_id=str(number),
        prompt_ids=tuple(prompt),
        sampling=sampling,
        speculation=speculation or Speculation(max_depth=DEPTH, forced=True),
    )


@pytest.fixture(scope="module")
def target() -> Target:
    return four_layers()


@functools.cache
def four_layers() -> Target:
    """A tiny model that is deep enough for every kind; untied embeddings keep its text varied at temperature 0."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"num_hidden_layers": 4, "tie_word_embeddings": False, "eos_token_id": EOS_IDS}
        write_tiny_model(Path(folder), "llama", seed=5, **settings)
        return load_target(folder, num_threads=1)


@pytest.fixture(scope="module")
def plain(target: Target) -> dict[float, list[Answer]]:
    """The plain answers, by temperature."""
    engine = new_engine(target, prefix_cache=False)
    return {t: [run_alone(engine, request(number, t))[0] for number in range(NUM_TEXTS)] for t in (0.0, 1.0)}


def knowing(target: Target, plain: Sequence[Answer], shape: Shape) -> Remembering:
    drafter = Remembering(target, shape=shape)
    for number, answer in enumerate(plain):
        text = [*request(number, 0.0).prompt_ids, *answer.token_ids]
        drafter.learn(text, fresh_features(target, text, drafter.feature_layers))
    return drafter


def run_all(engine: Any, temperature: float) -> list[Answer]:
    """The first text alone for one step, so that others find its prompt in the cache; then all at once."""
    answers = [Answer() for _ in range(NUM_TEXTS)]
    engine.submit(request(0, temperature))
    for number, outputs in enumerate(steps(engine)):
        if number == 0:
            for other in range(1, NUM_TEXTS):
                engine.submit(request(other, temperature))
        for output in outputs:
            answers[int(output.request_id)].extend(output)
    return answers


SHAPES = [Shape(1), Shape(3), Shape(3, is_coupled=False)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_words_with_little_room_and_shared_prefixes(
    target: Target, plain: dict[float, list[Answer]], temperature: float, shape: Shape
) -> None:
    drafter = knowing(target, plain[temperature], shape)
    events: list[Event] = []
    engine = new_engine(target, drafters=[drafter], emit=events.append, num_blocks=5)
    sequences: list[Any] = []
    submit = engine.submit
    engine.submit = lambda one: sequences.extend(submit(one))  # type: ignore[assignment, return-value, method-assign]
    assert run_all(engine, temperature) == plain[temperature]
    assert any(isinstance(event, Preempted) for event in events)
    assert any(sequence.cached_tokens for sequence in sequences)
    assert drafter.num_found > 20
    assert not drafter.num_missed, "hidden states differ from those of a fresh pass"
    counts = [sequence.counts for sequence in sequences]
    assert sum(count.accepted for count in counts) > 20
    if shape.num_children > 1:
        assert sum(count.rows for count in counts) > sum(count.drafted for count in counts), "no tree was verified"


def test_words_per_cycle_of_a_head_that_knows(target: Target, plain: dict[float, list[Answer]]) -> None:
    """Greedy, all that it guesses is right: with the target's own word, five words a pass."""
    events: list[Event] = []
    drafter = knowing(target, plain[0.0][:1], Shape(1))
    engine = new_engine(target, drafters=[drafter], emit=events.append)
    assert run_alone(engine, request(0, 0.0)) == [plain[0.0][0]]
    cycles = [event for event in events if isinstance(event, Cycle)]
    assert len(cycles) == 1 + -(-(NUM_WORDS - 1) // (DEPTH + 1))


def test_the_shared_noise_picks_the_text_that_is_being_said(target: Target) -> None:
    """The guesses are the target's own law, computed from the very text: coupled, a chain is always right."""

    class Knowing(Remembering):
        """Computes the law of the next word by a pass of the target itself."""

        def guess(self, text: Text, context: Context) -> list[Guesses]:
            normed = fresh_features(target, context.tokens, (NORMED,))[:, 0]
            logits = target.decoder._logits(normed, np.array([len(context.tokens) - 1]))[0]
            log_q = logits - np.log(np.exp(logits.astype(np.float64)).sum()).astype(np.float32)
            return [Guesses(np.arange(len(log_q)), log_q)]

    rates = {}
    for is_coupled in (True, False):
        events: list[Event] = []
        drafter = Knowing(target, shape=Shape(1, is_coupled=is_coupled))
        engine = new_engine(target, drafters=[drafter], emit=events.append)
        run_alone(engine, request(2, 1.0))
        cycles = [event for event in events if isinstance(event, Cycle)]
        rates[is_coupled] = sum(c.num_accepted for c in cycles) / sum(c.num_draft_rows for c in cycles)
    assert rates[True] == 1.0
    assert rates[False] < 0.9


def test_it_says_nothing_until_it_has_seen_the_last_row(target: Target, plain: dict[float, list[Answer]]) -> None:
    engine = new_engine(target, drafters=[knowing(target, plain[0.0][:1], Shape(1))])
    answer, num_accepted = Answer(), []
    (sequence,) = engine.submit(request(0, 0.0))
    for number, outputs in enumerate(steps(engine)):
        for output in outputs:
            answer.extend(output)
        num_accepted.append(sequence.counts.accepted)
        engine.switch(OFF if number in (1, 2) else ALL_ON)
    assert answer == plain[0.0][0]
    gained = np.diff([0, *num_accepted]).tolist()
    assert gained[:6] == [0, DEPTH, 0, 0, 0, DEPTH], "off for two passes, and one more until a row is seen again"


@pytest.mark.parametrize("shape", [Shape(1), Shape(3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_same_words_with_every_kind(
    target: Target, plain: dict[float, list[Answer]], kind: HeadKind, temperature: float, shape: Shape
) -> None:
    """With little room and shared prefixes, by a draft that was never trained; all that it guesses is verified."""
    events: list[Event] = []
    drafter = drafter_of(kind, target, shape)
    engine = new_engine(target, drafters=[drafter], emit=events.append, num_blocks=5)
    assert run_all(engine, temperature) == plain[temperature]
    assert not [event for event in events if isinstance(event, Fallback)]
    assert any(isinstance(event, Preempted) for event in events)
    rows = [event.num_draft_rows for event in events if isinstance(event, Cycle)]
    assert sum(rows) > 200
    assert max(rows) > (DEPTH * NUM_TEXTS if shape.num_children > 1 else 3)
    assert drafter.num_texts == 0, "texts that ended are kept"


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_same_words_where_it_is_weighed_whether_to_ask(
    target: Target, plain: dict[float, list[Answer]], kind: HeadKind
) -> None:
    engine = new_engine(target, drafters=[drafter_of(kind, target, Shape(2))])
    for number in range(NUM_TEXTS):
        asked = request(number, 1.0, Speculation())
        assert run_alone(engine, asked) == [plain[1.0][number]]

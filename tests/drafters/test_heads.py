"""Words from hidden states, through the engine: chains and trees, and no word but the target's own.

The head of these tests cheats. It knows what followed wherever it has met these very hidden states before: were a
single bit of what it is shown different, it would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.engines import PAGE, Answer, new_engine, run_alone, steps, tiny_target
from tests.fresh_features import fresh_features

from understudy.assembly import Target
from understudy.core.draft import EMPTY
from understudy.core.events import Cycle, Event, Preempted
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.core.switches import ALL_ON, OFF
from understudy.drafters.base import Budget, Context
from understudy.drafters.heads import HeadDrafter
from understudy.drafters.tree import Guesses, Shape
from understudy.kernels.interface import NORMED
from understudy.sampling.noise import NoiseKey

Floats = NDArray[np.float32]
NUM_WORDS = 60
NUM_TEXTS = 4
DEPTH = 4


class Remembering:
    """A head that has read the answers."""

    feature_layers = (1, NORMED)
    max_depth = DEPTH

    def __init__(self, *, right: float) -> None:
        """`right`: how sure it is of what it knows; the rest goes to three tokens that it makes up."""
        self._right = right
        self._known: dict[tuple[bytes, int], list[Sequence[int]]] = {}
        self.num_found = self.num_missed = 0

    def read(self, text: Sequence[int], features: Floats) -> None:
        """Remember what follows every token, by the hidden states at the one before it."""
        for place in range(len(text) - 2):
            following = text[place + 2 : place + 2 + DEPTH]
            self._known.setdefault((features[place].tobytes(), text[place + 1]), []).append(following)

    def guess(self, features: Floats, texts: Sequence[Sequence[int]], *, depth: int) -> list[list[Guesses]]:
        found = [self._known.get((line.tobytes(), text[-1]), []) for line, text in zip(features, texts, strict=True)]
        self.num_found += sum(map(bool, found))
        self.num_missed += len(found) - sum(map(bool, found))
        return [[self._guesses({line[d] for line in lines if d < len(line)}) for d in range(depth)] for lines in found]

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
    return tiny_target("llama")


@pytest.fixture(scope="module")
def plain(target: Target) -> dict[float, list[Answer]]:
    """The plain answers, by temperature."""
    engine = new_engine(target, prefix_cache=False)
    return {t: [run_alone(engine, request(number, t))[0] for number in range(NUM_TEXTS)] for t in (0.0, 1.0)}


def trained(target: Target, plain: Sequence[Answer], right: float = 0.7) -> Remembering:
    head = Remembering(right=right)
    for number, answer in enumerate(plain):
        text = [*request(number, 0.0).prompt_ids, *answer.token_ids]
        head.read(text, fresh_features(target, text, head.feature_layers))
    return head


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
    head = trained(target, plain[temperature])
    events: list[Event] = []
    engine = new_engine(target, drafters=[HeadDrafter(head, shape=shape)], emit=events.append, num_blocks=5)
    sequences: list[Any] = []
    submit = engine.submit
    engine.submit = lambda one: sequences.extend(submit(one))  # type: ignore[assignment, return-value, method-assign]
    assert run_all(engine, temperature) == plain[temperature]
    assert any(isinstance(event, Preempted) for event in events)
    assert any(sequence.cached_tokens for sequence in sequences)
    assert head.num_found > 20
    assert not head.num_missed, "hidden states differ from those of a fresh pass"
    counts = [sequence.counts for sequence in sequences]
    assert sum(count.accepted for count in counts) > 20
    if shape.num_children > 1:
        assert sum(count.rows for count in counts) > sum(count.drafted for count in counts), "no tree was verified"


def test_words_per_cycle_of_a_head_that_knows(target: Target, plain: dict[float, list[Answer]]) -> None:
    """Greedy, all that it guesses is right: with the target's own word, five words a pass."""
    events: list[Event] = []
    drafter = HeadDrafter(trained(target, plain[0.0][:1]), shape=Shape(1))
    engine = new_engine(target, drafters=[drafter], emit=events.append)
    assert run_alone(engine, request(0, 0.0)) == [plain[0.0][0]]
    cycles = [event for event in events if isinstance(event, Cycle)]
    assert len(cycles) == 1 + -(-(NUM_WORDS - 1) // (DEPTH + 1))


def test_the_shared_noise_picks_the_text_that_is_being_said(target: Target) -> None:
    """The guesses are the target's own law, computed from the very text: coupled, a chain is always right."""

    class Knowing(Remembering):
        """Computes the law of the next word by a pass of the target itself."""

        max_depth = 1

        def guess(self, features: Floats, texts: Sequence[Sequence[int]], *, depth: int) -> list[list[Guesses]]:
            found = []
            for text in texts:
                normed = fresh_features(target, text, (NORMED,))[:, 0]
                logits = target.decoder._logits(normed, np.array([len(text) - 1]))[0]
                log_q = logits - np.log(np.exp(logits.astype(np.float64)).sum()).astype(np.float32)
                found.append([Guesses(np.arange(len(log_q)), log_q)])
            return found

    rates = {}
    for is_coupled in (True, False):
        events: list[Event] = []
        drafter = HeadDrafter(Knowing(right=1.0), shape=Shape(1, is_coupled=is_coupled))
        engine = new_engine(target, drafters=[drafter], emit=events.append)
        run_alone(engine, request(2, 1.0))
        cycles = [event for event in events if isinstance(event, Cycle)]
        rates[is_coupled] = sum(c.num_accepted for c in cycles) / sum(c.num_draft_rows for c in cycles)
    assert rates[True] == 1.0
    assert rates[False] < 0.9


def test_it_says_nothing_until_it_has_seen_the_last_row(target: Target, plain: dict[float, list[Answer]]) -> None:
    head = trained(target, plain[0.0][:1])
    engine = new_engine(target, drafters=[HeadDrafter(head, shape=Shape(1))])
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


def test_a_context_that_it_knows_nothing_of(target: Target) -> None:
    drafter = HeadDrafter(Remembering(right=0.7), shape=Shape(2))
    context = Context(1, [3, 4, 5], 2, "", 0.0, NoiseKey(1), SamplingParams())
    budget = Budget(4, 8)
    assert drafter.propose([context], [budget]) == [EMPTY]
    rows = np.zeros((2, 2, 64), np.float32)
    drafter.see(context, 0, rows)
    assert drafter.propose([context, context], [Budget(0, 8), Budget(4, 0)]) == [EMPTY, EMPTY]
    (draft,) = drafter.propose([context], [budget])
    assert len(draft) == 8
    assert drafter.propose([], []) == []
    drafter.stop(context, finished=True)
    assert drafter.propose([context], [budget]) == [EMPTY]

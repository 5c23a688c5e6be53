"""Sampled words follow the target's law: alone, one after the other, and along any draft.

The expected laws are computed here in float64, from the definitions. Seeds are fixed, so the tests are
deterministic; `SUSPICIOUS` is the chance that a right sampler would have failed on the day they were chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.core.request import SamplingParams
from understudy.sampling.noise import NoiseKey, Purpose, _gumbel_of
from understudy.sampling.processors import Sampler, _race, filtered_weights
from understudy.sampling.verify import walk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SUSPICIOUS = 1e-6
NUM_DRAWS = 1_000_000
VOCAB_SIZE = 12
# one clear favourite, a tie of three, a middle field and a thin tail
LOGITS = np.array([0.3, 2.0, -1.0, 2.0, 2.5, 0.7, 2.0, -4.0, 1.4, -0.2, 0.7, -6.0], np.float32)

FILTERS = {
    "no filter": {},
    "top_k": {"top_k": 5},
    "top_k in a tie": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.12},
    "all three": {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
}


def law(logits: Floats, params: SamplingParams) -> Floats:
    """What the parameters say in words, in float64: temperature, then top-k, top-p and min-p, ties kept."""
    p = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        p[p < sorted(p, reverse=True)[params.top_k - 1]] = 0
    p /= p.sum()
    falling = sorted(p, reverse=True)
    needed = int(np.searchsorted(np.cumsum(falling), params.top_p)) if params.top_p < 1 else len(p) - 1
    p[p < falling[needed] * (1 - 1e-12)] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def assert_follows(counts: Ints, expected: Floats) -> None:
    """Chi-square of counts against a law; cells with fewer than 5 expected are pooled, impossible ones are empty."""
    counts, expected = counts.ravel(), expected.ravel() * counts.sum()
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 1
    assert stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue > SUSPICIOUS


@numba.njit
def race_often(
    scores: NDArray[np.float32],
    weights: NDArray[np.float32],
    best: int,
    seed: np.uint64,
    choice: int,
    positions: Ints,
    purpose: int,
) -> Ints:
    """The winner at each position, by the compiled race that the sampler calls."""
    out = np.empty(positions.shape[0], np.int64)
    for i in range(positions.shape[0]):
        out[i] = _race(scores, weights, best, seed, positions[i], choice, purpose)
    return out


def draw(params: SamplingParams, positions: Ints, *, seed: int = 1, choice: int = 0, logits: Floats = LOGITS) -> Ints:
    """Draw at many positions with the same logits, as Sampler.sample does one by one."""
    best = int(logits.argmax())
    scores = ((logits - logits[best]) / np.float32(params.temperature)).astype(np.float32)
    weights = filtered_weights(scores, params)
    return race_often(scores, weights, best, np.uint64(seed), choice, positions, int(Purpose.SAMPLE))


def sampler_of(params: SamplingParams, seed: int, choice: int = 0) -> Sampler:
    return Sampler(params, NoiseKey(seed, choice), prompt_ids=(), end_ids=(), vocab_size=VOCAB_SIZE)


class TestOneWord:
    @pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
    @pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
    def test_a_million_words_follow_the_law(self, temperature: float, filters: dict[str, float]) -> None:
        params = SamplingParams(temperature=temperature, **filters)
        words = draw(params, np.arange(NUM_DRAWS), seed=2**63 + 11)
        assert_follows(np.bincount(words, minlength=VOCAB_SIZE), law(LOGITS.astype(np.float64), params))

    @pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.05}], ids=str)
    def test_sampler_draws_the_same_words_as_the_loop(self, filters: dict[str, float]) -> None:
        """Ties the million above to the door that the engine uses, and repeats the law there."""
        params = SamplingParams(temperature=0.7, **filters)
        sampler, positions = sampler_of(params, seed=3), np.arange(50, 20_050)
        words = [sampler.sample(LOGITS.copy(), position=int(p), num_generated=0) for p in positions]
        assert words == draw(params, positions, seed=3).tolist()
        assert_follows(np.bincount(words, minlength=VOCAB_SIZE), law(LOGITS.astype(np.float64), params))

    def test_law_over_seeds_at_one_position(self) -> None:
        """Other users' seeds are neighbours, or differ in the high half only."""
        params = SamplingParams(temperature=1.0)
        seeds = [*range(10_000), *(n << 32 for n in range(1, 10_001))]
        words = [sampler_of(params, seed).sample(LOGITS.copy(), position=64, num_generated=0) for seed in seeds]
        assert_follows(np.bincount(words, minlength=VOCAB_SIZE), law(LOGITS.astype(np.float64), params))

    def test_large_vocabulary_with_a_long_tail(self) -> None:
        """49152 tokens, most of them rare: the race's shortcut must not starve the tail."""
        logits = (-1.7 * np.log(np.arange(1, 49_153))).astype(np.float32)
        np.random.default_rng(0).shuffle(logits)
        params = SamplingParams(temperature=1.0)
        words = draw(params, np.arange(4000), logits=logits)
        assert_follows(np.bincount(words, minlength=49_152), law(logits.astype(np.float64), params))
        tail = logits < np.sort(logits)[-50]
        tail_mass = law(logits.astype(np.float64), params)[tail].sum()
        assert stats.binomtest(int(tail[words].sum()), len(words), tail_mass).pvalue > SUSPICIOUS


class TestSeveralWords:
    params = SamplingParams(temperature=1.2, top_k=9)

    def joint(self, first: Ints, second: Ints) -> Ints:
        return np.bincount(first * VOCAB_SIZE + second, minlength=VOCAB_SIZE**2)

    def independent(self) -> Floats:
        p = law(LOGITS.astype(np.float64), self.params)
        return np.outer(p, p)

    @pytest.mark.parametrize("distance", [1, 2, 32])
    def test_positions_are_independent(self, distance: int) -> None:
        starts = np.arange(NUM_DRAWS // 2) * (2 * distance)
        first, second = draw(self.params, starts), draw(self.params, starts + distance)
        assert_follows(self.joint(first, second), self.independent())

    def test_choices_of_a_request_are_independent(self) -> None:
        positions = np.arange(NUM_DRAWS // 2)
        first, second = draw(self.params, positions, choice=0), draw(self.params, positions, choice=1)
        assert_follows(self.joint(first, second), self.independent())

    def test_neighbouring_seeds_are_independent(self) -> None:
        positions = np.arange(NUM_DRAWS // 2)
        first, second = draw(self.params, positions, seed=8), draw(self.params, positions, seed=9)
        assert_follows(self.joint(first, second), self.independent())


NUM_WALKS = 200_000
NUM_STATES = 5
LENGTH = 3
START = 0
TARGET = np.random.default_rng(7).normal(size=(NUM_STATES, NUM_STATES)).astype(np.float32) * 1.5  # [last, next] logits
NOISY_TWIN = TARGET + np.random.default_rng(8).normal(size=TARGET.shape).astype(np.float32) * 0.7


@dataclass(frozen=True)
class Dice:
    """What the target would say in each walk at each place after each token, and the noise that decides it."""

    said: list[list[list[int]]]
    """[walks, LENGTH, NUM_STATES]"""
    ranked: list[list[list[list[int]]]]
    """[walks, LENGTH, NUM_STATES, 2] the noisy twin's best two tokens by log q + the same noise"""


Drafter = Callable[[Dice, int, int, int], Draft]
"""dice, walk, place, last token -> draft"""


@pytest.fixture(scope="module")
def dice() -> Dice:
    params, purpose = SamplingParams(temperature=1.0), int(Purpose.SAMPLE)
    positions = np.arange(NUM_WALKS * LENGTH)
    said = np.empty((NUM_WALKS, LENGTH, NUM_STATES), np.int64)
    for last in range(NUM_STATES):
        said[:, :, last] = draw(params, positions, logits=TARGET[last]).reshape(NUM_WALKS, LENGTH)
    noise = noise_at(positions, purpose).reshape(NUM_WALKS, LENGTH, 1, NUM_STATES)
    ranked = np.argsort(-(NOISY_TWIN[None, None] + noise), axis=-1)[..., :2]
    return Dice(said.tolist(), ranked.tolist())


@numba.njit
def noise_at(positions: Ints, purpose: int) -> Floats:
    """The noise of every token at each position, for the seed of `draw`."""
    tokens = np.arange(NUM_STATES)
    out = np.empty((positions.shape[0], NUM_STATES))
    for i in range(positions.shape[0]):
        out[i] = _gumbel_of(np.uint64(1), positions[i], 0, purpose, tokens)
    return out


def tree_of(paths: list[tuple[int, ...]]) -> Draft:
    """The tree of these paths and their beginnings, in the order given."""
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    for path in paths:
        for end in range(1, len(path) + 1):
            nodes.setdefault(path[:end], len(nodes) - 1)
    found = [path for path in nodes if path]
    parents = tuple(nodes[path[:-1]] for path in found)
    return Draft(tuple(path[-1] for path in found), parents, (0.5,) * len(found), ("test",) * len(found))


def draft_nothing(dice: Dice, number: int, place: int, last: int) -> Draft:
    return EMPTY


def draft_badly(dice: Dice, number: int, place: int, last: int) -> Draft:
    """Always the tokens that the target likes least, as a chain."""
    first = int(TARGET[last].argmin())
    return tree_of([(first, int(TARGET[first].argmin()))])


def draft_coupled(dice: Dice, number: int, place: int, last: int) -> Draft:
    """Two children a node, the best of log q + the target's own noise."""
    paths: list[tuple[int, ...]] = []
    for first in dice.ranked[number][place][last]:
        paths.append((first,))
        if place + 1 < LENGTH:
            paths.extend((first, second) for second in dice.ranked[number][place + 1][first])
    return tree_of(paths)


def random_tree(choose: random.Random) -> Draft:
    """Up to seven random paths of up to three tokens."""
    num_paths = choose.randint(0, 7)
    return tree_of([tuple(choose.choices(range(NUM_STATES), k=choose.randint(1, 3))) for _ in range(num_paths)])


RANDOM_TREES = [random_tree(random.Random(number)) for number in range(997)]


def draft_at_random(dice: Dice, number: int, place: int, last: int) -> Draft:
    return RANDOM_TREES[(number * LENGTH + place) % len(RANDOM_TREES)]


def draft_with_intent(dice: Dice, number: int, place: int, last: int) -> Draft:
    """A drafter that knows the target's word and proposes it only where it likes it: it must not get its way."""
    word = dice.said[number][place][last]
    return tree_of([(word,)]) if word in (3, 4) else tree_of([((word + 1) % NUM_STATES,)])


DRAFTERS: list[Drafter] = [draft_nothing, draft_badly, draft_coupled, draft_at_random, draft_with_intent]


def speak(dice: Dice, number: int, drafter: Drafter) -> tuple[list[int], int]:
    """LENGTH words of one walk, cycle by cycle as an engine would, and how many drafted tokens were accepted."""
    text = [START]
    num_accepted = 0

    def target_word(row: int) -> int:
        """The row's logits are those after the last committed token: the consumer appends before it asks again."""
        return dice.said[number][len(text) - 1][text[-1]]

    while len(text) <= LENGTH:
        for word in walk(drafter(dice, number, len(text) - 1, text[-1]), target_word):
            text.append(word.token)
            num_accepted += word.node is not None
            if len(text) > LENGTH:
                break
    return text[1:], num_accepted


class TestAlongADraft:
    @pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.__name__)
    def test_the_joint_law_is_the_targets(self, dice: Dice, drafter: Drafter) -> None:
        counts = np.zeros((NUM_STATES,) * LENGTH, np.int64)
        accepted = 0
        for number in range(NUM_WALKS):
            words, num_accepted = speak(dice, number, drafter)
            counts[tuple(words)] += 1
            accepted += num_accepted
        steps = np.stack([law(row.astype(np.float64), SamplingParams()) for row in TARGET])  # [last, next]
        assert_follows(counts, np.einsum("a,ab,bc->abc", steps[START], steps, steps))
        assert accepted > 0 or drafter is draft_nothing  # else the drafts had no part in it

    def test_coupling_makes_better_guesses_than_ranking(self, dice: Dice) -> None:
        """The reason to add the target's noise to q: one guess each, with the noise and without it."""
        numbers = range(20_000)
        words = [dice.said[number][0][START] for number in numbers]
        coupled = sum(dice.ranked[number][0][START][0] == word for number, word in zip(numbers, words, strict=True))
        assert coupled > 1.2 * words.count(int(NOISY_TWIN[START].argmax()))

"""The noise against published answers, against its slow twin, and against what independent noise looks like.

Every statistical test is deterministic: its seeds are fixed. `SUSPICIOUS` is the chance that good noise would have
failed it on the day the seeds were chosen.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from understudy.sampling.noise import NoiseKey, Purpose, gumbel, reference_gumbel, reference_philox, reference_uniform
from understudy.sampling.noise import uniform as compiled_uniform

Floats = NDArray[np.float64]
Words = tuple[int, int, int, int]

SUSPICIOUS = 1e-6
LARGEST_WORD = 2**32 - 1
LARGEST_SEED = 2**64 - 1
NUM_PAIRS = 200_000

# Random123's tests/kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
PUBLISHED: list[tuple[Words, tuple[int, int], Words]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LARGEST_WORD,) * 4, (LARGEST_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

words = st.integers(0, LARGEST_WORD)
seeds = st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, LARGEST_SEED]), st.integers(0, LARGEST_SEED))


def seed_of(key: tuple[int, int]) -> int:
    return key[0] | key[1] << 32


def uniform_at(seed: int, token: int, position: int, choice: int = 0, purpose: int = 0) -> float:
    """One number out of the compiled code."""
    coordinates = np.array([[seed, token, position, choice, purpose]], np.uint64)
    return float(uniforms(coordinates)[0])


@numba.njit
def uniforms(coordinates: NDArray[np.uint64]) -> Floats:
    """The compiled numbers at [count, 5] coordinates: seed, token, position, choice, purpose."""
    out = np.empty(coordinates.shape[0])
    for i in range(coordinates.shape[0]):
        seed, token, position, choice, purpose = coordinates[i]
        out[i] = compiled_uniform(
            seed, np.uint32(token), np.uint32(position), np.uint32(choice), np.uint32(purpose)
        )  # fmt: skip
    return out


def grid(*, seed: int = 5, token: int = 7, position: int = 100, choice: int = 0, along: str, count: int) -> Floats:
    """`count` numbers that differ in one coordinate only, which grows by one."""
    names = ("seed", "token", "position", "choice", "purpose")
    start = dict(zip(names, (seed, token, position, choice, int(Purpose.SAMPLE)), strict=True))
    coordinates = np.empty((count, len(names)), np.uint64)
    for column, name in enumerate(names):
        coordinates[:, column] = start[name]
    coordinates[:, names.index(along)] += np.arange(count, dtype=np.uint64)
    return uniforms(coordinates)


def inverse_philox(answer: Words, key: tuple[int, int]) -> Words:
    """The counter whose block is `answer`: every round can be undone, because its multipliers are odd."""
    m0, m1 = 0xD2511F53, 0xCD9E8D57
    inverse0, inverse1 = pow(m0, -1, 2**32), pow(m1, -1, 2**32)
    c0, c1, c2, c3 = answer
    for round_number in reversed(range(10)):
        k0 = (key[0] + round_number * 0x9E3779B9) & LARGEST_WORD
        k1 = (key[1] + round_number * 0xBB67AE85) & LARGEST_WORD
        before0, before2 = c3 * inverse0 & LARGEST_WORD, c1 * inverse1 & LARGEST_WORD
        c0, c1, c2, c3 = before0, c0 ^ (m1 * before2 >> 32) ^ k0, before2, c2 ^ (m0 * before0 >> 32) ^ k1
    return c0, c1, c2, c3


def assert_independent_pairs(first: Floats, second: Floats, *, bins: int = 16) -> None:
    """Both must be uniform together (chi-square over bins x bins cells) and not correlated."""
    cells = np.histogram2d(first, second, bins=bins, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(cells.ravel()).pvalue > SUSPICIOUS
    assert stats.pearsonr(first, second).pvalue > SUSPICIOUS
    assert stats.pearsonr(np.abs(first - 0.5), np.abs(second - 0.5)).pvalue > SUSPICIOUS


class TestKnownAnswers:
    @pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
    def test_reference_gives_the_published_block(self, counter: Words, key: tuple[int, int], answer: Words) -> None:
        assert reference_philox(counter, key) == answer

    @pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
    def test_compiled_code_gives_the_published_block(
        self, counter: Words, key: tuple[int, int], answer: Words
    ) -> None:  # fmt: skip
        """The first 52 bits of the block, half a step up."""
        bits = (answer[0] << 32 | answer[1]) >> 12
        assert uniform_at(seed_of(key), *counter) == (bits + 0.5) / 2**52

    def test_the_counter_is_token_position_choice_purpose_and_the_key_is_the_seed(self) -> None:
        high, low, _, _ = reference_philox((11, 22, 33, int(Purpose.SAMPLE)), (44, 55))
        u = (((high << 32 | low) >> 12) + 0.5) / 2**52
        (noise,) = gumbel(NoiseKey(seed_of((44, 55)), 33), 22, np.array([11]))
        assert noise == -math.log(-math.log(u))


class TestTwins:
    @settings(max_examples=300, deadline=None)
    @given(seeds, words, words, words, words)
    @example(0, 0, 0, 0, 0)
    @example(LARGEST_SEED, LARGEST_WORD, LARGEST_WORD, LARGEST_WORD, LARGEST_WORD)
    def test_uniform_equals_its_twin(self, seed: int, token: int, position: int, choice: int, purpose: int) -> None:
        expected = reference_uniform(seed, token, position, choice, purpose)
        assert uniform_at(seed, token, position, choice, purpose) == expected

    @settings(max_examples=300, deadline=None)
    @given(seeds, st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(0, 2**31 - 1), st.integers(0, 127))
    @example(0, [0], 0, 0)
    @example(LARGEST_SEED, [2**31 - 1], 2**31 - 1, 127)
    def test_gumbel_equals_its_twin_bit_for_bit(self, seed: int, tokens: list[int], position: int, choice: int) -> None:
        key = NoiseKey(seed, choice)
        expected = [reference_gumbel(key, position, token) for token in tokens]
        assert gumbel(key, position, np.array(tokens, np.int64)).tolist() == expected

    def test_gumbel_does_not_depend_on_the_tokens_asked_together(self) -> None:
        key, tokens = NoiseKey(3), np.arange(5000)
        together = gumbel(key, 9, tokens)
        assert gumbel(key, 9, tokens[::-1].copy()).tolist() == together[::-1].tolist()
        assert [gumbel(key, 9, tokens[i : i + 1])[0] for i in range(0, 5000, 97)] == together[::97].tolist()


class TestRange:
    @pytest.mark.parametrize("seed", [0, 1, LARGEST_SEED])
    @pytest.mark.parametrize(
        ("answer", "u"),
        [
            ((0, 0, 0, 0), 2.0**-53),
            ((0, 1 << 12, 0, 0), 3 * 2.0**-53),
            ((LARGEST_WORD,) * 4, 1 - 2.0**-53),
            ((1 << 31, 0, 0, 0), 0.5 + 2.0**-53),
            (((1 << 31) - 1, LARGEST_WORD, 0, 0), 0.5 - 2.0**-53),
        ],
    )
    def test_extreme_words_stay_strictly_inside(self, seed: int, answer: Words, u: float) -> None:
        """Philox can be undone, so there is a counter that gives each extreme block; feed it to both twins."""
        counter = inverse_philox(answer, (seed & LARGEST_WORD, seed >> 32))
        assert reference_uniform(seed, *counter) == u
        assert uniform_at(seed, *counter) == u
        assert 0.0 < u < 1.0
        assert math.isfinite(-math.log(-math.log(u)))

    def test_a_million_numbers_are_inside(self) -> None:
        u = grid(along="token", count=1_000_000)
        assert u.min() > 0.0
        assert u.max() < 1.0


class TestNoCollisions:
    @settings(max_examples=200, deadline=None)
    @given(st.tuples(words, words, words, words), st.tuples(words, words))
    def test_different_counters_never_share_a_block(self, counter: Words, key: tuple[int, int]) -> None:
        """A block tells its counter, so no two counters of a seed have the same one."""
        assert inverse_philox(reference_philox(counter, key), key) == counter

    def test_numbers_of_a_neighbourhood_are_distinct(self) -> None:
        """524288 numbers of 52 bits: two of them are equal by chance once in 30000 such tests."""
        steps = (range(8), range(64), range(64), range(16), range(1))  # seed, token, position, choice, purpose
        coordinates = np.stack([axis.ravel() for axis in np.meshgrid(*steps, indexing="ij")], axis=1).astype(np.uint64)
        assert len(np.unique(uniforms(coordinates))) == len(coordinates) == 524_288

    @pytest.mark.parametrize("bit", [0, 1, 31, 32, 33, 63])
    def test_every_bit_of_the_seed_counts(self, bit: int) -> None:
        here, there = grid(seed=0, along="token", count=1000), grid(seed=1 << bit, along="token", count=1000)
        assert not np.any(here == there)


class TestIndependence:
    @pytest.mark.parametrize("along", ["token", "position", "choice", "seed"])
    def test_uniform_along_every_coordinate(self, along: str) -> None:
        u = grid(along=along, count=NUM_PAIRS)
        assert stats.kstest(u, "uniform").pvalue > SUSPICIOUS
        low_bits = (u * 2**52).astype(np.int64) & 0xFF  # the bits that the bins of the other tests never see
        assert stats.chisquare(np.bincount(low_bits, minlength=256)).pvalue > SUSPICIOUS

    @pytest.mark.parametrize("along", ["token", "position", "choice", "seed"])
    @pytest.mark.parametrize("lag", [1, 2, 32, 256])
    def test_serial_pairs_along_every_coordinate(self, along: str, lag: int) -> None:
        u = grid(along=along, count=NUM_PAIRS + lag)
        assert_independent_pairs(u[:-lag], u[lag:])

    @pytest.mark.parametrize("along", ["token", "position", "choice", "seed"])
    def test_serial_triples_along_every_coordinate(self, along: str) -> None:
        triples = grid(along=along, count=3 * NUM_PAIRS).reshape(-1, 3)
        cells = np.histogramdd(triples, bins=8, range=[(0, 1)] * 3)[0]
        assert stats.chisquare(cells.ravel()).pvalue > SUSPICIOUS

    @pytest.mark.parametrize(
        "neighbour",
        [{"token": 8}, {"token": 7 ^ 1 << 15}, {"choice": 1}, {"choice": 127}, {"seed": 6}, {"seed": 5 + (1 << 32)}],
        ids=str,
    )
    def test_neighbours_are_independent_at_every_position(self, neighbour: dict[str, int]) -> None:
        """Two tokens of one race, two choices of one request, two requests with neighbouring seeds."""
        assert_independent_pairs(
            grid(along="position", count=NUM_PAIRS), grid(along="position", count=NUM_PAIRS, **neighbour)
        )

    def test_position_and_token_do_not_stand_in_for_each_other(self) -> None:
        """(token t, position p) against (token p, position t), and against (t + 1, p - 1)."""
        place = np.arange(NUM_PAIRS, dtype=np.uint64)
        token, position = place % np.uint64(449), np.uint64(500) + place // np.uint64(449)
        rest = np.zeros(NUM_PAIRS, np.uint64)

        def at(token: NDArray[np.uint64], position: NDArray[np.uint64]) -> Floats:
            return uniforms(np.stack([rest, token, position, rest, rest], axis=1))

        assert_independent_pairs(at(token, position), at(position, token))
        assert_independent_pairs(at(token, position), at(token + np.uint64(1), position - np.uint64(1)))


@pytest.fixture(scope="module")
def noise() -> Floats:
    return gumbel(NoiseKey(12345), 77, np.arange(500_000))


class TestGumbelLaw:
    def test_mean_and_variance(self, noise: Floats) -> None:
        """Within five standard errors: a false alarm once in 1.7 million."""
        count, variance = len(noise), math.pi**2 / 6
        kurtosis = 3 + 12 / 5
        assert abs(noise.mean() - np.euler_gamma) < 5 * math.sqrt(variance / count)
        assert abs(noise.var() - variance) < 5 * variance * math.sqrt((kurtosis - 1) / count)

    def test_whole_law(self, noise: Floats) -> None:
        assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > SUSPICIOUS

    def test_largest_of_many_is_where_it_should_be(self, noise: Floats) -> None:
        """The largest of n is Gumbel moved up by log n: the race of equal scores is fair in the tail too."""
        largest = noise.reshape(-1, 1000).max(axis=1) - math.log(1000)
        assert stats.kstest(largest, stats.gumbel_r.cdf).pvalue > SUSPICIOUS

"""From logits to a word: fast paths equal their slow twins exactly, and both do what the parameters say."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from understudy.core.request import SamplingParams
from understudy.sampling.noise import NoiseKey, Purpose
from understudy.sampling.processors import (
    Penalties,
    Sampler,
    _race,
    filtered_weights,
    log_probabilities,
    reference_race,
    reference_weights,
)

Floats = NDArray[np.float32]

many = settings(max_examples=300, deadline=None)


@st.composite
def logit_rows(draw: st.DrawFn, max_size: int = 400) -> Floats:
    """Rows with many ties, with excluded tokens, spread wide or narrow; at least one token is possible."""
    size = draw(st.integers(1, max_size))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["smooth", "ties", "all equal", "steep", "huge", "neighbours"]))
    row = {
        "smooth": numbers.normal(size=size) * 3,
        "ties": numbers.integers(-3, 3, size).astype(float),
        "all equal": np.full(size, numbers.normal()),
        "steep": -np.arange(size) * numbers.uniform(0.1, 30),
        "huge": numbers.choice([-3e38, -1e30, -88.0, 0.0, 1e-38, 1.0, 1e30, 3e38], size),
        "neighbours": 5.0 + numbers.integers(0, 4, size) * 2.0**-21,  # steps of one unit in the last place
    }[kind].astype(np.float32)
    numbers.shuffle(row)
    excluded = numbers.random(size) < draw(st.sampled_from([0.0, 0.0, 0.3, 0.95]))
    excluded[numbers.integers(size)] = False
    row[excluded] = -np.inf
    return row


temperatures = st.sampled_from([1e-300, 1e-30, 1e-6, 0.3, 0.7, 1.0, 1.5, 100.0])
filters = st.fixed_dictionaries(
    {
        "top_k": st.one_of(st.just(0), st.sampled_from([1, 2, 5, 40, 399, 400, 10**6])),
        "top_p": st.one_of(st.just(1.0), st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-53])),
        "min_p": st.one_of(st.just(0.0), st.sampled_from([1e-50, 1e-6, 0.05, 0.5, 1.0])),
    }
)


def scores_of(logits: Floats, temperature: float) -> Floats:
    """As `Sampler.sample` makes them: 0 at the best."""
    with np.errstate(over="ignore"):
        shifted = logits - logits.max()
        return shifted / np.float32(max(temperature, np.finfo(np.float32).tiny))


def sampler_of(params: SamplingParams, size: int, *, key: NoiseKey | None = None, **known: tuple[int, ...]) -> Sampler:
    given = {"prompt_ids": (), "end_ids": (), **known}
    return Sampler(params, key or NoiseKey(0), vocab_size=size, **given)


def word_of(logits: list[float] | Floats, *, position: int = 0, **params: float) -> int:
    row = np.array(logits, np.float32)
    return sampler_of(SamplingParams(**params), row.size).sample(row, position=position, num_generated=0)


def kept(scores: list[float], **params: float) -> list[int]:
    """The tokens that the filters leave in the race; both twins must agree."""
    row = np.array(scores, np.float32)
    weights = filtered_weights(row, SamplingParams(**params))
    assert np.array_equal(weights, reference_weights(row, SamplingParams(**params)))
    return np.flatnonzero(weights).tolist()


class TestTwins:
    @many
    @given(logit_rows(), temperatures, filters)
    @example(np.array([0.0], np.float32), 1.0, {"top_k": 1, "top_p": 0.5, "min_p": 1.0})
    def test_weights(self, logits: Floats, temperature: float, values: dict[str, float]) -> None:
        params, scores = SamplingParams(**values), scores_of(logits, temperature)
        assert np.array_equal(filtered_weights(scores.copy(), params), reference_weights(scores.copy(), params))

    @many
    @given(logit_rows(), temperatures, filters, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1), st.integers(0, 9))
    def test_race(
        self,
        logits: Floats,
        temperature: float,
        values: dict[str, float],
        seed: int,
        position: int,
        choice: int,
    ) -> None:
        scores, key = scores_of(logits, temperature), NoiseKey(seed, choice)
        weights = filtered_weights(scores, SamplingParams(**values))
        winner = _race(
            scores, weights, int(logits.argmax()), np.uint64(seed), position, choice, int(Purpose.SAMPLE)
        )  # fmt: skip
        assert winner == reference_race(scores, weights, key, position)

    @many
    @given(logit_rows(), temperatures, filters, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
    def test_the_whole_sampler(
        self, logits: Floats, temperature: float, values: dict[str, float], seed: int, position: int
    ) -> None:
        params, key = SamplingParams(temperature=temperature, **values), NoiseKey(seed)
        scores = scores_of(logits, temperature)
        expected = reference_race(scores, reference_weights(scores, params), key, position)
        word = sampler_of(params, logits.size, key=key).sample(logits.copy(), position=position, num_generated=0)
        assert word == expected

    def test_a_real_sized_row_over_many_positions(self) -> None:
        """49152 tokens, where the cut of top-p and the shortcut of the race have something to skip."""
        logits = np.random.default_rng(1).normal(size=49_152).astype(np.float32) * 2.5
        scores = scores_of(logits, 1.0)
        for top_p in (0.3, 0.95, 0.9999):
            params = SamplingParams(top_p=top_p)
            assert np.array_equal(filtered_weights(scores, params), reference_weights(scores, params))
        weights, best = filtered_weights(scores, SamplingParams()), int(logits.argmax())
        for position in range(5):
            winner = _race(scores, weights, best, np.uint64(3), position, 0, int(Purpose.SAMPLE))
            assert winner == reference_race(scores, weights, NoiseKey(3), position)


class TestTemperature:
    @many
    @given(logit_rows())
    def test_zero_takes_the_lowest_id_of_the_largest(self, logits: Floats) -> None:
        lowest = min(token for token, logit in enumerate(logits) if logit == max(logits))
        assert word_of(logits, temperature=0.0) == lowest

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45, 5e-324])
    def test_a_tiny_one_takes_the_largest(self, temperature: float) -> None:
        words = {word_of([1.0, 4.9, 5.0, -1e30], position=p, temperature=temperature) for p in range(200)}
        assert words == {2}

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
    def test_a_tiny_one_still_draws_among_equals(self, temperature: float) -> None:
        words = Counter(word_of([5.0, 1.0, 5.0], position=p, temperature=temperature) for p in range(400))
        assert set(words) == {0, 2}
        assert min(words.values()) > 140  # 6 standard deviations below 200

    def test_zero_ignores_filters_and_seed(self) -> None:
        for seed in range(20):
            sampler = sampler_of(SamplingParams(temperature=0.0, top_k=1, top_p=0.1), 3, key=NoiseKey(seed))
            assert sampler.sample(np.array([1, 3, 3], np.float32), position=seed, num_generated=0) == 1


class TestFilters:
    def test_top_k_keeps_every_tie_with_the_kth(self) -> None:
        assert kept([0, -1, -2, -1, -1, -3], top_k=2) == [0, 1, 3, 4]

    @pytest.mark.parametrize("top_k", [0, 6, 7, 10**6])
    def test_top_k_of_none_or_all_keeps_all(self, top_k: int) -> None:
        assert kept([0, -1, -2, -1, -1, -3], top_k=top_k) == [0, 1, 2, 3, 4, 5]

    def test_top_p_stops_where_the_mass_is_reached(self) -> None:
        halves = [math.log(2.0**-n) for n in range(1, 8)]  # masses 1/2, 1/4, ... of the whole
        scores = [score - halves[0] for score in halves]
        assert kept(scores, top_p=0.4) == [0]
        assert kept(scores, top_p=0.7) == [0, 1]
        assert kept(scores, top_p=0.8) == [0, 1, 2]
        assert kept(scores, top_p=1.0) == [0, 1, 2, 3, 4, 5, 6]

    def test_top_p_keeps_every_tie_with_the_last(self) -> None:
        assert kept([-1, 0, -1, -1, -5], top_p=0.5) == [0, 1, 2, 3]

    def test_top_p_keeps_at_least_the_best(self) -> None:
        assert kept([-0.1, 0, -0.1], top_p=1e-300) == [1]

    def test_top_p_counts_what_top_k_left(self) -> None:
        """Masses .4 .3 .2 .1: of the top two, .4 is more than half."""
        scores = [math.log(mass / 0.4) for mass in (0.4, 0.3, 0.2, 0.1)]
        assert kept(scores, top_p=0.5) == [0, 1]
        assert kept(scores, top_p=0.5, top_k=2) == [0]

    def test_min_p_is_relative_to_the_best(self) -> None:
        scores = [0.0, math.log(0.26), math.log(0.24), -np.inf]
        assert kept(scores, min_p=0.25) == [0, 1]
        assert kept(scores, min_p=1.0) == [0]

    @many
    @given(logit_rows(), filters)
    def test_filters_cut_by_value_and_never_the_best(self, logits: Floats, values: dict[str, float]) -> None:
        """What is kept lies above a threshold, so ties stand and fall together; its weights are as they were."""
        scores = scores_of(logits, 1.0)
        weights = filtered_weights(scores, SamplingParams(**values))
        inside = weights > 0
        assert inside[logits.argmax()]
        assert not inside.all() or np.array_equal(weights, np.exp(scores))
        assert np.array_equal(weights[inside], np.exp(scores)[inside])
        possible = np.exp(scores) > 0
        assert scores[inside].min() > scores[possible & ~inside].max(initial=-np.inf)


def penalised(logits: Floats, prompt: list[int], said: list[int], params: SamplingParams) -> list[float]:
    """The definitions, token by token: repetition looks at prompt and answer, the other two at the answer."""
    out = [float(logit) for logit in logits]
    for token in set(prompt) | set(said):
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, count in Counter(said).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


class TestPenalties:
    @many
    @given(
        st.lists(st.sampled_from([-8.0, -1.0, 0.0, 0.5, 3.0, 20.0, -np.inf]), min_size=8, max_size=8),
        st.lists(st.integers(0, 7), max_size=12),
        st.lists(st.integers(0, 7), max_size=12),
        st.sampled_from([1.0, 0.5, 1.3, 100.0]),
        st.sampled_from([0.0, -2.0, 0.7, 100.0]),
        st.sampled_from([0.0, -1.5, 0.3]),
    )
    def test_they_do_what_they_say(
        self, row: list[float], prompt: list[int], said: list[int], repetition: float, frequency: float, presence: float
    ) -> None:
        params = SamplingParams(
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
        )  # fmt: skip
        logits = np.array(row, np.float32)
        expected = penalised(logits, prompt, said, params)
        penalties = Penalties(params, prompt, 8)
        for token in said:
            penalties.append(token)
        penalties.apply(logits)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)

    def test_sampler_penalises_committed_tokens_only(self) -> None:
        """Drawing alone changes nothing; `append` does."""
        sampler = sampler_of(SamplingParams(temperature=0.0, presence_penalty=1.5), 3)
        row = np.array([2.0, 1.0, 0.0], np.float32)
        assert [sampler.sample(row.copy(), position=p, num_generated=p) for p in range(3)] == [0, 0, 0]
        sampler.append(0)
        assert sampler.sample(row.copy(), position=3, num_generated=1) == 1

    def test_repetition_penalty_counts_the_prompt_and_presence_does_not(self) -> None:
        row = np.array([2.0, 1.5], np.float32)
        repetition = SamplingParams(temperature=0.0, repetition_penalty=2.0)
        presence = SamplingParams(temperature=0.0, presence_penalty=2.0)
        assert sampler_of(repetition, 2, prompt_ids=(0,)).sample(row.copy(), position=1, num_generated=0) == 1
        assert sampler_of(presence, 2, prompt_ids=(0,)).sample(row.copy(), position=1, num_generated=0) == 0


class TestBiasAndMinimum:
    def test_bias_is_added(self) -> None:
        sampler = sampler_of(SamplingParams(logit_bias={2: 5.0, 0: -1.0}), 4)
        logits = np.array([1, 1, 1, 1], np.float32)
        sampler.adjust(logits, 0)
        assert logits.tolist() == [0, 1, 6, 1]

    def test_bias_comes_before_the_repetition_penalty(self) -> None:
        """A bias that turns a logit's sign also turns what the penalty does to it."""
        sampler = sampler_of(SamplingParams(logit_bias={0: -4.0}, repetition_penalty=2.0), 2, prompt_ids=(0, 1))
        logits = np.array([1.0, 1.0], np.float32)
        sampler.adjust(logits, 0)
        assert logits.tolist() == [-6.0, 0.5]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_large_bias_decides(self, temperature: float) -> None:
        params = {"temperature": temperature, "logit_bias": {1: 100.0}}
        assert {word_of([5.0, -5.0, 0.0], position=p, **params) for p in range(50)} == {1}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_no_end_before_min_tokens(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, min_tokens=3, logit_bias={0: 100.0, 2: 100.0})
        sampler = sampler_of(params, 3, end_ids=(2, 0))
        rows = [sampler.sample(np.zeros(3, np.float32), position=n, num_generated=n) for n in range(6)]
        assert rows[:3] == [1, 1, 1]
        assert set(rows[3:]) <= {0, 2}


class TestLogProbabilities:
    @many
    @given(logit_rows(max_size=60))
    def test_they_sum_to_one(self, logits: Floats) -> None:
        logprobs = [log_probabilities(logits, token, 0).logprob for token in range(logits.size)]
        assert math.fsum(math.exp(logprob) for logprob in logprobs) == pytest.approx(1.0, abs=1e-9)

    @many
    @given(logit_rows(max_size=60), st.integers(0, 100))
    def test_top_is_best_first_and_the_lower_id_on_a_tie(self, logits: Floats, num_top: int) -> None:
        expected = sorted(range(logits.size), key=lambda token: (-logits[token], token))[:num_top]
        found = log_probabilities(logits, 0, num_top)
        assert [token for token, _ in found.top] == expected
        assert all(logprob == log_probabilities(logits, token, 0).logprob for token, logprob in found.top)

    def test_values_and_the_token_itself(self) -> None:
        found = log_probabilities(np.array([0, math.log(3), -np.inf], np.float32), 0, 1)
        assert found.token_id == 0
        assert found.logprob == pytest.approx(math.log(0.25))
        assert found.top == ((1, pytest.approx(math.log(0.75))),)

    def test_logits_are_left_alone(self) -> None:
        logits = np.array([1.0, 2.0, 2.0], np.float32)
        log_probabilities(logits, 1, 2)
        assert logits.tolist() == [1.0, 2.0, 2.0]


class TestBrokenLogits:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "row",
        [
            [math.nan, 1.0],
            [1.0, math.nan],
            [math.nan, math.nan],
            [math.inf, 1.0],
            [math.inf, math.inf],
            [math.inf, math.nan, -math.inf],
            [-math.inf, -math.inf],
        ],
        ids=str,
    )
    def test_they_are_an_error_and_never_a_word(self, row: list[float], temperature: float) -> None:
        with pytest.raises(FloatingPointError, match="position 17"):
            word_of(row, position=17, temperature=temperature)

    def test_minus_infinity_alone_is_no_error(self) -> None:
        assert word_of([-math.inf, -3.0, -math.inf], temperature=1.0) == 1

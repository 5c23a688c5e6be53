"""From the target's logits at one row to its word there.

In this order: bias, repetition, frequency and presence penalties, grammar and minimum length; then temperature,
top-k, top-p, min-p; then the race of logit + noise. Logits and weights are fp32, the race is in double precision. It
all runs on one row at a time, for committed tokens only, so a drafted path and a plain one go through the same
numbers.

All three filters come down to weights that are set to zero: a token whose weight is zero does not take part in the
race. `Sampler` is fast; `reference_weights` and `reference_race` are its slow twins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit
from understudy.core.request import SamplingParams, TokenLogprob
from understudy.sampling.contenders import LANES, contenders
from understudy.sampling.noise import NoiseKey, Purpose, reference_gumbel, uniform

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

_SLACK = 1.0 + 1e-5
"""How far the cheap bound of the race is widened, to cover the rounding of fp32 weights."""
_MOST_FLOAT = float(np.finfo(np.float32).max)
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""Lower ones would be 0 in fp32; at this one the largest logit and its ties are alone already."""


class Penalties:
    """Counts of the tokens seen so far, and what they do to the logits. Advances on committed tokens only."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int], vocab_size: int) -> None:
        self._params = params
        self._generated = np.zeros(vocab_size, np.int32)
        self._seen = np.zeros(vocab_size, np.bool_)
        if params.repetition_penalty != 1.0:
            self._seen[np.fromiter(prompt_ids, np.int64)] = True

    def append(self, token: int) -> None:
        """Count a committed token."""
        self._generated[token] += 1
        self._seen[token] = True

    def apply(self, logits: Floats) -> None:
        """Lower the logits of tokens that were seen, in place. logits [vocabulary]."""
        params = self._params
        if params.repetition_penalty != 1.0:
            ids = np.flatnonzero(self._seen)
            factor = np.float32(params.repetition_penalty)
            old = logits[ids]
            logits[ids] = np.where(old > 0, old / factor, old * factor)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            ids = np.flatnonzero(self._generated)
            counts = self._generated[ids].astype(np.float32)
            logits[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)


class Sampler:
    """Draws the words of one choice of one request."""

    def __init__(
        self,
        params: SamplingParams,
        key: NoiseKey,
        *,
        prompt_ids: Iterable[int],
        end_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.key = key
        self._end_ids = np.array(sorted(set(end_ids)), np.int64)
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[int(i)] for i in self._bias_ids], np.float32)
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        self._penalties = Penalties(params, prompt_ids, vocab_size) if penalised else None

    @property
    def remembers(self) -> bool:
        """Whether words that were said change those to come."""
        return self._penalties is not None

    def append(self, token: int) -> None:
        """Let a committed token count for the penalties."""
        if self._penalties is not None:
            self._penalties.append(token)

    def sample(self, logits: Floats, *, position: int, num_generated: int, allowed: Bools | None = None) -> int:
        """Return the word at `position`, one of those `allowed` [vocabulary] if that is given.

        logits [vocabulary] is used up: it is changed in place.
        """
        self.adjust(logits, num_generated, allowed)
        best = int(logits.argmax())  # the lowest id on a tie
        if not math.isfinite(logits[best]):
            raise FloatingPointError(f"the model's logits at position {position} are not finite")
        if self.params.temperature == 0.0:
            return best
        temperature = np.float32(max(float(self.params.temperature), _LEAST_TEMPERATURE))
        with np.errstate(over="ignore"):  # what is too far behind for fp32 is -inf: out of the race
            scores = (logits - logits[best]) / temperature  # [vocabulary], 0 at the best
        weights = filtered_weights(scores, self.params)
        key = self.key
        return int(_race(scores, weights, best, np.uint64(key.seed), position, key.choice, int(Purpose.SAMPLE)))

    def adjust(self, logits: Floats, num_generated: int, allowed: Bools | None = None) -> None:
        """Apply bias, penalties, what is allowed and the minimum length, in place."""
        if self._bias_ids.size:
            logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(logits)
        is_early = num_generated < self.params.min_tokens
        if allowed is not None:
            logits[~(self._without_ends(allowed) if is_early else allowed)] = -np.inf
        elif is_early:
            logits[self._end_ids] = -np.inf

    def _without_ends(self, allowed: Bools) -> Bools:
        """What is allowed before the minimum length: where only an end is, the grammar wins."""
        going_on = allowed.copy()
        going_on[self._end_ids] = False
        return going_on if going_on.any() else allowed


def filtered_weights(scores: Floats, params: SamplingParams) -> Floats:
    """exp(scores), with zero for what top-k, top-p and min-p leave out. scores [vocabulary], 0 at the best."""
    with np.errstate(under="ignore"):
        weights: Floats = np.exp(scores)
    if 0 < params.top_k < scores.size:
        weights[scores < np.partition(scores, -params.top_k)[-params.top_k]] = 0
    if params.top_p < 1.0:
        weights[weights < _nucleus_floor(weights, params.top_p)] = 0
    if params.min_p > 0.0:
        weights[weights < np.float32(params.min_p)] = 0
    return weights


@jit
def _nucleus_floor(weights: Floats, top_p: float) -> np.float32:
    """The weight of the token at which the sum over falling weights reaches top_p of the total.

    Only the tokens above a cut are sorted: the cut is lowered until they hold the mass that is asked for.
    """
    total = 0.0
    for i in range(weights.shape[0]):
        total += np.float64(weights[i])
    wanted = top_p * total
    for exponent in (2.0, 4.0, 6.0, 9.0, 50.0):
        cut = np.float32(10.0**-exponent)
        above = weights[weights >= cut]
        if above.shape[0] == weights.shape[0] or exponent == 50.0 or above.astype(np.float64).sum() > wanted * _SLACK:
            above.sort()
            reached = 0.0
            for i in range(above.shape[0] - 1, -1, -1):
                reached += np.float64(above[i])
                if reached >= wanted:
                    return np.float32(above[i])
            break
    return np.float32(0.0)


@jit
def _race(scores: Floats, weights: Floats, best: int, seed: np.uint64, position: int, choice: int, purpose: int) -> int:
    """The token with the largest score + noise among those whose weight is not zero; the lowest id on a tie.

    score + noise > highest  <=>  -log(u) < exp(score - highest), and -log(u) >= 1 - u. So a token can only win
    if 1 - u < weight * exp(-highest): one comparison, for sixteen tokens at a time, spares nearly every one of them its
    two logarithms and half of its dice.
    """
    counters = np.uint32(position), np.uint32(choice), np.uint32(purpose)
    winner = best
    highest = scores[best] - math.log(-math.log(uniform(seed, np.uint32(best), *counters)))
    limit = _limit(highest)
    num_tokens = scores.shape[0]
    for first in range(0, num_tokens, LANES):
        if first + LANES <= num_tokens:
            left = contenders(weights, first, limit, seed, *counters)
        else:
            left = np.uint32((1 << (num_tokens - first)) - 1)
        while left:
            lane = 0
            while not (left >> np.uint32(lane)) & np.uint32(1):
                lane += 1
            left = left & (left - np.uint32(1))
            token = first + lane
            if weights[token] > 0:
                score = scores[token] - math.log(-math.log(uniform(seed, np.uint32(token), *counters)))
                if score > highest or (score == highest and token < winner):
                    winner, highest = token, score
                    limit = _limit(highest)
    return winner


@jit
def _limit(highest: float) -> np.float32:
    """What a weight is multiplied by to be compared with (1 - u) * 2**32, a little too large; fp32 has room for it."""
    return np.float32(min(math.exp(-highest) * _SLACK * 2.0**32, _MOST_FLOAT))


def reference_weights(scores: Floats, params: SamplingParams) -> Floats:
    """The slow twin of `filtered_weights`: sort everything."""
    weights: Floats = np.exp(scores)
    if params.top_k > 0:
        kth = np.sort(scores)[::-1][min(params.top_k, scores.size) - 1]
        weights[scores < kth] = 0
    if params.top_p < 1.0:
        total = 0.0
        for weight in weights:
            total += float(weight)
        reached, floor = 0.0, 0.0
        for weight in np.sort(weights)[::-1]:
            reached, floor = reached + float(weight), float(weight)
            if reached >= params.top_p * total:
                break
        weights[weights < np.float32(floor)] = 0
    weights[weights < np.float32(params.min_p)] = 0
    return weights


def reference_race(scores: Floats, weights: Floats, key: NoiseKey, position: int) -> int:
    """The slow twin of the race: every token's noise, then the largest."""
    totals = [
        float(score) + reference_gumbel(key, position, token) if weight > 0 else -math.inf
        for token, (score, weight) in enumerate(zip(scores, weights, strict=True))
    ]
    return int(np.argmax(totals))


def log_probabilities(logits: Floats, token: int, num_top: int) -> TokenLogprob:
    """The target's own log probabilities of one row, before any processor. logits [vocabulary]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    normaliser = math.log(float(np.exp(shifted).sum()))
    top: list[tuple[int, float]] = []
    if num_top:
        floor = np.partition(logits, -min(num_top, logits.size))[-min(num_top, logits.size)]
        ids = np.flatnonzero(logits >= floor)
        order = np.lexsort((ids, -logits[ids]))[:num_top]
        top = [(int(ids[i]), float(shifted[ids[i]]) - normaliser) for i in order]
    return TokenLogprob(token, float(shifted[token]) - normaliser, tuple(top))

"""Gumbel noise that is a pure function of (seed, token id, position, choice, purpose).

The target draws a token as the largest of logit + noise, which is an exact sample of its law. Because the noise
hangs on the token's absolute position and on nothing that happened before, it is the same in a plain step and
in a verified one, and a drafter that adds it to its own scores guesses along with the dice, not only the law.

Philox4x32-10: key = the 64-bit seed, counter = (token id, position, choice, purpose). Two of the four output
words make a uniform u with 52 random bits, strictly inside (0, 1); the noise is -log(-log(u)) in double precision.
`reference_gumbel` is the slow obvious twin of the compiled code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from understudy.compiled import jit


class Purpose(IntEnum):
    """Separate streams of noise. Every drafter shares the target's: that is the coupling."""

    SAMPLE = 0


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The noise of one choice of one request."""

    seed: int
    choice: int = 0


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_M0, _M1 = _MULTIPLIERS
_W0, _W1 = _WEYL
_UNIT = 2.0**-52


@jit
def uniform(seed: np.uint64, token: np.uint32, position: np.uint32, choice: np.uint32, purpose: np.uint32) -> float:
    """One uniform number strictly inside (0, 1)."""
    k0, k1 = np.uint32(seed & _MASK), np.uint32(seed >> _SHIFT)
    c0, c1, c2, c3 = np.uint32(token), np.uint32(position), np.uint32(choice), np.uint32(purpose)
    for _ in range(10):
        a = _M0 * np.uint64(c0)
        b = _M1 * np.uint64(c2)
        c0, c2 = np.uint32(np.uint32(b >> _SHIFT) ^ c1 ^ k0), np.uint32(np.uint32(a >> _SHIFT) ^ c3 ^ k1)
        c1, c3 = np.uint32(b & _MASK), np.uint32(a & _MASK)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    bits = (np.uint64(c0) << np.uint64(20)) | (np.uint64(c1) >> np.uint64(12))
    return (np.float64(bits) + 0.5) * _UNIT


@jit
def _gumbel_of(
    seed: np.uint64, position: int, choice: int, purpose: int, tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    out = np.empty(tokens.shape[0], np.float64)
    for i in range(tokens.shape[0]):
        u = uniform(np.uint64(seed), np.uint32(tokens[i]), np.uint32(position), np.uint32(choice), np.uint32(purpose))
        out[i] = -math.log(-math.log(u))
    return out


def gumbel(key: NoiseKey, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise that the target adds to the scores of `tokens` at `position`. tokens and result [count]."""
    noise: NDArray[np.float64] = _gumbel_of(np.uint64(key.seed), position, key.choice, int(Purpose.SAMPLE), tokens)
    return noise


def reference_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10 in plain Python integers, as published: four words from four words and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def reference_uniform(seed: int, token: int, position: int, choice: int, purpose: int) -> float:
    """The slow twin of `uniform`."""
    high, low, _, _ = reference_philox((token, position, choice, purpose), (seed & 0xFFFFFFFF, seed >> 32))
    return (((high << 20) | (low >> 12)) + 0.5) * 2.0**-52


def reference_gumbel(key: NoiseKey, position: int, token: int) -> float:
    """The slow twin of `gumbel` for one token."""
    u = reference_uniform(key.seed, token, position, key.choice, int(Purpose.SAMPLE))
    return -math.log(-math.log(u))

"""The small kernels of trained drafts against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from understudy.kernels.cpu_drafts import add_silu, likeliest, norm_each, places_above

Floats = NDArray[np.float32]


def draw(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def found(scores: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    places = np.full((len(scores), count), 99, np.int64)
    shares = np.full((len(scores), count), 99, np.float32)
    likeliest(scores, places, shares)
    return places, shares


@pytest.mark.parametrize("size", [1, 15, 16, 40, 1000])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_likeliest_are_found_with_their_probabilities(size: int, count: int) -> None:
    scores = 3.0 * draw(5, size)
    scores[1] = np.round(scores[1])  # ties go to the first
    places, shares = found(scores, count)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    weights = np.exp(scores.astype(np.float64))
    wanted = np.take_along_axis(weights, order, axis=1) / weights.sum(axis=1, keepdims=True)
    assert np.array_equal(places[:, :size], order)
    np.testing.assert_allclose(shares[:, :size], wanted, rtol=1e-5)
    assert (places[:, size:] == -1).all()
    assert (shares[:, size:] == 0.0).all()


def test_what_is_no_number_is_not_likely() -> None:
    scores = draw(2, 20)
    scores[0, :19] = np.nan
    scores[1] = np.nan
    places, _ = found(scores, 2)
    assert places.tolist() == [[19, -1], [-1, -1]]
    assert places_above(scores[0], np.float32(-9.0)).tolist() == [19]


def test_all_places_above_a_floor() -> None:
    scores = draw(100)
    assert np.array_equal(places_above(scores, np.float32(0.3)), np.flatnonzero(scores >= 0.3))
    assert len(places_above(scores, scores.max())) == 1


def test_every_vector_of_a_row_is_normed_with_its_own_weight() -> None:
    x, weights, out = 5.0 * draw(3, 2, 32), draw(2, 32, seed=1), np.empty((3, 2, 32), np.float32)
    norm_each(x, weights, np.float32(1e-5), out)
    wanted = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * weights
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_silu_is_added() -> None:
    x, y = draw(3, 20), 30.0 * draw(3, 20, seed=1)
    wanted = x + y.astype(np.float64) / (1.0 + np.exp(-y.astype(np.float64)))
    add_silu(x, y)
    np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)

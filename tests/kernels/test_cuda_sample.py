"""Words drawn on a GPU: those that the host's sampler draws from the same logits, whatever rows stand beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.cuda_device import DEVICE, ON_GPU, ints, needs_gpu
from understudy.core.request import SamplingParams
from understudy.drafters.base import Context
from understudy.drafters.model import guess
from understudy.kernels.cuda_filters import BLOCK, SHORTLIST
from understudy.kernels.cuda_sample import CHUNK, INTS_PER_ROW, NO_WORD, DrawnRows, DrawScratch, draw, uniforms
from understudy.sampling.noise import NoiseKey, Purpose, reference_gumbel, reference_uniform
from understudy.sampling.processors import Sampler, filtered_weights

import triton  # isort: skip  (only after cuda_device has chosen where kernels run)
import triton.language as tl  # isort: skip

Floats = NDArray[np.float32]

VOCABULARY = 49_152 if ON_GPU else 2 * CHUNK + 452
TINY = float(np.finfo(np.float32).tiny)
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1e-42),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, top_k=20),
    SamplingParams(temperature=1.0, top_k=1500),
    SamplingParams(temperature=1.0, top_k=2**31 - 1),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.3),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_p=0.999_999),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=300, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1),
]


def spread(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return (3 * rng.standard_normal(shape)).astype(np.float32)


def flat(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.uniform(-2, 2, shape).astype(np.float32)


def tied(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Few different values: the largest, and every floor, is shared by many."""
    return np.round(2 * rng.standard_normal(shape)).clip(-4, 4).astype(np.float32)


def masked(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Most tokens can never be said."""
    logits = 5 * rng.standard_normal(shape)
    logits[rng.random(shape) < 0.97] = -np.inf
    logits[:, -1] = 1.0
    return logits.astype(np.float32)


def equal(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return np.full(shape, -7.25, np.float32)


@dataclass(frozen=True)
class Row:
    """One word to draw."""

    logits: Floats
    params: SamplingParams
    key: NoiseKey
    position: int

    def expected(self) -> int:
        """The host's word."""
        sampler = Sampler(self.params, self.key, prompt_ids=(), end_ids=(), vocab_size=self.logits.size)
        try:
            return sampler.sample(self.logits.copy(), position=self.position, num_generated=0)
        except FloatingPointError:
            return NO_WORD


def rows_of(logits: Floats, settings: Sequence[SamplingParams] = SETTINGS, *, seed: int = 0) -> list[Row]:
    """One row for each line of logits, under the settings by turns, with keys of all sizes."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            line,
            settings[index % len(settings)],
            NoiseKey(int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 128))),
            int(rng.integers(0, 2**20)),
        )
        for index, line in enumerate(logits)
    ]


def placed(rows: Sequence[Row]) -> DrawnRows:
    """How the rows are drawn: filled in on the host, and brought to the device by one copy."""
    buffer = torch.zeros(INTS_PER_ROW * len(rows), dtype=torch.int32)
    how = DrawnRows.within(buffer)
    for index, row in enumerate(rows):
        params = row.params
        how.temperatures[index] = max(params.temperature, TINY) if params.temperature > 0 else 0.0
        how.top_ps[index], how.min_ps[index], how.top_ks[index] = params.top_p, params.min_p, params.top_k
        halves = np.array([row.key.seed & 0xFFFFFFFF, row.key.seed >> 32], np.uint32).view(np.int32)
        how.seeds_low[index], how.seeds_high[index] = int(halves[0]), int(halves[1])
        how.positions[index], how.choices[index] = row.position, row.key.choice
    return DrawnRows.within(buffer.to(DEVICE))


@dataclass(frozen=True)
class Drawn:
    words: Tensor
    sureness: Tensor
    rivals: Tensor
    scratch: DrawScratch


def drawn(rows: Sequence[Row], *, logits: Tensor | None = None, num_sayable: int | None = None) -> Drawn:
    """Draw the rows together; logits are theirs unless they are given."""
    if logits is None:
        logits = torch.from_numpy(np.stack([row.logits for row in rows])).to(DEVICE)
    count = len(rows)
    scratch = DrawScratch.new(count, num_sayable=logits.shape[1], device=DEVICE)
    words = torch.full((count + 1,), -77, dtype=torch.int32, device=DEVICE)
    sureness = torch.full((count + 1,), torch.nan, dtype=torch.float32, device=DEVICE)
    rivals = torch.full_like(words, -7)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        draw(
            logits,
            placed(rows),
            words=words,
            sureness=sureness,
            rivals=rivals,
            scratch=scratch,
            num_sayable=num_sayable,
        )
    assert not scratch.counters.any()
    assert words[-1] == -77, "nothing is written beyond the rows"
    return Drawn(words[:-1], sureness[:-1], rivals[:-1], scratch)


@pytest.mark.parametrize("shape_of", [spread, flat, tied, masked, equal])
def test_words_are_the_hosts(shape_of: Callable[..., Floats]) -> None:
    rng = np.random.default_rng(1)
    rows = rows_of(shape_of(rng, (512 if ON_GPU else len(SETTINGS), VOCABULARY)))
    found = drawn(rows).words.tolist()
    assert found == [row.expected() for row in rows]
    assert len(set(found)) > 5


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK + 809])
def test_vocabularies_of_any_size(num_tokens: int) -> None:
    rows = rows_of(spread(np.random.default_rng(2), (len(SETTINGS), num_tokens)))
    assert drawn(rows).words.tolist() == [row.expected() for row in rows]


def test_the_lowest_token_wins_a_tie() -> None:
    logits = spread(np.random.default_rng(3), (3, VOCABULARY))
    logits[0, [CHUNK - 1, CHUNK, VOCABULARY - 1]] = 50.0
    logits[1, [VOCABULARY - 2, VOCABULARY - 1]] = 50.0
    logits[2] = -0.0
    logits[2, 5] = 0.0
    rows = rows_of(logits, [SamplingParams(temperature=0.0)])
    assert drawn(rows).words.tolist() == [CHUNK - 1, VOCABULARY - 2, 0]


def test_rows_without_a_finite_best() -> None:
    logits = spread(np.random.default_rng(4), (8, VOCABULARY))
    logits[0, VOCABULARY - 1] = np.nan
    logits[1] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    logits[4:6, :CHUNK] = -np.inf  # a whole chunk, which is no fault
    logits[6, 0] = np.nan
    for settings in ([SamplingParams(temperature=0.0)], [SamplingParams(temperature=1.0, top_k=3, top_p=0.9)]):
        rows = rows_of(logits, settings)
        found = drawn(rows)
        words = found.words.tolist()
        assert words == [row.expected() for row in rows]
        assert [word == NO_WORD for word in words] == [True, True, True, True, False, False, True, False]
        assert found.sureness[[0, 1, 2, 3, 6]].tolist() == [0.0] * 5


def test_a_row_is_the_same_beside_any_others() -> None:
    count = 512 if ON_GPU else len(SETTINGS)
    logits = np.concatenate([shape_of(np.random.default_rng(5), (-(-count // 4), VOCABULARY))
                             for shape_of in (spread, flat, tied, masked)])[:count]  # fmt: skip
    rows = rows_of(logits, SETTINGS[:-1])
    whole = drawn(rows)
    for few in (1, 2, 3, 8, 33, 100, 511) if ON_GPU else (1, 3):
        for first in (0, (count - few) // 2, count - few):
            part = drawn(rows[first : first + few])
            assert torch.equal(part.words, whole.words[first : first + few])
            assert torch.equal(part.sureness, whole.sureness[first : first + few])
    order = np.random.default_rng(6).permutation(count)
    mixed = drawn([rows[index] for index in order])
    assert torch.equal(mixed.words, whole.words[torch.from_numpy(order).to(DEVICE)])
    assert torch.equal(mixed.sureness, whole.sureness[torch.from_numpy(order).to(DEVICE)])


@pytest.mark.parametrize("shape_of", [spread, flat, tied])
def test_the_rival_is_the_word_without_the_winner(shape_of: Callable[..., Floats]) -> None:
    settings = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.5, 1.0, 2.0)]
    rows = rows_of(shape_of(np.random.default_rng(11), (8, VOCABULARY)), settings)
    found = drawn(rows)
    for row, word in zip(rows, found.words.tolist(), strict=True):
        row.logits[word] = -np.inf
    assert found.rivals.tolist() == [row.expected() for row in rows]


def test_who_is_alone_has_no_rival() -> None:
    logits = np.full((2, VOCABULARY), -np.inf, np.float32)
    logits[:, 7] = 1.0
    rows = rows_of(logits, [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)])
    assert drawn(rows).rivals.tolist() == [-1, -1]


def test_only_sayable_tokens_take_part() -> None:
    num_sayable = VOCABULARY - 37
    rows = rows_of(spread(np.random.default_rng(7), (len(SETTINGS), num_sayable)))
    logits = torch.full((len(rows), VOCABULARY + 11), torch.nan, device=DEVICE)
    logits[:, :num_sayable] = torch.from_numpy(np.stack([row.logits for row in rows])).to(DEVICE)
    logits[::2, num_sayable:] = 1e9
    found = drawn(rows, logits=logits[:, :VOCABULARY], num_sayable=num_sayable)
    assert found.words.tolist() == [row.expected() for row in rows]
    assert torch.equal(found.sureness, drawn(rows).sureness)


@pytest.mark.parametrize("num_tokens", [VOCABULARY, 2 * BLOCK + SHORTLIST + 5])
def test_floors_are_the_hosts(num_tokens: int) -> None:
    """What stays, not only what wins: the k-th score to the bit, the least weight to its last places."""
    settings = [params for params in SETTINGS if params.temperature > 1e-3 and (params.top_k, params.top_p) != (0, 1)]
    rows = rows_of(spread(np.random.default_rng(8), (len(settings), num_tokens)), settings)
    scratch = drawn(rows).scratch
    score_floors, weight_floors = scratch.score_floors.cpu().numpy(), scratch.weight_floors.cpu().numpy()
    for row, score_floor, weight_floor in zip(rows, score_floors, weight_floors, strict=True):
        params = row.params
        scores = (row.logits - row.logits.max()) / np.float32(params.temperature)
        if 0 < params.top_k < num_tokens:
            assert score_floor == np.sort(scores)[-params.top_k]
        else:
            assert score_floor < -40.4
        by_score = filtered_weights(scores, replace(params, top_p=1.0, min_p=0.0))
        in_nucleus = filtered_weights(scores, replace(params, min_p=0.0))
        if params.top_p < 1:
            least = in_nucleus[in_nucleus > 0].min()
            assert np.count_nonzero(in_nucleus) < np.count_nonzero(by_score) or params.top_p > 0.99
            np.testing.assert_allclose(weight_floor, max(least, np.float32(params.min_p)), rtol=1e-6)
        else:
            assert weight_floor == np.float32(params.min_p)


@triton.jit
def _write_noise(out, seed_low, seed_high, position, choice, first, count: tl.constexpr):
    """Uniform numbers of `count` tokens, then their noise."""
    tokens = tl.load(first) + tl.arange(0, count)
    u = uniforms(tokens, tl.load(seed_low), tl.load(seed_high), tl.load(position), tl.load(choice))
    tl.store(out + tl.arange(0, count), u)
    tl.store(out + count + tl.arange(0, count), -tl.log(-tl.log(u)))


@pytest.mark.parametrize(
    ("seed", "position", "choice", "first"),
    [(0, 0, 0, 0), (2**64 - 1, 2**31 - 1, 127, 150_000), (0x0123_4567_89AB_CDEF, 4711, 3, 40_000)],
)
def test_noise_is_the_hosts(seed: int, position: int, choice: int, first: int) -> None:
    out = torch.empty(2, 64, dtype=torch.float64, device=DEVICE)
    halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    _write_noise[(1,)](
        out, ints(halves[0]), ints(halves[1]), ints(position), ints(choice), ints(first), count=64,
        enable_fp_fusion=False,
    )  # fmt: skip
    tokens = range(first, first + 64)
    assert out[0].tolist() == [reference_uniform(seed, token, position, choice, Purpose.SAMPLE) for token in tokens]
    noise = [reference_gumbel(NoiseKey(seed, choice), position, token) for token in tokens]
    np.testing.assert_allclose(out[1].cpu().numpy(), noise, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=1.0, top_k=1),
    ],
    ids=str,
)
def test_sureness_is_that_of_a_guess(params: SamplingParams) -> None:
    """Logits lie close together, for a guess leaves out of its race what is unlikely."""
    rows = rows_of(flat(np.random.default_rng(9), (8, VOCABULARY)), [params])
    found = drawn(rows)
    for index, row in enumerate(rows):
        context = Context(0, [1], 1, "", params.temperature, row.key, params)
        word, sureness = guess(row.logits.copy(), np.arange(VOCABULARY), context, position=row.position)
        assert found.words[index] == word
        assert float(found.sureness[index]) == pytest.approx(sureness, rel=2e-5, abs=1e-12)


def test_no_rows() -> None:
    scratch = DrawScratch.new(1, num_sayable=8, device=DEVICE)
    nothing = torch.empty(0, 8, device=DEVICE)
    draw(nothing, placed([]), words=ints(), sureness=nothing[:, 0], rivals=ints(), scratch=scratch)


@needs_gpu
def test_a_graph_draws_what_a_launch_draws() -> None:
    logits = spread(np.random.default_rng(10), (2 * len(SETTINGS), VOCABULARY))
    first, second = rows_of(logits[: len(SETTINGS)]), rows_of(logits[len(SETTINGS) :], SETTINGS[::-1], seed=1)
    held = torch.from_numpy(np.stack([row.logits for row in first])).to(DEVICE)
    how, other = placed(first), placed(second)
    scratch = DrawScratch.new(len(first), num_sayable=VOCABULARY, device=DEVICE)
    words = torch.empty(len(first), dtype=torch.int32, device=DEVICE)
    sureness = torch.empty(len(first), dtype=torch.float32, device=DEVICE)
    rivals = torch.empty(len(first), dtype=torch.int32, device=DEVICE)

    def once() -> None:
        draw(held, how, words=words, sureness=sureness, rivals=rivals, scratch=scratch)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for rows in (first, second):
        graph.replay()
        assert words.tolist() == [row.expected() for row in rows]
        assert torch.equal(sureness, drawn(rows).sureness)
        held.copy_(torch.from_numpy(np.stack([row.logits for row in second])))
        for name in DrawnRows.__slots__:
            getattr(how, name).copy_(getattr(other, name))

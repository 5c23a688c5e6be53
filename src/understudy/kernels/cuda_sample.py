"""From logits to words on the device: the same word as `sampling/processors.py` draws from the same logits.

That is for requests without bias, penalties, grammar or minimum length: temperature, top-k, top-p and min-p, then the
race of score + noise, which is Philox4x32-10 keyed by seed, token, position and choice as in `sampling/noise.py`.

    best     every chunk of a row: its largest logit; the program that ends last has the row's, and its word if greedy
    floors   rows that draw: what top-k, top-p and min-p leave (cuda_filters.py)
    race     chunks of rows that draw: the two largest of score + noise; the program that ends last has the word

A row's word depends on that row alone: chunks are the same whatever stands beside it, and what is merged is maxima,
or sums in order of chunks. Nothing waits for the host, so that a draw can be part of a graph.

A row whose largest logit is not finite, or that has a NaN, gets the word NO_WORD and the sureness 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from understudy.kernels.cuda_filters import BLOCK, SHORTLIST, WARPS, find_floors, is_finite, load_scores, weights_of
from understudy.kernels.cuda_overlap import launch_options, wait_for_inputs

CHUNK = 1024
"""Tokens of one program"""
NO_WORD = -1
"""Where the logits allow none"""
INTS_PER_ROW = 9
"""Numbers of 32 bits that say how one row is drawn"""

_PURPOSE = tl.constexpr(0)
"""Purpose.SAMPLE of sampling/noise.py: the one stream of noise that there is"""
_NO_TOKEN = tl.constexpr(2**31 - 1)
_NO_WORD = tl.constexpr(NO_WORD)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """What is needed to draw one word for each row, on the device, [rows] each."""

    temperatures: Tensor
    """fp32; 0 is greedy. The host raises a positive one to the smallest normal number at least."""
    top_ps: Tensor
    """fp64, as the host multiplies with it; 1 keeps all"""
    min_ps: Tensor
    """fp32; 0 keeps all"""
    top_ks: Tensor
    """int32; 0 or below keeps all"""
    seeds_low: Tensor
    """int32, the bits of the seed's lower half"""
    seeds_high: Tensor
    positions: Tensor
    """int32, the places in the text that the words are for"""
    choices: Tensor
    """int32"""

    @classmethod
    def within(cls, buffer: Tensor) -> DrawnRows:
        """Views of a buffer, int32 [INTS_PER_ROW * rows]: filled on the host, it goes to the device as one."""
        num_rows = buffer.shape[0] // INTS_PER_ROW
        doubles = buffer[: 2 * num_rows].view(torch.float64)  # in front, where they are aligned
        lines = buffer[2 * num_rows : INTS_PER_ROW * num_rows].view(INTS_PER_ROW - 2, num_rows)
        return cls(
            temperatures=lines[0].view(torch.float32), top_ps=doubles, min_ps=lines[1].view(torch.float32),
            top_ks=lines[2], seeds_low=lines[3], seeds_high=lines[4], positions=lines[5], choices=lines[6],
        )  # fmt: skip

    def part(self, first: int, last: int) -> DrawnRows:
        """Some of the rows."""
        return DrawnRows(*(getattr(self, field.name)[first:last] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class DrawScratch:
    """What the launches of a draw leave for each other. Draws that may run at once need their own."""

    counters: Tensor
    """int32 [rows]; chunks of a row that are done: zero before and after every launch"""
    bests: Tensor
    """fp32 [rows], the largest logit"""
    score_floors: Tensor
    """fp32 [rows], written for rows that draw"""
    weight_floors: Tensor
    """fp32 [rows], likewise"""
    shortlists: Tensor
    """int32 [rows, SHORTLIST]"""
    highs: Tensor
    """fp64 [2, rows, chunks]: the two largest totals of a chunk. Before the race: fp32, its largest logit and sum."""
    tokens: Tensor
    """int32 [rows, chunks], the token of the larger"""
    rivals: Tensor
    """int32 [rows, chunks], the token of the other"""
    rival_highs: Tensor
    """fp32 [rows, chunks], the second largest logit"""

    @classmethod
    def new(cls, num_rows: int, *, num_sayable: int, device: torch.device) -> DrawScratch:
        """Room for draws of up to so many rows from a vocabulary of up to this size."""
        num_chunks = -(-num_sayable // CHUNK)
        return cls(
            counters=torch.zeros(num_rows, dtype=torch.int32, device=device),
            bests=torch.empty(num_rows, dtype=torch.float32, device=device),
            score_floors=torch.empty(num_rows, dtype=torch.float32, device=device),
            weight_floors=torch.empty(num_rows, dtype=torch.float32, device=device),
            shortlists=torch.empty(num_rows, SHORTLIST, dtype=torch.int32, device=device),
            highs=torch.empty(2, num_rows, num_chunks, dtype=torch.float64, device=device),
            tokens=torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device),
            rivals=torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device),
            rival_highs=torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device),
        )


def draw(
    logits: Tensor, how: DrawnRows, *, words: Tensor, sureness: Tensor, rivals: Tensor, scratch: DrawScratch,
    num_sayable: int | None = None, ids: Tensor | None = None,
    is_greedy: bool = False,
) -> None:  # fmt: skip
    """Write one word for each row of logits [rows, vocabulary] to words, int32, and to sureness, fp32, how sure it is.

    Greedy, that is the word's probability. Drawn, it is 1 - exp(-gap), where gap is how far the word is ahead of the
    second in the race, as for the guesses of a draft model. That second one goes to rivals, int32; NO_WORD if there is
    none. Of the vocabulary only the first num_sayable take part.

    `ids`, int32 [vocabulary] and rising, are the target's tokens that a draft's own, smaller vocabulary stands for:
    noise is theirs, and they are what is written. `is_greedy`: no temperature is looked at.
    """
    num_rows, num_columns = logits.shape
    num_sayable = num_columns if num_sayable is None else num_sayable
    num_chunks = -(-num_sayable // CHUNK)
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert 0 < num_sayable <= num_columns
    assert num_rows <= min(scratch.counters.shape[0], words.shape[0], sureness.shape[0], rivals.shape[0])
    assert num_rows * num_chunks <= scratch.tokens.numel()
    if num_rows == 0:
        return
    stride = logits.stride(0)
    merged = triton.next_power_of_2(num_chunks)
    chunk_highs = scratch.highs.view(torch.float32)
    _find_best[(num_chunks, num_rows)](
        logits, scratch.bests, words, sureness, rivals, chunk_highs[0], chunk_highs[1], scratch.tokens,
        scratch.rival_highs, scratch.rivals, scratch.counters, ids, stride, num_sayable, num_chunks, chunk=CHUNK,
        merged=merged, **launch_options(4, 1),
    )  # fmt: skip
    if is_greedy:
        return
    find_floors[(num_rows,)](
        logits, how.temperatures, how.top_ks, how.top_ps, how.min_ps, scratch.bests, scratch.score_floors,
        scratch.weight_floors, scratch.shortlists, stride, num_sayable, block=BLOCK, shortlist=SHORTLIST,
        **launch_options(WARPS, 1),
    )  # fmt: skip
    _race[(num_chunks, num_rows)](
        logits, how.temperatures, how.seeds_low, how.seeds_high, how.positions, how.choices, scratch.bests,
        scratch.score_floors, scratch.weight_floors, words, sureness, rivals, scratch.highs[0], scratch.highs[1],
        scratch.tokens, scratch.rivals, scratch.counters, ids, stride, num_sayable, num_chunks, chunk=CHUNK,
        merged=merged, **launch_options(4, 1),
    )  # fmt: skip


@triton.jit
def _is_last(counters, row, num_chunks):
    """Say that a chunk of a row has been written; whether all have been."""
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(counters + row, 1, sem="acq_rel") == num_chunks - 1
    if is_last:
        tl.store(counters + row, 0)
    return is_last


@triton.jit
def _sum_of_weights(highs, sums, highest):
    """The sum of some weights times exp(high - highest); one that is not finite is as good as 0."""
    return tl.sum(sums * tl.exp(highs - tl.where(is_finite(highest), highest, 0.0)), axis=0)


@triton.jit
def _named(ids, token):
    """The word that a column of the logits stands for; what stands for none is kept."""
    return tl.where(token >= 0, tl.load(ids + tl.maximum(token, 0)), token)


@triton.jit
def _find_best(
    logits, bests, words, sureness, rivals, chunk_bests, chunk_sums, chunk_words, chunk_rival_bests, chunk_rivals,
    counters, ids, row_stride, num_sayable, num_chunks,
    chunk: tl.constexpr, merged: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: its two largest logits, the lowest tokens that have them, and the sum of weights."""
    wait_for_inputs(overlap)
    index, row = tl.program_id(0), tl.program_id(1)
    tokens = index * chunk + tl.arange(0, chunk)
    own = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < num_sayable, other=float("-inf"))
    own = tl.where(own <= float("inf"), own, float("inf"))  # also for NaN: such a row has no word
    best = tl.max(own, axis=0)
    at = row * num_chunks + index
    tl.store(chunk_bests + at, best)
    tl.store(chunk_sums + at, _sum_of_weights(own, tl.full((chunk,), 1.0, tl.float32), best))
    word = tl.min(tl.where(own == best, tokens, _NO_TOKEN), axis=0)
    tl.store(chunk_words + at, word)
    others = tl.where(tokens == word, float("-inf"), own)
    rival_best = tl.max(others, axis=0)
    tl.store(chunk_rival_bests + at, rival_best)
    tl.store(chunk_rivals + at, tl.min(tl.where((others == rival_best) & (tokens != word), tokens, _NO_TOKEN), axis=0))
    if _is_last(counters, row, num_chunks):
        chunks = tl.arange(0, merged)
        at_all, is_chunk = row * num_chunks + chunks, chunks < num_chunks
        highs = tl.load(chunk_bests + at_all, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(chunk_sums + at_all, mask=is_chunk, other=0.0, cache_modifier=".cg")
        found = tl.load(chunk_words + at_all, mask=is_chunk, other=_NO_TOKEN, cache_modifier=".cg")
        highest = tl.max(highs, axis=0)
        total = _sum_of_weights(highs, sums, highest)
        word = tl.min(tl.where(highs == highest, found, _NO_TOKEN), axis=0)
        tl.store(bests + row, highest)
        said = tl.where(is_finite(highest), word, _NO_WORD)
        tl.store(sureness + row, tl.where(is_finite(highest), 1.0 / total, 0.0))
        second_highs = tl.load(chunk_rival_bests + at_all, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        second_words = tl.load(chunk_rivals + at_all, mask=is_chunk, other=_NO_TOKEN, cache_modifier=".cg")
        rival = _rival_of(word, highs, found, second_highs, second_words)
        if ids is not None:
            said, rival = _named(ids, said), _named(ids, rival)
        tl.store(words + row, said)
        tl.store(rivals + row, rival)


@triton.jit
def _rival_of(word, firsts, first_words, seconds, second_words):
    """Who comes second in a row: the lowest token with the largest number besides the word's; of a chunk two are known.

    Numbers that are -inf are out of it.
    """
    highs = tl.where(first_words == word, seconds, firsts)
    tokens = tl.where(first_words == word, second_words, first_words)
    highest = tl.max(highs, axis=0)
    rival = tl.min(tl.where(highs == highest, tokens, _NO_TOKEN), axis=0)
    return tl.where((highest > float("-inf")) & (rival != _NO_TOKEN), rival, _NO_WORD)


@triton.jit
def uniforms(tokens, seed_low, seed_high, position, choice):
    """Uniform numbers in fp64, strictly inside (0, 1), of which the noise of some tokens is made."""
    high, low, _, _ = tl.philox_impl(
        tokens.to(tl.uint32, bitcast=True), position.to(tl.uint32, bitcast=True), choice.to(tl.uint32, bitcast=True),
        tl.cast(_PURPOSE, tl.uint32), seed_low.to(tl.uint32, bitcast=True),
        seed_high.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def _race(
    logits, temperatures, seeds_low, seeds_high, positions, choices, bests, score_floors, weight_floors,
    words, sureness, rivals, chunk_firsts, chunk_seconds, chunk_words, chunk_rivals, counters, ids, row_stride,
    num_sayable, num_chunks,
    chunk: tl.constexpr, merged: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """One chunk of one row that draws: the two largest of score + noise, and the lowest token that has the larger."""
    wait_for_inputs(overlap)
    index, row = tl.program_id(0), tl.program_id(1)
    temperature, best = tl.load(temperatures + row), tl.load(bests + row)
    if (temperature > 0) & is_finite(best):
        tokens = index * chunk + tl.arange(0, chunk)
        scores = load_scores(logits + row.to(tl.int64) * row_stride, tokens, best, temperature, num_sayable)
        least_weight = tl.load(weight_floors + row)
        stays = scores >= tl.load(score_floors + row)
        if least_weight > 0:
            stays = stays & (weights_of(scores) >= least_weight)
        at = row * num_chunks + index
        if tl.max(stays.to(tl.int32), axis=0) > 0:
            keyed = tokens if ids is None else tl.load(ids + tokens, mask=tokens < num_sayable, other=0)
            u = uniforms(
                keyed, tl.load(seeds_low + row), tl.load(seeds_high + row), tl.load(positions + row),
                tl.load(choices + row),
            )  # fmt: skip
            totals = tl.where(stays, scores.to(tl.float64) - tl.log(-tl.log(u)), float("-inf"))
            first = tl.max(totals, axis=0)
            word = tl.min(tl.where(totals == first, tokens, _NO_TOKEN), axis=0)
            tl.store(chunk_firsts + at, first)
            others = tl.where(tokens == word, float("-inf"), totals)
            second = tl.max(others, axis=0)
            tl.store(chunk_seconds + at, second)
            tl.store(chunk_words + at, word)
            tl.store(chunk_rivals + at, tl.min(tl.where((others == second) & stays, tokens, _NO_TOKEN), axis=0))
        else:
            tl.store(chunk_firsts + at, float("-inf"))
            tl.store(chunk_seconds + at, float("-inf"))
            tl.store(chunk_words + at, _NO_TOKEN)
            tl.store(chunk_rivals + at, _NO_TOKEN)
        if _is_last(counters, row, num_chunks):
            chunks = tl.arange(0, merged)
            at_all, is_chunk = row * num_chunks + chunks, chunks < num_chunks
            firsts = tl.load(chunk_firsts + at_all, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
            seconds = tl.load(chunk_seconds + at_all, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
            found = tl.load(chunk_words + at_all, mask=is_chunk, other=_NO_TOKEN, cache_modifier=".cg")
            first = tl.max(firsts, axis=0)
            word = tl.min(tl.where(firsts == first, found, _NO_TOKEN), axis=0)
            second = tl.max(tl.where(found == word, seconds, firsts), axis=0)
            tl.store(sureness + row, (1.0 - tl.exp(second - first)).to(tl.float32))
            second_words = tl.load(chunk_rivals + at_all, mask=is_chunk, other=_NO_TOKEN, cache_modifier=".cg")
            rival = _rival_of(word, firsts, found, seconds, second_words)
            if ids is not None:
                word, rival = _named(ids, word), _named(ids, rival)
            tl.store(words + row, word)
            tl.store(rivals + row, rival)

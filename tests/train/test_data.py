"""Answers on disk, and batches that the seed and the step decide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_heads import tiny_samples
from understudy.errors import ConfigError
from understudy.train.data import (
    Batches,
    Sample,
    append_samples,
    make_batch,
    read_samples,
    samples_digest,
    split_samples,
)


def test_written_and_read_in_parts(tmp_path: Path) -> None:
    file, samples = tmp_path / "samples.jsonl", tiny_samples(5)
    assert read_samples(file, vocab_size=304) == []
    append_samples(file, samples[:2])
    append_samples(file, samples[2:])
    assert read_samples(file, vocab_size=304) == samples


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    file, samples = tmp_path / "samples.jsonl", tiny_samples(3)
    append_samples(file, samples[:2])
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert read_samples(file, vocab_size=304) == samples[:1]
    append_samples(file, samples[1:])
    assert read_samples(file, vocab_size=304) == samples


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"tokens": [1, 2], "answer": 1, "class": "x"}',
        '{"tokens": [1, 304], "answer": 1, "class": "x", "temperature": 0}',
        '{"tokens": [1, 2], "answer": 3, "class": "x", "temperature": 0}',
        '{"tokens": [1, 2], "answer": 0, "class": "x", "temperature": 0}',
        '{"tokens": [1, "2"], "answer": 1, "class": "x", "temperature": 0}',
    ],
)
def test_what_is_no_sample_is_refused_by_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    append_samples(file, tiny_samples(1))
    with file.open("a") as opened:
        opened.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_samples(file, vocab_size=304)


def test_digest_names_the_contents() -> None:
    assert samples_digest(tiny_samples(3)) == samples_digest(tiny_samples(3))
    assert samples_digest(tiny_samples(3)) != samples_digest(tiny_samples(3)[::-1])


def test_split_holds_out_a_share_and_loses_nothing() -> None:
    samples = tiny_samples(50)
    kept, held_out = split_samples(samples, held_out_share=0.1)
    assert len(held_out) == 5
    assert len(kept) == 45
    assert {id(sample) for sample in samples} == {id(sample) for sample in (*kept, *held_out)}
    assert len(split_samples(samples[:3], held_out_share=0.1)[1]) == 1


def lines(batch_tokens: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(line) for line in batch_tokens.tolist()]


def test_batches_are_a_function_of_seed_and_step() -> None:
    samples = tiny_samples(20)

    def batches(seed: int) -> Batches:
        return Batches(samples, max_length=26, tokens_per_batch=60, seed=seed)

    one, same, other = batches(0), batches(0), batches(1)
    assert len(one) == 10
    order = [lines(one.batch(one.number_at(step)).token_ids) for step in range(20)]
    assert order == [lines(same.batch(same.number_at(step)).token_ids) for step in range(20)]
    assert order != [lines(other.batch(other.number_at(step)).token_ids) for step in range(20)]
    assert order[:10] != order[10:]  # another order in the next epoch
    assert sorted(order[:10]) == sorted(order[10:])
    assert all(one.batch(one.number_at(step)).token_ids.numel() <= 60 for step in range(10))


def test_a_batch_is_filled_up_and_cut_off() -> None:
    samples = [
        Sample(token_ids=(1, 2, 3, 4, 5), answer_start=2, prompt_class="", temperature=0.0),
        Sample(token_ids=(6, 7, 8), answer_start=1, prompt_class="", temperature=0.0),
    ]
    batch = make_batch(samples, max_length=4)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0]]
    assert batch.lengths.tolist() == [4, 3]


def test_what_is_guessed() -> None:
    sample = Sample(token_ids=(1, 2, 3, 4, 5, 6), answer_start=2, prompt_class="", temperature=0.0)
    batch = make_batch([sample], max_length=9)
    anchors = torch.arange(6)[None]
    # from anchor 1, the prompt's last token, guess 0 is about x[3]; the last word is x[5]
    assert batch.is_guessed(anchors, 0).tolist() == [[False, True, True, True, False, False]]
    assert batch.is_guessed(anchors, 1).tolist() == [[False, True, True, False, False, False]]
    assert batch.is_guessed(anchors, 3).tolist() == [[False] * 6]


def test_answers_of_one_word_are_refused() -> None:
    short = Sample(token_ids=(1, 2, 3), answer_start=2, prompt_class="", temperature=0.0)
    with pytest.raises(ConfigError, match="two words"):
        Batches([short], max_length=9, tokens_per_batch=9, seed=0)

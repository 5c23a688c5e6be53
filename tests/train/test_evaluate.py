"""Measuring: cycles are walked as an engine walks them, and a draft is asked as serving would ask it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_heads import tiny_guesser, tiny_samples
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.train.data import Sample, make_batch
from understudy.train.evaluate import Tally, describe, evaluate, walk
from understudy.train.loop import train
from understudy.train.settings import TrainSettings


def sample(*answer: int) -> Sample:
    return Sample(token_ids=(0, 0, *answer), answer_start=2, prompt_class="x", temperature=0.0)


def test_walk_by_hand() -> None:
    tally = Tally()
    # after word 1 come 2 and 3 as guessed, then 4 where 9 was guessed; after 4 nothing is right; then the text ends
    walk(tally, sample(1, 2, 3, 4, 5, 6), [[2, 3, 9], [], [], [9, 9, 9], [6, 7, 8]])
    assert tally.num_cycles == 3
    assert tally.num_words == 5  # all but the first, which the prompt's pass gave
    assert tally.asked == [3, 1, 1]
    assert tally.agreed == [2, 1, 0]
    assert tally.describe() == {
        "cycles": 3,
        "tokens_per_cycle": 5 / 3,
        "acceptance_by_position": [2 / 3, 1.0, 0.0],
    }


def test_perfect_and_hopeless() -> None:
    words = [1, 2, 3, 4, 5, 6, 7]
    perfect, hopeless = Tally(), Tally()
    walk(perfect, sample(*words), [words[place + 1 : place + 3] for place in range(7)])
    walk(hopeless, sample(*words), [[0, 0]] * 7)
    assert (perfect.num_cycles, perfect.num_words) == (2, 6)
    assert (hopeless.num_cycles, hopeless.num_words) == (6, 6)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_greedy_chain_goes_on_after_its_own_words(kind: HeadKind) -> None:
    """Written into a text, its own words give the same guesses after the text; other words do not lead it astray."""
    guesser = tiny_guesser(kind, seed=2)
    if kind == "block":
        with torch.no_grad():
            guesser.head.markov_out.weight.normal_()  # type: ignore[union-attr]
    batch = make_batch(tiny_samples(1), max_length=32)
    anchors = torch.tensor([[6]])
    reading = guesser.teacher.read(batch.token_ids, guesser.head.spec.feature_layers)
    chain = guesser.greedy(reading, anchors)[0, 0]  # [guesses]
    written = batch.token_ids.clone()
    written[0, 8 : 8 + len(chain)] = chain
    other = guesser.teacher.read(written, guesser.head.spec.feature_layers)
    with torch.no_grad():
        after = [guess.logits.argmax(-1).item() for guess in guesser.after_text(other, anchors)]
    assert guesser.vocabulary.ids[after].tolist() == chain.tolist()
    assert guesser.greedy(other, anchors)[0, 0].tolist() == chain.tolist()


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_training_on_the_targets_answers_raises_it(kind: HeadKind, tmp_path: Path) -> None:
    """The tiny target answers from a few prompts; a draft that learned those answers foresees them."""
    guesser = tiny_guesser(kind)
    answers = [_answer(guesser, [7 * place, 7]) for place in range(4)]
    before = describe(evaluate(guesser, answers, max_length=64))["mean_tokens_per_cycle"]
    settings = TrainSettings(num_steps=40, learning_rate=1e-2, tokens_per_batch=256, temperatures=(0.0,))
    train(guesser, answers, settings, state_file=tmp_path / "state")
    after = describe(evaluate(guesser, answers, max_length=64))["mean_tokens_per_cycle"]
    assert after > before + 0.5


def _answer(guesser, prompt: list[int]) -> Sample:  # type: ignore[no-untyped-def]
    """The target's answer of 20 words, of those alone that can be drafted."""
    tokens = list(prompt)
    for _ in range(20):
        reading = guesser.teacher.read(torch.tensor([tokens]))
        logits = guesser.teacher.logits(reading.last_hidden[0, -1])
        tokens.append(int(guesser.vocabulary.ids[logits[guesser.vocabulary.ids].argmax()]))
    return Sample(token_ids=tuple(tokens), answer_start=len(prompt), prompt_class="x", temperature=0.0)


def test_only_answers_at_temperature_0_are_measured() -> None:
    warm = Sample(token_ids=(1, 2, 3, 4), answer_start=1, prompt_class="x", temperature=0.7)
    found = describe(evaluate(tiny_guesser("medusa"), [warm], max_length=64))
    assert found == {"classes": {}, "mean_tokens_per_cycle": None}

"""Measuring goes through the engine that serves: it counts, and the words are compared with those without drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_heads import greedy_chains, tiny_guesser, tiny_samples, tiny_spec
from tests.tiny_models import VOCAB_SIZE, write_tiny_model
from understudy.assembly import Target, TrainedDraft, load_target, with_draft
from understudy.core.draft import Draft
from understudy.core.request import Completion, SpeculationCounts
from understudy.drafters.base import Budget, Context
from understudy.drafters.seen import SeeingDrafter, Text
from understudy.models.heads.draft_vocabulary import DraftVocabulary
from understudy.models.heads.files import TrainedHead, load_head, save_head
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.train.data import Sample, make_batch
from understudy.train.evaluate import Arm, Evaluation, Ids, Tally, describe, spread
from understudy.train.held_out import HeldOut, measure_held_out
from understudy.train.loop import train
from understudy.train.run import new_head
from understudy.train.settings import TrainSettings

PROMPTS: dict[str, list[Ids]] = {"one": [(5, 9, 20), (7, 8)], "two": [(30, 31, 32, 33)]}
CHAIN = Arm(shape="chain", temperature=0.0, max_depth=4)
SAMPLES = [
    Sample(token_ids=(*ids, 1, 2), answer_start=len(ids), prompt_class=name, temperature=0.7)
    for name, asked in PROMPTS.items()
    for ids in asked
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4)
    return load_target(folder, device="cpu", num_threads=1)


def head_for(kind: HeadKind, target: Target) -> TrainedHead:
    spec = tiny_spec(kind, target.decoder.config, num_draft_ids=VOCAB_SIZE, target_hash=target.source_hash)
    return TrainedHead(spec, new_head(spec, seed=4), DraftVocabulary(torch.arange(VOCAB_SIZE), VOCAB_SIZE), {})


def untrained(kind: HeadKind, target: Target) -> Target:
    return replace(target, draft=TrainedDraft(head_for(kind, target), kind, 0))


def completion(words: Sequence[int], counts: SpeculationCounts) -> Completion:
    return Completion(index=0, token_ids=list(words), speculation=counts)


def test_tally_by_hand() -> None:
    tally = Tally()
    first = SpeculationCounts(cycles=4, rows=9, reached_by_position=[3, 1, 1], matched_by_position=[1, 1, 0])
    second = SpeculationCounts(cycles=2, rows=1, reached_by_position=[1], matched_by_position=[1])
    tally.add(completion([1, 2, 3, 4, 5, 6], first), completion([1, 2, 3, 4, 5, 6], SpeculationCounts()))
    tally.add(completion([1, 2, 3], second), completion([1, 2, 4], SpeculationCounts()))
    assert tally.describe() == {
        "tokens_per_cycle": 7 / 4,  # all words but the two that reading the prompts gave
        "rows_per_cycle": 10 / 4,
        "cycles": 4,
        "acceptance_by_position": [2 / 4, 1.0, 0.0],
        "num_answers": 2,
        "num_same": 1,
    }


@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_kind_is_measured_and_changes_no_word(kind: HeadKind, shape: str, target: Target) -> None:
    evaluation = Evaluation(target, PROMPTS, max_tokens=12)
    for temperature in (0.0, 1.0):
        arm = Arm(shape=shape, temperature=temperature, max_depth=3)
        tallies = evaluation.measure(untrained(kind, target), arm)
        assert {name: tally.num_answers for name, tally in tallies.items()} == {"one": 2, "two": 1}
        for tally in tallies.values():
            assert tally.num_same == tally.num_answers
            assert 1 <= len(tally.reached) <= 3
            assert tally.num_words / 4 <= tally.num_cycles <= tally.num_words
            assert tally.num_rows > 0


def test_a_model_is_measured_and_changes_no_word(target: Target) -> None:
    evaluation = Evaluation(target, PROMPTS, max_tokens=12)
    drafted = with_draft(target, "layers:3")
    for temperature in (0.0, 1.0):
        for tally in evaluation.measure(drafted, replace(CHAIN, temperature=temperature)).values():
            assert tally.num_same == tally.num_answers
            assert len(tally.reached) == 4
            assert tally.num_words / 5 <= tally.num_cycles < tally.num_words
    with pytest.raises(AssertionError, match="a model drafts chains"):
        evaluation.measure(drafted, replace(CHAIN, shape="tree"))


def test_a_cycle_whose_drafts_are_never_right_brings_one_word(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of the prompt is no cycle, and its word nobody's."""

    def draft(
        self: SeeingDrafter, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]
    ) -> list[Draft]:
        return [Draft.chain([], confidence=[], source=self.name) for _ in contexts]

    monkeypatch.setattr("understudy.drafters.medusa.MedusaDrafter._draft", draft)
    tally = Evaluation(target, {"x": [(5, 9, 20)]}, max_tokens=9).measure(untrained("medusa", target), CHAIN)["x"]
    assert (tally.num_words, tally.num_cycles, tally.tokens_per_cycle) == (8, 8, 1.0)


def test_a_draft_beside_another_target_is_not_measured(target: Target, tmp_path: Path) -> None:
    other = load_target(write_tiny_model(tmp_path, num_hidden_layers=4), device="cpu", num_threads=1)
    with pytest.raises(AssertionError, match="beside another target"):
        Evaluation(target, PROMPTS, max_tokens=12).measure(untrained("medusa", other), CHAIN)


def test_a_draft_that_knows_the_words_keeps_them_all(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of four that are always right: five words a cycle but for the last, and every position accepted."""
    evaluation = Evaluation(target, {"x": [(5, 9, 20)]}, max_tokens=16)
    evaluation.measure(untrained("medusa", target), CHAIN)
    (plain,) = evaluation._plain[0.0]
    assert len(plain.token_ids) == 16
    text = [5, 9, 20, *plain.token_ids]

    def draft(
        self: SeeingDrafter, texts: Sequence[Text], contexts: Sequence[Context], budgets: Sequence[Budget]
    ) -> list[Draft]:
        chains = [
            text[len(context.tokens) : len(context.tokens) + budget.max_depth]
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        return [Draft.chain(chain, confidence=[0.9] * len(chain), source=self.name) for chain in chains]

    monkeypatch.setattr("understudy.drafters.medusa.MedusaDrafter._draft", draft)
    tally = evaluation.measure(untrained("medusa", target), CHAIN)["x"]
    assert (tally.num_words, tally.num_cycles, tally.num_same) == (15, 3, 1)
    assert tally.matched == tally.reached == [3, 3, 3, 3]
    told = describe(CHAIN, {"x": tally})
    assert told["mean_tokens_per_cycle"] == 5.0
    assert (told["shape"], told["temperature"]) == ("chain", 0.0)


def test_nothing_to_answer(target: Target) -> None:
    tallies = Evaluation(target, {}, max_tokens=12).measure(untrained("medusa", target), CHAIN)
    assert describe(CHAIN, tallies)["mean_tokens_per_cycle"] is None


def test_prompts_are_spread() -> None:
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 8) == [0, 1]
    held_out = HeldOut(
        samples=[*SAMPLES, Sample(token_ids=(1, 2), answer_start=2, prompt_class="three", temperature=0.0)],
        prompts_by_class=1,
        max_tokens=8,
    )
    assert held_out.prompts == {"one": [(5, 9, 20)], "two": [(30, 31, 32, 33)]}  # the last had no answer


def test_measuring_goes_on_where_it_stopped(target: Target, tmp_path: Path) -> None:
    save_head(tmp_path / "draft", head_for("medusa", target))
    held_out = HeldOut(samples=SAMPLES, prompts_by_class=8, max_tokens=8)
    notes, loaded = tmp_path / "measured.json", []

    def load() -> Target:
        loaded.append(target)
        return target

    assert measure_held_out(load, tmp_path / "draft", held_out, notes=notes, deadline_s=time.monotonic()) is None
    assert not loaded

    class Killed(Exception):
        pass

    def kill(done: int, total: int) -> None:
        assert total == 3 * 6
        if done == 14:  # in the third of four arms, behind the plain answers of its temperature
            raise Killed

    with pytest.raises(Killed):
        measure_held_out(load, tmp_path / "draft", held_out, notes=notes, watcher=kill)
    seen: list[int] = []
    arms = measure_held_out(load, tmp_path / "draft", held_out, notes=notes, watcher=lambda done, _: seen.append(done))
    assert seen == list(range(10, 19))
    assert arms is not None
    assert [(arm["temperature"], arm["shape"]) for arm in arms] == [
        *((0.0, "chain"), (0.0, "tree"), (1.0, "chain"), (1.0, "tree"))
    ]
    assert len(loaded) == 2
    assert measure_held_out(load, tmp_path / "draft", held_out, notes=notes) == arms
    assert len(loaded) == 2
    # another draft is measured anew, and so is this one on other prompts
    assert measure_held_out(load, tmp_path / "draft", replace(held_out, max_tokens=6), notes=notes) != arms
    fresh = head_for("medusa", target)
    with torch.no_grad():
        next(fresh.head.parameters()).add_(1.0)
    save_head(tmp_path / "draft", fresh)
    measure_held_out(load, tmp_path / "draft", held_out, notes=notes)
    assert len(loaded) == 4
    assert load_head(tmp_path / "draft").spec.kind == "medusa"


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
    chain = greedy_chains(guesser, reading, anchors)[0, 0]  # [guesses]
    written = batch.token_ids.clone()
    written[0, 8 : 8 + len(chain)] = chain
    other = guesser.teacher.read(written, guesser.head.spec.feature_layers)
    with torch.no_grad():
        after = [guess.logits.argmax(-1).item() for guess in guesser.after_text(other, anchors)]
    assert guesser.vocabulary.ids[after].tolist() == chain.tolist()
    assert greedy_chains(guesser, other, anchors)[0, 0].tolist() == chain.tolist()


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_training_on_the_targets_answers_halves_what_is_wrong(kind: HeadKind, tmp_path: Path) -> None:
    """The tiny target answers from a few prompts; a draft that learned those answers foresees them."""
    guesser = tiny_guesser(kind)
    answers = [_answer(guesser, [7 * place, 7]) for place in range(4)]
    before = _share_wrong(guesser, answers)
    settings = TrainSettings(num_steps=40, learning_rate=1e-2, tokens_per_batch=256, temperatures=(0.0,))
    train(guesser, answers, settings, state_file=tmp_path / "state")
    assert _share_wrong(guesser, answers) < before / 2


def _share_wrong(guesser, samples: Sequence[Sample]) -> float:  # type: ignore[no-untyped-def]
    """How often one of the first two guesses of a chain is not the word that came."""
    wrong = []
    for sample in samples:
        batch = make_batch([sample], max_length=64)
        reading = guesser.teacher.read(batch.token_ids, guesser.head.spec.feature_layers)
        anchors = torch.arange(1, 19)[None]
        chains = greedy_chains(guesser, reading, anchors)[0, :, :2]
        came = torch.stack([batch.token_ids[0, anchors[0] + 2 + k] for k in range(2)], dim=-1)
        wrong.append((chains != came).float().mean().item())
    return sum(wrong) / len(wrong)


def _answer(guesser, prompt: list[int]) -> Sample:  # type: ignore[no-untyped-def]
    """The target's answer of 20 words, of those alone that can be drafted."""
    tokens = list(prompt)
    for _ in range(20):
        reading = guesser.teacher.read(torch.tensor([tokens]))
        logits = guesser.teacher.logits(reading.last_hidden[0, -1])
        tokens.append(int(guesser.vocabulary.ids[logits[guesser.vocabulary.ids].argmax()]))
    return Sample(token_ids=tuple(tokens), answer_start=len(prompt), prompt_class="x", temperature=0.0)

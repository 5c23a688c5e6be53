"""Thin models: which layers they keep, that they compute what a model of these layers computes, and that they learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.engines import ARCHITECTURES
from tests.tiny_heads import tiny_samples, tiny_teacher
from tests.tiny_models import TinyArchitecture, tiny_config, tiny_tensors, write_tiny_model
from understudy.errors import ConfigError
from understudy.models.config import ModelConfig
from understudy.models.load import load_model
from understudy.train.data import Batch, make_batch
from understudy.train.lessons import Lesson, read_lesson
from understudy.train.loop import train
from understudy.train.losses import Distance
from understudy.train.model_draft import make_model_draft
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Teacher
from understudy.train.thin_model import ThinLearner, ThinModel, ThinSpec, thin_spec

SETTINGS = TrainSettings(num_steps=12, learning_rate=3e-3, max_length=32, tokens_per_batch=120, save_every_steps=5)
SAMPLES = tiny_samples(12)


def spec_of(config: ModelConfig, num_layers: int | None = None) -> ThinSpec:
    return thin_spec(config, target_name="tiny", target_hash="sha256:tiny", num_layers=num_layers)


def learner(*, dtype: torch.dtype = torch.float32, num_layers: int | None = None) -> ThinLearner:
    teacher = tiny_teacher(dtype=dtype)
    return ThinLearner(
        ThinModel(spec_of(teacher.config, num_layers), teacher._weights, device=teacher.device), teacher
    )  # fmt: skip


def lesson_of(pupil: ThinLearner, batch: Batch | None = None) -> Lesson:
    return read_lesson(pupil, batch or make_batch(SAMPLES, max_length=32), SETTINGS.temperatures)


def trained(state: Path, *, parts: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Train in parts, each as a new process would."""
    for stop in parts:
        with pytest.raises(KeyboardInterrupt):
            train(learner(), SAMPLES, SETTINGS, state_file=state, watcher=interrupt_at(stop))
    pupil = learner()
    assert train(pupil, SAMPLES, SETTINGS, state_file=state).is_done
    return pupil.head.state_dict()


def interrupt_at(stop: int) -> Callable[[int, int, float], None]:
    def watch(step: int, _: int, __: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    return watch


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("total", "count", "kept"),
    [
        (30, None, (0, 1, 28, 29)),
        (30, 5, (0, 1, 2, 28, 29)),
        (30, 1, (0,)),
        (4, None, (0, 3)),
        (4, 3, (0, 1, 3)),
        (2, None, (0,)),
    ],
)
def test_layers_are_kept_from_both_ends(total: int, count: int | None, kept: tuple[int, ...]) -> None:
    config = ModelConfig.from_hugging_face(tiny_config(num_hidden_layers=total), None)
    spec = spec_of(config, count)
    assert spec.layers == kept
    assert spec.config == replace(config, num_layers=len(kept))


@pytest.mark.parametrize(("total", "count"), [(4, 4), (4, 99), (4, 0), (1, None)])
def test_a_draft_has_fewer_layers_than_its_target(total: int, count: int | None) -> None:
    config = ModelConfig.from_hugging_face(tiny_config(num_hidden_layers=total), None)
    with pytest.raises(ConfigError, match="layers is not made from a target"):
        spec_of(config, count)


def test_every_layer_keeps_its_window() -> None:
    config = ModelConfig.from_hugging_face(tiny_config(num_hidden_layers=4), None)
    mixed = replace(config, architecture="qwen2", windows=(None, None, 8, 8))
    assert spec_of(mixed, 3).config.windows == (None, None, 8)
    assert spec_of(mixed, 1).config.windows == ()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_computes_what_its_folder_does(architecture: TinyArchitecture, tmp_path: Path) -> None:
    """The folder that is written is the model that was trained, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"num_hidden_layers": 4, **ARCHITECTURES[architecture]}
    loaded = load_model(write_tiny_model(tmp_path / "target", architecture, **settings))
    draft = make_model_draft(loaded, Teacher(loaded.config, loaded.tensors), num_layers=3)
    draft.write(tmp_path / "draft", {})
    tokens = torch.randint(0, 304, (2, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    with torch.no_grad():
        hidden = draft.learner.head(draft.learner.teacher.embedding[tokens])
        expected = model(tokens).logits
    np.testing.assert_allclose(draft.learner.teacher.logits(hidden), expected, rtol=2e-2, atol=4e-2)  # it is in fp16
    assert load_model(tmp_path / "draft").config == draft.learner.head.spec.config


def test_all_layers_would_be_the_target() -> None:
    teacher = tiny_teacher()
    config = teacher.config
    whole = ThinSpec(target_name="", target_hash="", layers=tuple(range(4)), config=config)
    tokens = make_batch(SAMPLES, max_length=32).token_ids
    hidden = ThinModel(whole, teacher._weights, device=teacher.device)(teacher.embedding[tokens])
    torch.testing.assert_close(hidden, teacher.read(tokens).last_hidden)


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of the answers but the first, after the true text; in whatever pieces it is computed."""
    pupil = learner()
    batch = make_batch(SAMPLES[:3], max_length=25)
    lesson = lesson_of(pupil, batch)
    found = pupil.loss(lesson, SETTINGS, seed=0)
    monkeypatch.setattr("understudy.train.losses._MOST_SCORES", 7 * pupil.teacher.config.vocab_size)
    torch.testing.assert_close(pupil.loss(lesson, SETTINGS, seed=0), found)
    losses: list[Tensor] = []
    distance = Distance(temperatures=SETTINGS.temperatures, cross_entropy_share=SETTINGS.cross_entropy_share)
    for place in range(3):
        hidden = pupil.head(pupil.teacher.embedding[batch.token_ids[place : place + 1]])
        for last_read in range(int(batch.answer_starts[place]), int(batch.lengths[place]) - 1):
            logits = pupil.teacher.logits(hidden[0, last_read : last_read + 1])
            laws = lesson.laws.at(lesson.lines_at(torch.full((3, 1), last_read))[place])
            theirs = pupil.teacher.logits(laws.states)
            losses.append(distance.measure(logits, theirs, laws, torch.ones(1))[0])
    torch.testing.assert_close(found, torch.cat(losses).mean())


def test_pieces_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients: list[dict[str, Tensor]] = []
    for most_rows in (2048, 7):
        pupil = learner()
        monkeypatch.setattr("understudy.train.losses._MOST_SCORES", most_rows * pupil.teacher.config.vocab_size)
        pupil.loss(lesson_of(pupil), SETTINGS, seed=0).backward()
        gradients.append({name: p.grad for name, p in pupil.head.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == dict(learner().head.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6)


def test_training_twice_gives_the_same_weights_in_parts_too(tmp_path: Path) -> None:
    whole = trained(tmp_path / "a")
    assert same(whole, trained(tmp_path / "b"))
    assert same(whole, trained(tmp_path / "c", parts=(3, 7, 11)))


def test_the_loss_goes_down_and_every_parameter_learns(tmp_path: Path) -> None:
    pupil = learner()
    lesson = lesson_of(pupil)
    before = {name: value.clone() for name, value in pupil.head.state_dict().items()}
    loss = float(pupil.loss(lesson, SETTINGS, seed=0).detach())
    train(pupil, SAMPLES, replace(SETTINGS, num_steps=40, weight_decay=0.0), state_file=tmp_path / "state")
    assert float(pupil.loss(lesson, SETTINGS, seed=0).detach()) < 0.8 * loss
    assert not [name for name, value in pupil.head.state_dict().items() if torch.equal(value, before[name])]
    assert torch.equal(pupil.teacher.embedding, tiny_teacher().embedding)


def test_a_state_of_other_layers_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "state")
    with pytest.raises(ConfigError, match="other spec"):
        train(learner(num_layers=3), SAMPLES, SETTINGS, state_file=tmp_path / "state")


def test_in_bf16_as_on_a_gpu_it_loses_about_the_same() -> None:
    losses: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        pupil = learner(dtype=dtype)
        with pupil.teacher.computing():
            loss = pupil.loss(lesson_of(pupil), SETTINGS, seed=0)
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in pupil.head.parameters())
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_the_target_stays_as_it_was() -> None:
    config = tiny_config(num_hidden_layers=4, tie_word_embeddings=False)
    tensors = tiny_tensors(config)
    head = ThinModel(spec_of(ModelConfig.from_hugging_face(config, None)), tensors, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 1.0
    assert all(torch.equal(tensor, tiny_tensors(config)[name]) for name, tensor in tensors.items())

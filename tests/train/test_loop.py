"""Training: it learns, it repeats itself, and it goes on from where it stopped to the same weights."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.tiny_heads import tiny_guesser, tiny_samples
from understudy.errors import ConfigError, ModelError
from understudy.models.heads.spec import HEAD_KINDS, HeadKind
from understudy.train.data import Batches, make_batch
from understudy.train.guesses import batch_loss, draw_anchors
from understudy.train.lessons import Lessons, read_lesson
from understudy.train.loop import rate_at, train
from understudy.train.settings import TrainSettings

SETTINGS = TrainSettings(
    num_steps=12, learning_rate=3e-3, max_length=32, tokens_per_batch=120, num_anchors=8, save_every_steps=5
)
SAMPLES = tiny_samples(12)


def trained(kind: HeadKind, state: Path, *, seed: int = 0, parts: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Train a tiny head, stopping after so many steps in each part before the last; each part is a new process's."""
    settings = replace(SETTINGS, seed=seed)
    for stop in parts:
        guesser = tiny_guesser(kind, seed=seed)
        with pytest.raises(KeyboardInterrupt):
            train(guesser, SAMPLES, settings, state_file=state, watcher=interrupt_at(stop))
    guesser = tiny_guesser(kind, seed=seed)
    came = train(guesser, SAMPLES, settings, state_file=state)
    assert came.is_done
    return guesser.head.state_dict()


def interrupt_at(stop: int):  # type: ignore[no-untyped-def]
    def watch(step: int, _: int, __: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    return watch


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_one_seed_gives_the_same_weights_and_another_others(kind: HeadKind, tmp_path: Path) -> None:
    first = trained(kind, tmp_path / "a")
    assert same(first, trained(kind, tmp_path / "b"))
    assert not same(first, trained(kind, tmp_path / "c", seed=1))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_interrupted_training_comes_to_the_same_weights(kind: HeadKind, tmp_path: Path) -> None:
    whole = trained(kind, tmp_path / "whole")
    assert same(whole, trained(kind, tmp_path / "parts", parts=(3, 7, 11)))


def test_the_time_is_kept_and_the_state_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    for num_steps in (3, 6, 9):
        clock = itertools.count()  # a second passes whenever somebody looks
        with monkeypatch.context() as patched:
            patched.setattr("understudy.train.loop.time", SimpleNamespace(monotonic=lambda: next(clock)))  # noqa: B023
            came = train(tiny_guesser("medusa"), SAMPLES, SETTINGS, state_file=state, deadline_s=4.0)
        assert (came.step, came.is_done) == (num_steps, False)
    assert same(trained("medusa", tmp_path / "whole"), trained("medusa", state))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_the_loss_goes_down(kind: HeadKind, tmp_path: Path) -> None:
    guesser = tiny_guesser(kind)
    settings = replace(SETTINGS, num_steps=40, learning_rate=1e-2)
    lesson = read_lesson(guesser, make_batch(SAMPLES, max_length=32), settings.temperatures)
    anchors = draw_anchors(lesson.batch, 8, seed=0)

    def loss() -> float:
        with torch.no_grad():
            return float(batch_loss(guesser, lesson, anchors, settings))

    before = loss()
    train(guesser, SAMPLES, settings, state_file=tmp_path / "state")
    assert loss() < 0.8 * before


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_in_bf16_as_on_a_gpu_it_loses_about_the_same(kind: HeadKind) -> None:
    losses: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):
        guesser = tiny_guesser(kind, dtype=dtype)
        lesson = read_lesson(guesser, make_batch(SAMPLES, max_length=32), SETTINGS.temperatures)
        read = lesson.reading.features if kind != "medusa" else lesson.reading.last_hidden
        assert read.dtype == dtype
        with guesser.teacher.computing():
            loss = batch_loss(guesser, lesson, draw_anchors(lesson.batch, 8, seed=0), SETTINGS)
        loss.backward()
        assert all(parameter.grad is not None for parameter in guesser.head.parameters())
        assert loss.dtype == torch.float32
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_every_parameter_learns(tmp_path: Path) -> None:
    """A parameter that no loss reaches would be dead weight in every file."""
    for kind in HEAD_KINDS:
        guesser = tiny_guesser(kind)
        before = {name: value.clone() for name, value in guesser.head.state_dict().items()}
        settings = replace(SETTINGS, weight_decay=0.0, num_steps=3)
        train(guesser, SAMPLES, settings, state_file=tmp_path / kind)
        unmoved = [name for name, value in guesser.head.state_dict().items() if torch.equal(value, before[name])]
        assert not unmoved


@pytest.mark.parametrize("change", [{"seed": 5}, {"learning_rate": 0.5}, {"num_steps": 13}])
def test_a_state_of_other_settings_is_refused(change: dict[str, float], tmp_path: Path) -> None:
    trained("medusa", tmp_path / "state")
    with pytest.raises(ConfigError, match="other settings"):
        train(tiny_guesser("medusa"), SAMPLES, replace(SETTINGS, **change), state_file=tmp_path / "state")  # type: ignore[arg-type]


def test_a_state_of_other_data_or_another_draft_is_refused(tmp_path: Path) -> None:
    trained("medusa", tmp_path / "state")
    with pytest.raises(ConfigError, match="other samples"):
        train(tiny_guesser("medusa"), SAMPLES[1:], SETTINGS, state_file=tmp_path / "state")
    with pytest.raises(ConfigError, match="other spec"):
        train(tiny_guesser("eagle"), SAMPLES, SETTINGS, state_file=tmp_path / "state")


def test_a_damaged_state_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    trained("medusa", file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"state\.pt is damaged"):
        train(tiny_guesser("medusa"), SAMPLES, SETTINGS, state_file=file)


def test_anchors_are_different_places_of_the_answer() -> None:
    batch = make_batch(SAMPLES[:5], max_length=32)
    anchors = draw_anchors(batch, 99, seed=0)
    for line, length in zip(anchors.tolist(), batch.lengths.tolist(), strict=True):
        usable = [anchor for anchor in line if anchor != length - 1]
        assert sorted(usable) == list(range(3, length - 2))
    few = draw_anchors(batch, 4, seed=0)
    assert few.shape == (5, 4)
    assert torch.equal(few, anchors[:, :4])
    assert not torch.equal(few, draw_anchors(batch, 4, seed=1))


def test_the_rate_rises_and_falls() -> None:
    settings = replace(SETTINGS, num_steps=100, warmup_share=0.1)
    rates = [rate_at(step, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0.05 < rates[-1] < 0.06


@pytest.mark.parametrize(
    "change", [{"num_steps": 0}, {"learning_rate": -1.0}, {"temperatures": ()}, {"cross_entropy_share": 2.0}]
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        TrainSettings(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_what_was_kept_of_a_lesson_teaches_the_same(kind: HeadKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all of it, for its laws alone, and for nothing."""
    guesser = tiny_guesser(kind)
    batches = Batches(SAMPLES, max_length=32, tokens_per_batch=120, seed=0)
    losses = set()
    for room in (1.0, 0.15, 0.0):
        monkeypatch.setattr(Lessons, "_has_room", lambda _, share, room=room: room > share)
        lessons = Lessons(guesser, batches, SETTINGS.temperatures)
        for _ in range(2):
            lesson = lessons.at(0)
            with torch.no_grad():
                losses.add(float(batch_loss(guesser, lesson, draw_anchors(lesson.batch, 8, seed=0), SETTINGS)))
        kept = lessons._kept.values()
        assert [one.reading.is_whole for one in kept] == {1.0: [True], 0.15: [False], 0.0: []}[room]
    assert len(losses) == 1

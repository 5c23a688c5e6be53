"""Training: steps that are a function of the settings, the data and their number, so that they can stop anywhere.

A run keeps its whole state in one file, written in whole or not at all. Started again, it goes on where that file
stands and comes to the same weights, bit for bit on one machine's CPU: every random choice of a step is drawn from the
seed and the step's number.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from understudy.errors import ConfigError, ModelError
from understudy.models.heads.files import replace_file
from understudy.train.data import Batches, Sample, samples_digest, step_seed
from understudy.train.lessons import Learner, Lesson, Lessons
from understudy.train.settings import TrainSettings

Watcher = Callable[[int, int, float], None]
"""Told the steps done, the steps in all, and the mean loss of late."""

_SAVE_EVERY_S = 60.0
"""Where steps are slow, the state is written as often as this."""
_LOOK_EVERY_STEPS = 16
"""On a GPU, whom nobody keeps waiting in between."""
_LENGTH_STEP = 64
"""On a GPU attention is planned anew for every shape, a tenth of a second each: so there are to be few."""
_LOWEST_RATE = 0.05


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far training came."""

    step: int
    num_steps: int
    loss: float
    """Mean of late."""

    @property
    def is_done(self) -> bool:
        """Whether all steps were made."""
        return self.step >= self.num_steps


def train(
    learner: Learner,
    samples: list[Sample],
    settings: TrainSettings,
    *,
    state_file: Path,
    deadline_s: float = math.inf,
    watcher: Watcher | None = None,
) -> Progressed:
    """Train a head until all steps are made or the clock (`time.monotonic`) reaches the deadline.

    Goes on from `state_file` if there is one. The deadline leaves it up to date. An interruption may fall into the
    midst of a step, so it leaves what was last written.
    """
    head = learner.head
    on_gpu = next(head.parameters()).is_cuda
    batches = Batches(
        samples,
        max_length=settings.max_length,
        tokens_per_batch=settings.tokens_per_batch,
        seed=settings.seed,
        length_step=_LENGTH_STEP if on_gpu else 1,
    )
    optimizer = _optimizer(head, settings)
    identity = _identity(learner, samples, settings)
    step, late = _resume(state_file, head, optimizer, identity)
    look_every = _LOOK_EVERY_STEPS if on_gpu else 1
    lessons = Lessons(learner, batches, settings.temperatures)
    saved_s = time.monotonic()
    while step < settings.num_steps and (now_s := time.monotonic()) < deadline_s:
        found = _step(learner, optimizer, lessons.at(step), settings, step)
        step += 1
        late = found if step == 1 else 0.98 * late + 0.02 * found
        if step % settings.save_every_steps == 0 or now_s - saved_s >= _SAVE_EVERY_S:
            _save(state_file, head, optimizer, identity, step, _looked_at(late, step))
            saved_s = now_s
        if watcher is not None and step % look_every == 0:
            watcher(step, settings.num_steps, _looked_at(late, step))
    loss = _looked_at(late, step)
    _save(state_file, head, optimizer, identity, step, loss)
    return Progressed(step, settings.num_steps, loss)


def _optimizer(head: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Matrices are drawn towards zero, norms and biases are not."""
    matrices = [parameter for parameter in head.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in head.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    on_gpu = next(head.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=on_gpu)


def _step(
    learner: Learner, optimizer: torch.optim.Optimizer, lesson: Lesson, settings: TrainSettings, step: int
) -> Tensor:
    """Make a step, and give its loss, which nobody has waited for."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * rate_at(step, settings)
    with learner.teacher.computing():
        loss = learner.loss(lesson, settings, seed=step_seed(settings.seed, -1 - step))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learner.head.parameters(), settings.clip_norm)
    optimizer.step()
    return loss.detach()


def _looked_at(late: Tensor, step: int) -> float:
    """The mean loss of late; what has once been no number stays none."""
    loss = float(late)
    if step > 0 and not math.isfinite(loss):
        raise ConfigError(f"The loss after step {step} is {loss}.", "Train anew with a lower learning rate.")
    return loss


def rate_at(step: int, settings: TrainSettings) -> float:
    """The learning rate of a step by the highest: a rise, then a cosine."""
    warmup = max(1, round(settings.warmup_share * settings.num_steps))
    if step < warmup:
        return (step + 1) / warmup
    passed = (step - warmup) / max(1, settings.num_steps - warmup)
    return _LOWEST_RATE + (1.0 - _LOWEST_RATE) * 0.5 * (1.0 + math.cos(math.pi * passed))


def _identity(learner: Learner, samples: list[Sample], settings: TrainSettings) -> dict[str, Any]:
    """What a state belongs to: to go on with anything else would come to something that no settings tell of."""
    ids = learner.vocabulary.ids.cpu().numpy().tobytes()
    # how often the state is written changes nothing about it
    return {
        "settings": {name: value for name, value in settings.describe().items() if name != "save_every_steps"},
        "spec": learner.describe(),
        "samples": samples_digest(samples),
        "draft_ids": hashlib.sha256(ids).hexdigest(),
        "first weights": _digest(learner.head),
    }


def _digest(head: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in head.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _save(
    path: Path, head: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any], step: int, loss: float
) -> None:
    state = {
        "identity": json.dumps(identity, sort_keys=True),
        "step": step,
        "loss": loss,
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    written = io.BytesIO()
    torch.save(state, written)
    replace_file(path, written.getvalue())


def _resume(
    path: Path, head: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> tuple[int, Tensor]:
    """Go on from a state, if there is one: the step to make next, and the loss of late."""
    if not path.is_file():
        return 0, torch.tensor(math.nan)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        was = json.loads(state["identity"])
    except Exception as error:  # torch raises whatever it meets in a damaged file
        raise ModelError(f"{path} is damaged: {error}.", "Delete it to train anew.") from None
    for name, value in json.loads(json.dumps(identity)).items():
        if was.get(name) != value:
            raise ConfigError(
                f"{path} is of a training run with other {name}.", "Delete it to train anew, or choose another folder."
            )
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), torch.tensor(float(state["loss"]), device=next(head.parameters()).device)

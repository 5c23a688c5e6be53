"""Collect, train, evaluate, export: one folder, in parts that can stop anywhere and go on.

    OUT/work/collect.json    what is being collected, and for which target
    OUT/work/samples.jsonl   the target's answers
    OUT/work/state.pt        training, as far as it came
    OUT/work/draft/          the trained draft, before it is measured
    OUT/work/measured.json   what it was measured at so far
    OUT/speculators/         the trained draft for others to load, if it is an eagle
    OUT/draft.json, weights.safetensors    the trained draft, written last; a draft of kind `model` has a model's files

Answers may lie in a folder of their own instead, so that several drafts learn from the same.

The same call with the same arguments goes on where the last one stopped; other arguments for the same folder are
refused, because what would come of it no settings would tell of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from understudy import __version__
from understudy.assembly import Target, load_target
from understudy.config import EngineConfig
from understudy.core.weights import DeviceChoice
from understudy.errors import ConfigError
from understudy.llm import LLM
from understudy.models import embedded, hub
from understudy.models.heads.draft_vocabulary import DraftVocabulary, choose_vocabulary, coverage
from understudy.models.heads.files import (
    DraftHead,
    StoredType,
    TrainedHead,
    is_head_folder,
    load_head,
    make_head,
    replace_file,
    save_head,
)
from understudy.models.heads.spec import HeadKind, HeadSpec, default_spec
from understudy.models.heads.speculators_format import save_speculators
from understudy.models.load import load_model
from understudy.models.weights import LoadedModel
from understudy.train import collect as collecting
from understudy.train.collect import CollectSettings
from understudy.train.data import Sample, read_samples, samples_digest, split_samples
from understudy.train.guesses import Guesser
from understudy.train.held_out import HeldOut, measure_held_out
from understudy.train.lessons import Learner
from understudy.train.loop import Progressed, train
from understudy.train.model_draft import make_model_draft
from understudy.train.prompts import TrainPrompt, read_prompts
from understudy.train.settings import TrainSettings
from understudy.train.teacher import Teacher

_GPU_ROWS, _CPU_ROWS = 1024, 256
"""Rows of a step while answers are collected: half for texts that are being written, half for prompts."""

_NUM_DRAFT_IDS = 8192
DraftKind = HeadKind | Literal["model"]

Watcher = Callable[[str, int, int, str], None]
"""Told the part under way, what is done of it and what there is in all, and something to show beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be trained, and from what."""

    kind: DraftKind
    out: Path
    answers: Path | None = None
    """Where answers are kept, if not in the folder of the draft."""
    model: str | None = None
    data: tuple[str, ...] = ()
    max_prompts: int | None = None
    num_draft_ids: int | None = None
    """Of its own, 8192 if None; a model can guess every id."""
    num_layers: int | None = None
    """Of a block or a model; what suits the target if None."""
    begin_with: Path | None = None
    """The folder of a draft that is trained further; its size and its ids stay as they are."""
    held_out_share: float = 0.02
    measured_by_class: int = 8
    """Held-out prompts of each class that the draft is measured on; 0 leaves it unmeasured."""
    stored: StoredType | None = None
    """int8 if None; a model is in fp16."""
    device: DeviceChoice = "auto"
    num_threads: int | None = None
    collect: CollectSettings = field(default_factory=CollectSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        if self.begin_with is not None and (self.num_draft_ids or self.num_layers):
            raise ConfigError("A draft that is trained further keeps its ids and layers.", "Leave their numbers out.")
        if self.begin_with is not None and self.begin_with.resolve() == self.out.resolve():
            raise ConfigError(f"{self.out} would be begun with and written to.", "Name another folder for what comes.")
        if self.kind != "model":
            return
        if self.begin_with is not None:
            raise ConfigError("A draft of kind model begins with the target's layers.", "Train another kind further.")
        if self.num_draft_ids is not None:
            raise ConfigError("A draft of kind model can guess every id.", "Leave the number of draft ids out.")
        if self.stored == "int8":
            raise ConfigError("A draft of kind model is stored in fp16, as models are.", "Leave int8 out.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a run came."""

    part: str
    """The part that it stopped in, or `done`."""
    measured: dict[str, Any]
    """What the draft was measured at; empty until it is done."""

    @property
    def is_done(self) -> bool:
        """Whether the draft is written."""
        return self.part == "done"


class Draft(Protocol):
    """What is being made."""

    @property
    def learner(self) -> Learner:
        """What is trained of it."""

    def write(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write it as it is served, with where it comes from."""


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """A network that reads the target's hidden states."""

    learner: Guesser
    stored: StoredType

    def write(self, folder: Path, provenance: dict[str, Any]) -> None:
        """Write `draft.json` and its weights."""
        save_head(folder, self._trained(provenance), stored=self.stored)

    def write_speculators(self, folder: Path, *, verifier: str) -> None:
        """Write an eagle for others to load beside its target, which they know as `verifier`."""
        save_speculators(folder, self._trained({}), self.learner.teacher.output, verifier=verifier)

    def _trained(self, provenance: dict[str, Any]) -> TrainedHead:
        head = self.learner.head
        return TrainedHead(head.spec, head, self.learner.vocabulary, provenance)


def run(plan: Plan, *, deadline_s: float = math.inf, watcher: Watcher | None = None) -> Outcome:
    """Do what is left to do of a plan until the clock (`time.monotonic`) reaches the deadline."""
    tell: Watcher = watcher or (lambda *_: None)
    prompts = read_prompts(plan.data) if plan.data else []
    prompts = prompts[: plan.max_prompts]
    if not prompts and not plan.collect.num_made:
        raise ConfigError("There is nothing to train on.", "Name files of prompts, or ask for self-elicited ones.")
    loaded = load_model(plan.model)
    if plan.begin_with is not None:
        _begun(plan.begin_with, plan, loaded)  # refused before answers are collected, not after
    work = plan.out / "work"
    answers = plan.answers or work
    for folder in (work, answers):
        folder.mkdir(parents=True, exist_ok=True)
    _check_same_kind(plan, work)
    _check_same_collection(answers / "collect.json", _collection(plan, prompts, loaded))
    if not _collect(plan, prompts, answers / "samples.jsonl", deadline_s=deadline_s, tell=tell):
        return Outcome("collect", {})
    samples = read_samples(answers / "samples.jsonl", vocab_size=loaded.config.vocab_size)
    kept, held_out = split_samples(samples, held_out_share=plan.held_out_share)
    draft = _draft(plan, loaded, kept)
    with _threads(plan.num_threads), _fast_products():
        came = _train(plan, draft.learner, kept, work / "state.pt", deadline_s=deadline_s, tell=tell)
    if not came.is_done:
        return Outcome("train", {})
    measured: dict[str, Any] = {
        "loss": came.loss,
        "coverage": coverage(draft.learner.vocabulary, (sample.answer_ids for sample in held_out)),
    }
    provenance = _provenance(plan, prompts, samples) | {"measured": measured}
    draft.write(work / "draft", provenance)
    if plan.measured_by_class:
        arms = _measure(plan, held_out, work, deadline_s=deadline_s, tell=tell)
        if arms is None:
            return Outcome("evaluate", {})
        measured["arms"] = arms
    if isinstance(draft, HeadDraft) and plan.kind == "eagle":
        draft.write_speculators(plan.out / "speculators", verifier=_verifier(plan.model))
    draft.write(plan.out, provenance)
    return Outcome("done", measured)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Let torch use so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _fast_products() -> Iterator[None]:
    """Let a GPU round factors of fp32 products to 11 bits: far finer than what training can tell apart."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _collect(plan: Plan, prompts: Sequence[TrainPrompt], path: Path, *, deadline_s: float, tell: Watcher) -> bool:
    """Collect what is missing; no engine is built if nothing is."""
    num_wanted = len(prompts) + plan.collect.num_made
    num_lines = path.read_bytes().count(b"\n") if path.is_file() else 0
    if num_lines >= num_wanted:
        return True
    is_on_gpu = train_device(plan.device) == "cuda"
    num_rows = _GPU_ROWS if is_on_gpu else _CPU_ROWS
    config = EngineConfig(
        drafters=(),  # with so many texts at once there is nothing to gain
        device=plan.device,
        num_threads=plan.num_threads,
        max_sequences=min(plan.collect.group, num_rows // 2),
        max_rows_per_step=num_rows,
    )
    llm = LLM(plan.model, config=config)
    return collecting.collect(
        llm,
        prompts,
        path,
        plan.collect,
        deadline_s=deadline_s,
        watcher=lambda done, total: tell("collect", done, total, ""),
    )


def _train(
    plan: Plan, learner: Learner, samples: list[Sample], state_file: Path, *, deadline_s: float, tell: Watcher
) -> Progressed:
    return train(
        learner,
        samples,
        plan.train,
        state_file=state_file,
        deadline_s=deadline_s,
        watcher=lambda done, total, loss: tell("train", done, total, f"loss {loss:.3f}"),
    )


def _measure(
    plan: Plan, samples: Sequence[Sample], work: Path, *, deadline_s: float, tell: Watcher
) -> list[dict[str, Any]] | None:
    """Measure what was written as it will serve. Medusa serves on a CPU alone."""

    def load() -> Target:
        device: DeviceChoice = "cpu" if plan.kind == "medusa" else plan.device
        return load_target(plan.model, device=device, num_threads=plan.num_threads)

    held_out = HeldOut(
        samples=samples, prompts_by_class=plan.measured_by_class, max_tokens=plan.collect.max_tokens
    )  # fmt: skip
    return measure_held_out(
        load,
        work / "draft",
        held_out,
        notes=work / "measured.json",
        deadline_s=deadline_s,
        watcher=lambda done, total: tell("evaluate", done, total, ""),
    )


def _verifier(model: str | None) -> str:
    """How others name the target: by its name on the hub, or by its place."""
    if model is None:
        return embedded.HUB_NAME
    return hub.HubName.parse(model).repository if model.startswith(hub.PREFIX) else str(Path(model).resolve())


def _draft(plan: Plan, loaded: LoadedModel, samples: Sequence[Sample]) -> Draft:
    """A draft of the planned kind as it is before training, beside its teacher."""
    device = train_device(plan.device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    teacher = Teacher(loaded.config, loaded.tensors, device=device, dtype=dtype)
    if plan.kind == "model":
        return make_model_draft(loaded, teacher, num_layers=plan.num_layers)
    if plan.begin_with is not None:
        begun = _begun(plan.begin_with, plan, loaded)
        head = begun.head.requires_grad_().to(device)
        return HeadDraft(Guesser(head, begun.vocabulary, teacher), plan.stored or "int8")
    vocabulary = _vocabulary(plan, loaded, samples)
    spec = default_spec(
        plan.kind,
        loaded.config,
        target_name=loaded.name,
        target_hash=loaded.source_hash,
        num_draft_ids=len(vocabulary),
        num_layers=plan.num_layers,
    )
    guesser = Guesser(new_head(spec, seed=plan.train.seed).to(device), vocabulary, teacher)
    return HeadDraft(guesser, plan.stored or "int8")


def _begun(folder: Path, plan: Plan, loaded: LoadedModel) -> TrainedHead:
    """The draft that is trained further."""
    begun = load_head(folder)
    begun.spec.check_target(loaded.config)
    if begun.spec.kind != plan.kind:
        raise ConfigError(f"{folder} is a draft of kind {begun.spec.kind}.", f"Say --kind {begun.spec.kind}.")
    return begun


def new_head(spec: HeadSpec, *, seed: int) -> DraftHead:
    """Build a network with weights that the seed decides; nobody else's random numbers are touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_head(spec)


def train_device(wanted: DeviceChoice) -> str:
    """Where to train: a GPU if there is one, unless the CPU is asked for."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("There is no GPU that torch can use.", "Leave --device out, or say --device cpu.")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def _vocabulary(plan: Plan, loaded: LoadedModel, samples: Sequence[Sample]) -> DraftVocabulary:
    special = {*loaded.tokenizer.eos_ids, *loaded.tokenizer.special_ids}
    return choose_vocabulary(
        (sample.answer_ids for sample in samples),
        size=plan.num_draft_ids or _NUM_DRAFT_IDS,
        vocab_size=loaded.config.vocab_size,
        always=(token for token in special if token < loaded.config.vocab_size),
    )


def _collection(plan: Plan, prompts: Sequence[TrainPrompt], loaded: LoadedModel) -> dict[str, Any]:
    """What the collected answers are a function of."""
    messages = [[prompt.prompt_class, *prompt.messages] for prompt in prompts]
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
    collected = {name: value for name, value in asdict(plan.collect).items() if name != "group"}
    return {"target": loaded.source_hash, "prompts": f"sha256:{digest}", "settings": collected}


def _check_same_kind(plan: Plan, work: Path) -> None:
    """A folder with a `draft.json` is taken for a network, whatever model lies beside it."""
    if plan.kind == "model" and any(is_head_folder(folder) for folder in (plan.out, work / "draft")):
        raise ConfigError(
            f"{plan.out} holds a trained draft that is no model.", "Choose another folder, or delete this one."
        )


def _check_same_collection(path: Path, wanted: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    if not path.is_file():
        replace_file(path, json.dumps(wanted, indent=2).encode())
        return
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = {}
    for name, value in wanted.items():
        if not isinstance(found, dict) or found.get(name) != value:
            raise ConfigError(
                f"{path.parent} holds answers that were collected with other {name}.",
                "Choose another folder, or delete this one to collect anew.",
            )


def _provenance(plan: Plan, prompts: Sequence[TrainPrompt], samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "data": [Path(place).name for place in plan.data],
        "num_prompts": len(prompts),
        "num_samples": len(samples),
        "num_answer_tokens": sum(len(sample.answer_ids) for sample in samples),
        "samples": samples_digest(samples),
        "collect": asdict(plan.collect),
        "train": plan.train.describe(),
        "held_out_share": plan.held_out_share,
        **({} if plan.begin_with is None else {"begun_with": load_head(plan.begin_with).provenance}),
        "versions": {"understudy": __version__, "torch": torch.__version__},
    }

"""Puts a draft beside a target: the one that comes with the package for it, another trained one, or a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from understudy.config import TRAINED_DRAFTERS
from understudy.control.rules import memory_notice
from understudy.core.events import EventSink, Fallback, Notice, log_fallbacks
from understudy.errors import ConfigError, ModelError
from understudy.models.draft_check import check_draft
from understudy.models.heads.files import SPEC_FILE, is_head_folder, load_head
from understudy.models.heads.shipped import SHIPPED, default_draft_for, kinds_for, shipped_draft
from understudy.models.heads.widen_head import widen_head
from understudy.models.twin import load_draft
from understudy.target import DraftModel, Target, TrainedDraft, pack
from understudy.text.vocabulary import compare_vocabularies

_OWN_LAYERS = "layers:"
"""`layers:N` is a draft that needs no second model: the target's own first N layers."""

_NAME_IT = (
    "one comes with this model; on a GPU it is used if it is named (`--draft {kind}`): it pays with a text or a few"
)


def with_draft(
    target: Target,
    draft: str | Path,
    *,
    cross_tokenizer: bool = False,
    emit: EventSink = log_fallbacks,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """The target with a draft beside it: one that was trained for it, or a model.

    A kind of trained draft (or its name) is one that comes with the package; a folder with a `draft.json` is a trained
    one, too. `layers:N` is the target's first N layers; `twin:S` is the target before it was widened, with noise on its
    matrices of S times their spread. All else is a model of its own.
    """
    if str(draft).startswith(_OWN_LAYERS):
        return replace(target, draft=_own_layers(target, str(draft)))
    folder = trained_folder(draft, target.trained_hash)
    if folder is not None:
        return _with_trained(target, folder, emit)
    loaded = load_draft(draft, target.place, progress=progress)
    config = target.decoder.config
    notices = check_draft(config, loaded.config, target_name=target.name, draft_name=loaded.name)
    vocabulary = compare_vocabularies(
        target.tokenizer,
        loaded.tokenizer,
        target_rows=config.vocab_size,
        draft_rows=loaded.config.vocab_size,
        cross_tokenizer=cross_tokenizer,
    )
    if not vocabulary.is_same:
        notices.append(vocabulary.describe())
    # A worse guess is a slower one and never another word: on the CPU int8 throughout is the fastest.
    on_cpu = target.device == "cpu"
    weights = "int8" if on_cpu else target.weights
    decoder = pack(loaded, target.decoder.kernels, weights=weights, int8_output=on_cpu)
    longest = target.kv_bytes_per_token * config.max_positions
    notices.append(memory_notice(draft_bytes=decoder.num_bytes, kv_bytes_per_sequence=longest))
    for notice in filter(None, notices):
        emit(Notice("the draft model", notice))
    return replace(target, draft=DraftModel(decoder, vocabulary, loaded.name, decoder.num_bytes))


def with_draft_for(target: Target, drafters: Sequence[str], *, emit: EventSink = log_fallbacks) -> Target:
    """The target with the draft that drafters need: its own, or else the one of a kind that comes with the package."""
    missing = [name for name in drafters if name in TRAINED_DRAFTERS and name != target.draft_kind]
    return with_draft(target, missing[0], emit=emit) if missing else target


def shipped_kinds(target: Target, *, emit: EventSink = log_fallbacks) -> list[str]:
    """The kinds of trained drafts that come with the package for a target, the best first, without those that fail."""
    try:
        kinds = kinds_for(target.trained_hash)
    except ModelError as error:
        emit(_left_out(error))
        return []
    return [kind for kind in kinds if with_default_draft(target, emit, kind=kind).draft_kind == kind]


def with_default_draft(target: Target, emit: EventSink, *, kind: str | None = None) -> Target:
    """The target with the draft that comes with the package for it, if one does. Nobody asked: nothing is refused.

    On a GPU a trained draft has to be named: beside many texts it costs there though it rests. Whoever has one is told.
    """
    own_hash = target.trained_hash
    try:
        if target.device != "cpu":
            for best in [] if kind else kinds_for(own_hash)[:1]:
                emit(Notice("the trained draft", _NAME_IT.format(kind=best)))
            return target
        folder = default_draft_for(own_hash) if kind is None else shipped_draft(kind, own_hash)
        return target if folder is None else _with_trained(target, folder, emit)
    except ModelError as error:
        emit(_left_out(error))
        return replace(target, draft_problem=str(error))


def _left_out(error: ModelError) -> Fallback:
    return Fallback("the trained draft", f"going on without it: {error}")


def _with_trained(target: Target, folder: Path, emit: EventSink) -> Target:
    draft = load_trained(folder, target)
    longest = target.kv_bytes_per_token * target.decoder.config.max_positions
    notice = memory_notice(draft_bytes=draft.num_bytes, kv_bytes_per_sequence=longest)
    if notice:
        emit(Notice("the trained draft", notice))
    return replace(target, draft=draft)


def _own_layers(target: Target, draft: str) -> DraftModel:
    count = draft.removeprefix(_OWN_LAYERS)
    most = target.decoder.config.num_layers - 1
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise ConfigError(f"The draft {draft!r} names no layers of its target.", f"Give {_OWN_LAYERS}1 to {most}.")
    tokenizer, rows = target.tokenizer, target.decoder.config.vocab_size
    same = compare_vocabularies(tokenizer, tokenizer, target_rows=rows, draft_rows=rows, cross_tokenizer=False)
    return DraftModel(target.decoder.first_layers(int(count)), same, f"{target.name}, its first {count} layers", 0)


def trained_folder(draft: str | Path, target_hash: str | None = None) -> Path | None:
    """Where the trained draft lies that is named by its kind, by its name or by its folder; None if it is none."""
    name = str(draft)
    if name in (*TRAINED_DRAFTERS, *SHIPPED):
        folder = shipped_draft(name, target_hash)
        if folder is None:
            raise ConfigError(
                f"No draft {name!r} comes with this package.", "Train one with `understudy train`, and name its folder."
            )
        return folder
    return Path(draft) if is_head_folder(Path(draft)) else None


def load_trained(folder: Path, target: Target) -> TrainedDraft:
    """Load a trained draft for a target; one that is damaged, or that is for another target, is refused by its name.

    Beside a target that was widened it is widened, too.
    """
    trained = load_head(folder)
    config = target.decoder.config
    try:
        if target.trained_hash != target.source_hash:
            trained = widen_head(trained, config, device=target.device)
        trained.spec.check_target(config, target.trained_hash)
    except ModelError as error:
        raise ModelError(f"{folder / SPEC_FILE}: {error.message}", error.remedy) from None
    num_bytes = sum(tensor.nbytes for tensor in trained.head.state_dict().values())
    return TrainedDraft(trained, folder.resolve().name, num_bytes)

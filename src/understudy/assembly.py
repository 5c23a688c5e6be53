"""Puts an engine together: a target, a draft beside it if there is one, the drafters, and what their passes cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from understudy.config import AUTO_DRAFT, NO_DRAFT, TRAINED_DRAFTERS, EngineConfig
from understudy.control.cost import PROFILED_ROWS, WIDE_ROWS, CostModel, profile, recalled, stepped
from understudy.core.control import PassCosts
from understudy.core.events import EventSink, Fallback, Notice, ignore, log_fallbacks
from understudy.core.shapes import shape_named
from understudy.core.weights import WEIGHTS_ON, Device, DeviceChoice, WeightType
from understudy.drafters.base import Drafter
from understudy.drafters.tree import Shape
from understudy.drafts import shipped_kinds, trained_folder, with_default_draft, with_draft, with_draft_for
from understudy.engine.engine import Engine
from understudy.engine.warming import warm_up
from understudy.errors import CapacityError, ConfigError
from understudy.kernels.devices import (
    choose_device,
    choose_weights,
    make_kernels,
    one_thread,
    room_for_cache,
)
from understudy.kernels.rows import MOST_PLACES
from understudy.models.decoder import Decoder
from understudy.models.load import load_model
from understudy.models.twin import twin_noise
from understudy.models.weights import LoadedModel
from understudy.models.widen import widen_model
from understudy.runtime.runner import Runner
from understudy.runtime.selftest import is_row_invariant
from understudy.sampling.grammar import grammar_compiler
from understudy.target import DraftModel, Target, TrainedDraft, pack

__all__ = [
    "DraftModel",
    "Target",
    "TrainedDraft",
    "build_engine",
    "built_in_drafters",
    "is_for_cpu",
    "load_configured",
    "load_target",
    "load_to_fork",
    "make_drafter",
    "measure_cost",
    "pass_timer",
    "shipped_kinds",
    "tested",
    "weights_on",
    "with_draft",
    "with_draft_for",
]
"""Targets and drafts are defined in files of their own, and are had here."""

_PROFILE_CONTEXT = 1024


def load_target(
    model: str | Path | None = None,
    *,
    device: DeviceChoice = "auto",
    weights: WeightType | None = None,
    draft: str | Path | None = None,
    cross_tokenizer: bool = False,
    widen: str | None = None,
    num_threads: int | None = None,
    self_test: bool = True,
    emit: EventSink = log_fallbacks,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """Load a model (a folder, a GGUF file, `hub:owner/name`, None for the embedded one), and a draft for it.

    The draft is named as in `EngineConfig`; None is none.
    `widen` names a larger shape (core/shapes.py): the model says the same there, at that shape's price.
    Without the self-test nothing is computed yet, and whoever loads has it `tested` before the first word.
    """
    if draft not in (None, NO_DRAFT, AUTO_DRAFT):  # a wrong one is refused before minutes of loading
        twin_noise(draft)
        trained_folder(str(draft))
    chosen = choose_device(device)
    weights = choose_weights(weights, chosen)
    loaded = _load_widened(model, widen, device=chosen, weights=weights, progress=progress)
    kernels = make_kernels(chosen, weights, num_threads=num_threads)
    decoder = pack(loaded, kernels, weights=weights)
    target = Target(
        decoder, loaded.tokenizer, kernels.page_tokens, loaded.name, loaded.source_hash, model, device=chosen
    )
    if self_test:
        target = tested(target, emit)
    if draft is None or draft == NO_DRAFT:
        return target
    if draft == AUTO_DRAFT:
        return with_default_draft(target, emit)
    return with_draft(target, draft, cross_tokenizer=cross_tokenizer, emit=emit, progress=progress)


def tested(target: Target, emit: EventSink) -> Target:
    """The target, with what the self-test finds on this machine."""
    if is_row_invariant(target.decoder, target.page_tokens):
        return target
    emit(Fallback("the self-test", "rows depend on their neighbours on this machine: one by one, and no drafts"))
    return replace(target, is_row_invariant=False)


def _load_widened(
    model: str | Path | None,
    widen: str | None,
    *,
    device: Device,
    weights: WeightType,
    progress: Callable[[int, int], None] | None,
) -> LoadedModel:
    """Load a model, and put it into a larger shape if one is named."""
    if widen is None:
        return load_model(model, progress=progress)
    shape = shape_named(widen)
    return widen_model(load_model(model, progress=progress), shape, device=device, weights=weights, progress=progress)


def weights_on(device: DeviceChoice, wanted: WeightType | None = None) -> tuple[WeightType, ...]:
    """What a device computes with, the default first; those that are wanted must be among them."""
    chosen = choose_device(device)
    choose_weights(wanted, chosen)
    return WEIGHTS_ON[chosen]


def is_for_cpu(config: EngineConfig) -> bool:
    """Whether the CPU is what such an engine computes with on this machine."""
    return config.device != "cuda" and choose_device(config.device) == "cpu"


def load_configured(
    model: str | Path | None,
    config: EngineConfig,
    *,
    widen: str | None = None,
    emit: EventSink = log_fallbacks,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """Load a model, and the draft that the configuration names, as the configuration wants them."""
    return load_target(
        model,
        device=config.device,
        weights=config.weights,
        draft=config.wanted_draft,
        cross_tokenizer=config.cross_tokenizer,
        widen=widen,
        num_threads=config.num_threads,
        emit=emit,
        progress=progress,
    )


def load_to_fork(model: str | Path | None, config: EngineConfig, *, emit: EventSink = log_fallbacks) -> Target:
    """The same for the CPU, with nothing computed, and with no thread left that a fork would miss (see stem.py).

    What grammars need is made here, too, so that no fork has to.
    """
    with one_thread() as num_threads:
        target = load_target(
            model,
            device="cpu",
            weights=config.weights,
            draft=config.wanted_draft,
            cross_tokenizer=config.cross_tokenizer,
            num_threads=config.num_threads or num_threads,
            self_test=False,
            emit=emit,
        )
    shape = target.decoder.config
    grammar_compiler(target.tokenizer, vocab_size=shape.vocab_size, eos_ids=shape.eos_ids)
    return target


def make_drafter(
    name: str,
    target: Target,
    *,
    num_blocks: int,
    draft_cost: CostModel | None = None,
    runner: Runner | None = None,
    config: EngineConfig | None = None,
) -> Drafter:
    """Build a drafter by its name; a draft model gets as many blocks as the target has, and its cost is measured.

    `runner` is the target's, beside which a trained draft runs on a GPU.
    """
    from understudy.drafters.lookahead import LookaheadDrafter
    from understudy.drafters.model import ModelDrafter
    from understudy.drafters.model_ahead import AheadModelDrafter
    from understudy.drafters.ngram import NgramDrafter
    from understudy.drafters.suffix import SuffixDrafter

    if name in TRAINED_DRAFTERS:
        return _trained_drafter(name, target, runner, config or EngineConfig())
    if name == "model":
        draft = target.draft
        if not isinstance(draft, DraftModel):
            raise ConfigError("The drafter 'model' has no model.", "Name one with --draft, or leave this drafter out.")
        own = Runner(draft.decoder, num_blocks=num_blocks, page_tokens=target.page_tokens)
        drafter = AheadModelDrafter if own.draws and draft.vocabulary.is_same else ModelDrafter
        return drafter(own, draft.vocabulary, cost=draft_cost or measure_cost(own))
    drafters: dict[str, Callable[[], Drafter]] = {
        "suffix": SuffixDrafter,
        "ngram": NgramDrafter,
        "lookahead": LookaheadDrafter,
    }
    return drafters[name]()


def _trained_drafter(kind: str, target: Target, runner: Runner | None, config: EngineConfig) -> Drafter:
    draft = target.draft
    if not isinstance(draft, TrainedDraft) or draft.kind != kind:
        there = f"the draft {draft.name} is of the kind {draft.kind}" if draft else "there is none"
        raise ConfigError(
            f"The drafter {kind!r} has no draft: {there}.", "Name one with --draft, or leave this drafter out."
        )
    shape = Shape(num_children=config.draft_tree)
    drafter: Drafter
    if target.device == "cuda":
        from understudy.drafters.trained_cuda import make_trained_drafter_on_device

        assert runner is not None, "a draft on a GPU runs beside its target"
        drafter = make_trained_drafter_on_device(draft.trained, runner, target.decoder, shape=shape)
    else:
        from understudy.drafters.trained import make_trained_drafter

        drafter = make_trained_drafter(draft.trained, target.decoder, shape=shape, num_threads=config.num_threads)
    return drafter


def built_in_drafters() -> list[Drafter]:
    """Those of every engine that drafts: they speak for requests with a grammar or a prediction, free for all others.

    They come first: what they propose is theirs, whoever proposes it as well.
    """
    from understudy.drafters.forced import ForcedDrafter
    from understudy.drafters.prediction import PredictionDrafter

    return [ForcedDrafter(), PredictionDrafter()]


def build_engine(
    target: Target,
    config: EngineConfig | None = None,
    *,
    drafters: Sequence[Drafter] | None = None,
    cost: CostModel | None = None,
    draft_cost: CostModel | None = None,
    measured: PassCosts | None = None,
    emit: EventSink = log_fallbacks,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """Put an engine around a target. Costs that are not given are measured, unless there is nothing to decide.

    `measured` is what an earlier engine found on this machine. On a GPU passes are captured while they are measured, so
    there it is done again.
    """
    config = config or EngineConfig()
    if target.device == "cuda" and (config.max_rows_per_step or 0) > MOST_PLACES:
        raise ConfigError(f"max_rows_per_step is {config.max_rows_per_step}.", f"On a GPU it is {MOST_PLACES} at most.")
    num_blocks = -(-_kv_tokens(target, config) // target.page_tokens)
    if target.device == "cuda":
        emit(Notice("the GPU's memory", _memory_told(target, config, num_blocks * target.page_tokens)))
    runner = Runner(
        target.decoder,
        num_blocks=num_blocks,
        page_tokens=target.page_tokens,
        row_by_row=not target.is_row_invariant,
    )
    is_ours = drafters is None
    if drafters is None:
        drafters = _drafters(target, config, runner, draft_cost=draft_cost, emit=emit)
        drafters = [*built_in_drafters(), *drafters] if drafters else []
    if cost is None and measured is not None and target.device == "cpu":
        cost = recalled(measured)
    if cost is None:
        cost = measure_cost(runner) if drafters else CostModel({1: 1.0})
    for doubt in _doubts(target, config):
        emit(Notice("the policy", doubt))
    if is_ours and drafters and target.device == "cpu":
        warm_up(Engine(runner, target.tokenizer, cost=deepcopy(cost), drafters=drafters, config=config, emit=ignore))
    # where a GPU computes the thread waits for it, and a clock of one's own runs beside no thread's
    running = time.thread_time if target.device == "cpu" and clock is time.perf_counter else None
    return Engine(
        runner,
        target.tokenizer,
        cost=cost,
        drafters=drafters,
        config=config,
        emit=emit,
        clock=clock,
        running=running,
    )


def _drafters(
    target: Target, config: EngineConfig, runner: Runner, *, draft_cost: CostModel | None, emit: EventSink
) -> list[Drafter]:
    """All that the configuration names. One that nobody named, and that fails, is left out."""
    drafters: list[Drafter] = []
    for name in config.drafters_with(target.draft_kind) if target.is_row_invariant else ():
        try:
            drafters.append(
                make_drafter(
                    name, target, num_blocks=runner.num_blocks, draft_cost=draft_cost, runner=runner, config=config
                )
            )
        except Exception as error:
            if name not in TRAINED_DRAFTERS or name in config.drafters or config.draft != AUTO_DRAFT:
                raise
            emit(Fallback("the trained draft", f"going on without it: {error}"))
    return drafters


def _doubts(target: Target, config: EngineConfig) -> list[str]:
    """What makes a policy one for another engine than this."""
    policy = config.policy
    if policy is None:
        return []
    doubt = policy.doubt(target.name, target.system_fingerprint)
    unserved = policy.unserved(config.drafters_with(target.draft_kind))
    lacking = f"Nothing is drafted for {', '.join(unserved)}: the drafters that it names are not here."
    return [*([doubt] if doubt else []), *([lacking] if unserved else [])]


def measure_cost(runner: Runner) -> CostModel:
    """Measure what rows and context cost on this machine."""
    runner.time_step(1, 0)  # the first pass pays for compiling and for touching memory
    longest = min(
        _PROFILE_CONTEXT, runner.num_blocks * runner.page_tokens // 2, runner.decoder.config.max_positions // 2
    )
    # the first pass of a size is a slow one where passes are captured: it takes a third to measure twice
    room = min(runner.num_blocks * runner.page_tokens, runner.decoder.config.max_positions)
    counts = [count for count in (WIDE_ROWS if runner.draws else PROFILED_ROWS) if count <= room]
    repeats = 3 if runner.draws else 2
    cost = profile(runner.time_step, long_context=max(1, longest), repeats=repeats, counts=counts)
    return stepped(cost) if runner.draws else cost


def pass_timer(decoder: Decoder, *, page_tokens: int, num_tokens: int) -> Callable[[int, int], float]:
    """A function that runs one pass over (rows, context), together at most `num_tokens`, and returns its seconds."""
    return Runner(decoder, num_blocks=-(-num_tokens // page_tokens), page_tokens=page_tokens).time_step


def _kv_tokens(target: Target, config: EngineConfig) -> int:
    if config.kv_tokens is not None:
        return config.kv_tokens
    most = target.decoder.config.max_positions
    limit = min(config.max_context or most, most)
    least = limit + target.page_tokens
    token_bytes, room = target.kv_bytes_per_token, room_for_cache(target.device)
    if target.device == "cuda":  # all of it is taken at start, the draft's share too
        draft = _used_draft(target, config)
        token_bytes += draft.kv_bytes_per_token if draft else 0
        if least * token_bytes > room:
            raise CapacityError(
                f"One text of {limit:,} tokens wants {_size(least * token_bytes)} of keys and values ({token_bytes:,} "
                f"bytes a token), and {_size(room)} of the GPU's memory are free for them.",
                f"Lower max_context, or say how many tokens by kv_tokens{', or leave the draft out' if draft else ''}.",
            )
    return max(least, min(room // token_bytes, limit * config.max_sequences))


def _used_draft(target: Target, config: EngineConfig) -> DraftModel | TrainedDraft | None:
    is_used = target.draft_kind in config.drafters_with(target.draft_kind)
    return target.draft if is_used and target.is_row_invariant else None


def _memory_told(target: Target, config: EngineConfig, num_tokens: int) -> str:
    """What an engine takes of a GPU, in words."""
    told = f"{_size(target.num_bytes)} of weights, {_size(num_tokens * target.kv_bytes_per_token)} of keys and values"
    draft = _used_draft(target, config)
    if draft is not None:
        draft_kv = _size(num_tokens * draft.kv_bytes_per_token)
        told += f"; of the draft, {_size(draft.num_bytes)} of weights, {draft_kv} of keys and values"
    return f"{told}; room for {num_tokens:,} tokens"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"

"""Puts an engine together: a target, a draft beside it if there is one, the drafters, and what their passes cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.config import EngineConfig
from understudy.control.cost import PROFILED_ROWS, WIDE_ROWS, CostModel, profile
from understudy.control.rules import memory_notice
from understudy.core.events import EventSink, Fallback, Notice, log_fallbacks
from understudy.core.shapes import shape_named
from understudy.core.weights import WEIGHTS_ON, Device, DeviceChoice, WeightType
from understudy.drafters.base import Drafter
from understudy.engine.engine import Engine
from understudy.errors import CapacityError, ConfigError
from understudy.kernels.devices import (
    choose_device,
    choose_weights,
    device_facts,
    make_kernels,
    packing,
    room_for_cache,
)
from understudy.kernels.interface import Kernels
from understudy.kernels.rows import MOST_PLACES
from understudy.models.decoder import Decoder
from understudy.models.draft_check import check_draft, num_parameters
from understudy.models.load import load_model
from understudy.models.twin import load_draft, twin_noise
from understudy.models.weights import LoadedModel
from understudy.models.widen import widen_model
from understudy.runtime.fingerprint import system_fingerprint
from understudy.runtime.runner import Runner
from understudy.runtime.selftest import is_row_invariant
from understudy.text.tokenizer import Tokenizer
from understudy.text.vocabulary import VocabularyMap, compare_vocabularies

_PROFILE_CONTEXT = 1024
_OWN_LAYERS = "layers:"
"""`layers:N` is a draft that needs no second model: the target's own first N layers."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model: what several engines can share."""

    decoder: Decoder
    vocabulary: VocabularyMap
    name: str
    num_bytes: int
    """Memory of its weights; nothing where they are the target's own."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take in its own cache."""
        return self.decoder.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model: what several engines can share."""

    decoder: Decoder
    tokenizer: Tokenizer
    page_tokens: int
    name: str
    source_hash: str
    place: str | Path | None
    """Where the model was loaded from; None for the embedded one."""
    is_row_invariant: bool
    """What the start-up self-test found; without it every row is computed by itself."""
    draft: DraftModel | None = None
    device: Device = "cpu"

    @property
    def weights(self) -> WeightType:
        """How the linear layers' weights are held."""
        return self.decoder.weights

    @property
    def num_bytes(self) -> int:
        """Memory of all weights as they are packed: layers, embedding and output layer."""
        return self.decoder.num_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take."""
        return self.decoder.kv_bytes_per_token

    @property
    def device_facts(self) -> dict[str, str]:
        """What names the GPU that computes it, and what it computes with; nothing for the CPU."""
        return device_facts(self.device)

    @property
    def system_fingerprint(self) -> str:
        """Names everything besides the request that the words are a function of."""
        return system_fingerprint(
            self.source_hash, weights=self.weights, is_row_invariant=self.is_row_invariant, device=self.device
        )


def load_target(
    model: str | Path | None = None,
    *,
    device: DeviceChoice = "auto",
    weights: WeightType | None = None,
    draft: str | Path | None = None,
    cross_tokenizer: bool = False,
    widen: str | None = None,
    num_threads: int | None = None,
    emit: EventSink = log_fallbacks,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """Load a model (a folder, a GGUF file, `hub:owner/name`, None for the embedded one), and a draft for it.

    `widen` names a larger shape (core/shapes.py): the model says the same there, at that shape's price.
    """
    twin_noise(draft)  # a wrong one is refused before minutes of loading
    chosen = choose_device(device)
    weights = choose_weights(weights, chosen)
    loaded = _load_widened(model, widen, device=chosen, weights=weights, progress=progress)
    kernels = make_kernels(chosen, weights, num_threads=num_threads)
    decoder = _pack(loaded, kernels, weights=weights)
    invariant = is_row_invariant(decoder, kernels.page_tokens)
    if not invariant:
        emit(Fallback("the self-test", "rows depend on their neighbours on this machine: one by one, and no drafts"))
    target = Target(
        decoder,
        loaded.tokenizer,
        kernels.page_tokens,
        loaded.name,
        loaded.source_hash,
        model,
        invariant,
        device=chosen,
    )
    if draft is None:
        return target
    return with_draft(target, draft, cross_tokenizer=cross_tokenizer, emit=emit, progress=progress)


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


def _pack(loaded: LoadedModel, kernels: Kernels, *, weights: WeightType, int8_output: bool = False) -> Decoder:
    """Pack a model's weights where they are computed with."""
    with packing(loaded.name, wanted_bytes=num_parameters(loaded.config) * kernels.number_bytes):
        return Decoder(loaded.config, loaded.tensors, kernels, weights=weights, int8_output=int8_output)


def weights_on(device: DeviceChoice, wanted: WeightType | None = None) -> tuple[WeightType, ...]:
    """What a device computes with, the default first; those that are wanted must be among them."""
    chosen = choose_device(device)
    choose_weights(wanted, chosen)
    return WEIGHTS_ON[chosen]


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
        draft=config.draft,
        cross_tokenizer=config.cross_tokenizer,
        widen=widen,
        num_threads=config.num_threads,
        emit=emit,
        progress=progress,
    )


def with_draft(
    target: Target,
    draft: str | Path,
    *,
    cross_tokenizer: bool = False,
    emit: EventSink = log_fallbacks,
    progress: Callable[[int, int], None] | None = None,
) -> Target:
    """The target with a draft model beside it: a model of its own, or one that is made from the target's.

    `layers:N` is the target's first N layers; `twin:S` is the target before it was widened, with noise on its matrices
    of S times their spread.
    """
    if str(draft).startswith(_OWN_LAYERS):
        return replace(target, draft=_own_layers(target, str(draft)))
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
    decoder = _pack(loaded, target.decoder.kernels, weights=weights, int8_output=on_cpu)
    longest = target.kv_bytes_per_token * config.max_positions
    notices.append(memory_notice(draft_bytes=decoder.num_bytes, kv_bytes_per_sequence=longest))
    for notice in filter(None, notices):
        emit(Notice("the draft model", notice))
    return replace(target, draft=DraftModel(decoder, vocabulary, loaded.name, decoder.num_bytes))


def _own_layers(target: Target, draft: str) -> DraftModel:
    count = draft.removeprefix(_OWN_LAYERS)
    most = target.decoder.config.num_layers - 1
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise ConfigError(f"The draft {draft!r} names no layers of its target.", f"Give {_OWN_LAYERS}1 to {most}.")
    tokenizer, rows = target.tokenizer, target.decoder.config.vocab_size
    same = compare_vocabularies(tokenizer, tokenizer, target_rows=rows, draft_rows=rows, cross_tokenizer=False)
    return DraftModel(target.decoder.first_layers(int(count)), same, f"{target.name}, its first {count} layers", 0)


def make_drafter(name: str, target: Target, *, num_blocks: int, draft_cost: CostModel | None = None) -> Drafter:
    """Build a drafter by its name; a draft model gets as many blocks as the target has, and its cost is measured."""
    from understudy.drafters.lookahead import LookaheadDrafter
    from understudy.drafters.model import ModelDrafter
    from understudy.drafters.model_ahead import AheadModelDrafter
    from understudy.drafters.ngram import NgramDrafter
    from understudy.drafters.suffix import SuffixDrafter

    if name == "model":
        if target.draft is None:
            raise ConfigError("The drafter 'model' has no model.", "Name one with --draft, or leave this drafter out.")
        runner = Runner(target.draft.decoder, num_blocks=num_blocks, page_tokens=target.page_tokens)
        has_same_ids = target.draft.vocabulary.is_same
        drafter = AheadModelDrafter if runner.draws and has_same_ids else ModelDrafter
        return drafter(runner, target.draft.vocabulary, cost=draft_cost or measure_cost(runner))
    drafters: dict[str, Callable[[], Drafter]] = {
        "suffix": SuffixDrafter,
        "ngram": NgramDrafter,
        "lookahead": LookaheadDrafter,
    }
    return drafters[name]()


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
    emit: EventSink = log_fallbacks,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """Put an engine around a target. Costs that are not given are measured, unless there is nothing to decide."""
    config = config or EngineConfig()
    if target.device == "cuda" and config.max_rows_per_step > MOST_PLACES:
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
    if drafters is None:
        names = config.drafters if target.is_row_invariant else ()
        drafters = [make_drafter(name, target, num_blocks=num_blocks, draft_cost=draft_cost) for name in names]
        drafters = [*built_in_drafters(), *drafters] if drafters else []
    if cost is None:
        cost = measure_cost(runner) if drafters else CostModel({1: 1.0})
    for doubt in _doubts(target, config):
        emit(Notice("the policy", doubt))
    return Engine(runner, target.tokenizer, cost=cost, drafters=drafters, config=config, emit=emit, clock=clock)


def _doubts(target: Target, config: EngineConfig) -> list[str]:
    """What makes a policy one for another engine than this."""
    policy = config.policy
    if policy is None:
        return []
    doubt = policy.doubt(target.name, target.system_fingerprint)
    unserved = policy.unserved(config.drafters)
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
    return profile(runner.time_step, long_context=max(1, longest), repeats=repeats, counts=counts)


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
        draft = _drafting_model(target, config)
        token_bytes += draft.kv_bytes_per_token if draft else 0
        if least * token_bytes > room:
            raise CapacityError(
                f"One text of {limit:,} tokens wants {_size(least * token_bytes)} of keys and values ({token_bytes:,} "
                f"bytes a token), and {_size(room)} of the GPU's memory are free for them.",
                f"Lower max_context, or say how many tokens by kv_tokens{', or leave the draft out' if draft else ''}.",
            )
    return max(least, min(room // token_bytes, limit * config.max_sequences))


def _drafting_model(target: Target, config: EngineConfig) -> DraftModel | None:
    return target.draft if "model" in config.drafters and target.is_row_invariant else None


def _memory_told(target: Target, config: EngineConfig, num_tokens: int) -> str:
    """What an engine takes of a GPU, in words."""
    told = f"{_size(target.num_bytes)} of weights, {_size(num_tokens * target.kv_bytes_per_token)} of keys and values"
    draft = _drafting_model(target, config)
    if draft is not None:
        draft_kv = _size(num_tokens * draft.kv_bytes_per_token)
        told += f"; of the draft, {_size(draft.num_bytes)} of weights, {draft_kv} of keys and values"
    return f"{told}; room for {num_tokens:,} tokens"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"

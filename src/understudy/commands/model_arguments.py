"""The options that choose models and load them, alike in every command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from understudy.config import (
    AUTO_DRAFT,
    DEFAULT,
    DEFAULT_DRAFTERS,
    DRAFTERS,
    MODEL,
    NO_DRAFT,
    TRAINED_DRAFTERS,
    EngineConfig,
    names_a_draft,
)
from understudy.core.events import EventSink
from understudy.core.weights import DEVICE_CHOICES, WEIGHT_TYPES, WEIGHTS_ON
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from understudy.assembly import Target

_PLACES = "a folder, a GGUF file or hub:owner/name"
_MODEL = f"{_PLACES} (default: the embedded model)"


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    positional: bool,
    weights: str = f"{WEIGHTS_ON['cpu'][0]}, {WEIGHTS_ON['cuda'][0]} on a GPU",
) -> argparse._ArgumentGroup:
    """Declare the models of a command: MODEL, or --model where a prompt stands there. `weights` are the default's."""
    group = parser.add_argument_group("models")
    add = group.add_argument
    if positional:
        add("model", nargs="?", metavar="MODEL", help=_MODEL)
    else:
        add("--model", metavar="M", help=_MODEL)
    made = "layers:N for the first N layers of MODEL, or twin:S for MODEL itself with noise S on it (twin:0.1)"
    shipped = f"{', '.join(TRAINED_DRAFTERS)} for one that comes with this package"
    add(
        "--draft",
        metavar="D",
        help=f"what drafts: a trained draft ({shipped}, or its folder); a smaller model ({_PLACES}, {made}); or none "
        "(default: the trained draft that comes with this package for MODEL, if there is one)",
    )
    add("--cross-tokenizer", action="store_true", help="allow a draft with another vocabulary; it drafts less well")
    add("--weights", choices=WEIGHT_TYPES, help=f"how weights are held in memory (default: {weights})")
    add("--device", choices=DEVICE_CHOICES, help="where it is computed (default: auto, a GPU if there is one)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    return group


def add_drafters(group: argparse._ArgumentGroup, *, may_be_none: bool = True) -> None:
    """Declare who drafts."""
    names = ", ".join(DRAFTERS)
    default = ", ".join(DEFAULT_DRAFTERS)
    none = ", or none" if may_be_none else ""
    group.add_argument(
        "--drafters",
        metavar="LIST",
        help=f"of {names}, with commas between{none} (default: {default}, and model, or a trained draft's kind, where "
        "there is a draft)",
    )
    add_draft_tree(group)


def add_draft_tree(group: argparse._ArgumentGroup) -> None:
    """Declare what trained drafts grow."""
    default = EngineConfig().draft_tree
    group.add_argument(
        "--draft-tree",
        type=int,
        metavar="N",
        help=f"children of a node in the trees of a trained draft; 1: chains (default: {default})",
    )


def read_draft_tree(arguments: argparse.Namespace) -> int:
    """Check what trained drafts grow."""
    wanted: int | None = arguments.draft_tree
    return EngineConfig().draft_tree if wanted is None else EngineConfig(draft_tree=wanted).draft_tree


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Put the options into a configuration, refusing what contradicts itself; nothing is loaded for it."""
    check_models(arguments)
    return EngineConfig(
        drafters=_drafters(arguments),
        draft=arguments.draft or AUTO_DRAFT,
        draft_tree=read_draft_tree(arguments),
        cross_tokenizer=arguments.cross_tokenizer,
        device=arguments.device or "auto",
        weights=arguments.weights,
        num_threads=arguments.threads,
    )


def check_models(arguments: argparse.Namespace) -> None:
    """Refuse options that have no meaning together."""
    if arguments.cross_tokenizer and (not names_a_draft(arguments.draft) or arguments.draft in TRAINED_DRAFTERS):
        raise ConfigError(
            "--cross-tokenizer has a meaning only with --draft and a model.", "Name one, or leave it out."
        )


def check_drafted(drafters: tuple[str, ...], draft: str | None, *, option: str) -> None:
    """Refuse a drafter that has no draft."""
    if MODEL in drafters and not names_a_draft(draft):
        raise ConfigError(f"{option} names 'model', but there is no draft model.", "Name one with --draft.")
    trained = [name for name in drafters if name in TRAINED_DRAFTERS]
    if trained and draft == NO_DRAFT:
        raise ConfigError(f"{option} names {trained[0]!r}, but --draft is none.", "Leave one of the two out.")


def uses_draft(drafters: tuple[str, ...]) -> bool:
    """Whether any of these drafters needs a draft, or takes it where there is one."""
    return any(name in (DEFAULT, MODEL, *TRAINED_DRAFTERS) for name in drafters)


def load(
    model: str | None, config: EngineConfig, *, console: Console, emit: EventSink, widen: str | None = None
) -> Target:
    """Load a target, with its draft if the configuration names one, and show that it takes a while.

    `widen` names a larger shape to put it into.
    """
    from understudy.assembly import load_configured
    from understudy.terminal import loading

    with loading(console, model, widen=widen) as progress:
        return load_configured(model, config, widen=widen, emit=emit, progress=progress)


def _drafters(arguments: argparse.Namespace) -> tuple[str, ...]:
    wanted: str | None = arguments.drafters
    if wanted is None:
        return EngineConfig().drafters
    drafters = () if wanted == "none" else tuple(dict.fromkeys(name.strip() for name in wanted.split(",")))
    check_drafted(drafters, arguments.draft, option="--drafters")
    if drafters and names_a_draft(arguments.draft) and not uses_draft(drafters):
        who = arguments.draft if arguments.draft in TRAINED_DRAFTERS else "'model', or the draft's kind,"
        raise ConfigError(f"--draft names a draft, but --drafters leaves {who} out.", "Name it there too.")
    return drafters

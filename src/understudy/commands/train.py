"""`understudy train`: a draft that learns from the target's own answers."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.commands.lists import read_numbers
from understudy.commands.result import INTERRUPTED, make_console
from understudy.core.weights import DEVICE_CHOICES
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.train.run import Plan

_KINDS = ("medusa", "eagle", "block", "model")
_EXAMPLES = """examples:
  understudy train --kind block --data prompts/ --out drafts/block --minutes 9
  understudy train path/to/model --kind eagle --data prompts.jsonl --self-elicited 2000 --out drafts/eagle
The same command again goes on where the last one stopped.
"""
UNFINISHED = 3


def add_train(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "train",
        help="train a draft on a model's own answers",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=train)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, a GGUF file or hub:owner/name (default: the embedded one)")
    add("--kind", choices=_KINDS, required=True, help="what is trained (docs/TRAINING.md)")
    add("--out", metavar="FOLDER", required=True, help="where the draft and what it is made from are kept")
    add("--minutes", type=float, metavar="M", help="stop after so long, to go on another time (default: when done)")
    add = parser.add_argument_group("the answers").add_argument
    add("--data", nargs="+", metavar="PLACE", default=[], help="files or folders of prompts, in JSON or JSON lines")
    add(
        "--answers", metavar="FOLDER", help="where answers are kept, for several drafts to learn from (default: in OUT)"
    )
    add("--num-prompts", type=int, metavar="N", help="only the first N prompts (default: all)")
    add("--self-elicited", type=int, default=0, metavar="N", help="let the model write N prompts besides (default: 0)")
    add("--about-own", type=int, default=0, metavar="N", help="ask N times about what it answered before (default: 0)")
    add("--group", type=int, default=256, metavar="N", help="answers that are written together (default: 256)")
    add("--max-tokens", type=int, default=384, metavar="N", help="longest answer (default: 384)")
    add("--temperature", default="0,0.7,1", metavar="LIST", help="of the answers and of training (default: 0,0.7,1)")
    add = parser.add_argument_group("the training").add_argument
    add("--steps", type=int, default=2000, metavar="N", help="steps in all (default: 2000)")
    add("--learning-rate", type=float, default=1e-3, metavar="R", help="the highest (default: 0.001)")
    add("--batch-tokens", type=int, default=16384, metavar="N", help="tokens of a step (default: 16384)")
    add("--layers", type=int, metavar="N", help="layers of a block (default: 2), or kept for a model (default: 4)")
    add("--begin-with", metavar="FOLDER", help="train this draft further, with its layers and ids")
    add("--draft-ids", type=int, metavar="N", help="ids that it can guess (default: 8192, and a model all)")
    add("--seed", type=int, default=0, metavar="N", help="of answers, weights and order (default: 0)")
    add(
        "--measure",
        type=int,
        default=8,
        metavar="N",
        help="held-out prompts of each class to measure on; 0: none (default: 8)",
    )
    add("--stored", choices=("int8", "fp16"), help="how weights are written (default: int8, and a model fp16)")
    add(
        "--device", choices=DEVICE_CHOICES, default="auto", help="where it is computed (default: a GPU if there is one)"
    )
    add("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def train(arguments: argparse.Namespace) -> int:
    """Do what is left to do within the time, and say what came of it."""
    _check(arguments)
    from understudy.train.report import progress, show_measured
    from understudy.train.run import run

    plan = _plan(arguments)
    console = make_console(stderr=True)
    deadline_s = float("inf") if arguments.minutes is None else time.monotonic() + 60.0 * arguments.minutes
    again = "The same command again goes on from here."
    try:
        with progress(console) as watcher:
            outcome = run(plan, deadline_s=deadline_s, watcher=watcher)
    except KeyboardInterrupt:
        console.print(f"Interrupted. {again}", soft_wrap=True)
        return INTERRUPTED
    if not outcome.is_done:
        console.print(f"The time is up, and the part `{outcome.part}` is not done. {again}", soft_wrap=True)
        return UNFINISHED
    show_measured(outcome.measured, console)
    console.print(f"The draft is in {plan.out}.", soft_wrap=True)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse, before anything is loaded, what could only fail later."""
    if not arguments.data and arguments.self_elicited < 1:
        raise ConfigError("There is nothing to train on.", "Name prompts with --data, or ask for --self-elicited ones.")
    if arguments.minutes is not None and not 0.0 < arguments.minutes <= 1e5:
        raise ConfigError(f"--minutes is {arguments.minutes:g}.", "Give a number above 0.")
    for name in ("self_elicited", "about_own", "measure"):
        if getattr(arguments, name) < 0:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {getattr(arguments, name)}.", "Give a whole number from 0 on.")
    for name in ("num_prompts", "max_tokens", "group", "steps", "batch_tokens", "draft_ids", "layers", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least 1.")
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"--seed is {arguments.seed}.", "Give a whole number from 0 to 4,294,967,295.")
    for place in (arguments.out, arguments.answers):
        if place is not None and Path(place).exists() and not Path(place).is_dir():
            raise ConfigError(f"{place} is a file.", "Give a folder, or a name for a new one.")


def _plan(arguments: argparse.Namespace) -> Plan:
    from understudy.train.collect import CollectSettings
    from understudy.train.run import Plan
    from understudy.train.settings import TrainSettings

    temperatures = tuple(read_numbers(arguments.temperature, float, "temperature"))
    trained = TrainSettings(
        num_steps=arguments.steps,
        seed=arguments.seed,
        learning_rate=arguments.learning_rate,
        tokens_per_batch=arguments.batch_tokens,
        temperatures=temperatures,
    )
    collected = CollectSettings(
        temperatures=temperatures,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        num_self_elicited=arguments.self_elicited,
        num_about_own=arguments.about_own,
        group=arguments.group,
    )
    return Plan(
        kind=arguments.kind,
        out=Path(arguments.out),
        answers=None if arguments.answers is None else Path(arguments.answers),
        model=arguments.model,
        data=tuple(arguments.data),
        max_prompts=arguments.num_prompts,
        num_draft_ids=arguments.draft_ids,
        num_layers=arguments.layers,
        begin_with=None if arguments.begin_with is None else Path(arguments.begin_with),
        measured_by_class=arguments.measure,
        stored=arguments.stored,
        device=arguments.device,
        num_threads=arguments.threads,
        collect=collected,
        train=trained,
    )

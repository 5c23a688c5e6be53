"""`understudy verify`: prove that speculation changes no word."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy.commands.model_arguments import add_model_arguments, check_models
from understudy.commands.result import DIFFERENT, INTERRUPTED, check_writable, make_console, write_json
from understudy.commands.teller import Teller
from understudy.config import AUTO_DRAFT, MODEL, NO_DRAFT, TRAINED_DRAFTERS, EngineConfig
from understudy.core.events import EventSink
from understudy.core.weights import WeightType
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.assembly import Target
    from understudy.parity.settings import Setting

DEFAULT_BUDGET_S = 600.0
OWN_SHARE = 0.9
"""Of a model's layers, those that draft for it where no draft is named.

Of the embedded model's 30 layers the first 20 foresee 3 in 100 words, 24 foresee 4 and 27 foresee 8.
"""

_EXAMPLES = """examples:
  understudy verify
  understudy verify --budget 300 --json proof.json
  understudy verify path/to/model --draft path/to/smaller --weights int8
  understudy verify path/to/model --prompts prompts.jsonl --full
"""


def add_verify(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "verify",
        help="prove that speculation changes no word; exit code 1 on any difference",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=verify)
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="JSON lines with prompt, messages or turns (default: our own)")
    add("--json", metavar="OUT", help="write the whole report to this file; - for the standard output")
    add("--budget", type=float, metavar="S", help=f"seconds to spend (default: {DEFAULT_BUDGET_S:g}; with --full none)")
    add("--full", action="store_true", help="every combination of settings, not only every pair")
    add("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    add("--num-prompts", type=int, default=8, metavar="N", help="prompts, of each class in turn (default and least: 8)")
    add_model_arguments(parser, positional=True, weights="one after the other")


def verify(arguments: argparse.Namespace) -> int:
    """Prove it, print the proof, and write it where it is wanted."""
    budget_s = _budget(arguments)
    for name in ("num_prompts", "max_tokens", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least 1.")
    check_models(arguments)
    check_writable(arguments.json)

    from understudy.bench.prompts import load_prompts, own_prompts
    from understudy.parity.cases import make_cases
    from understudy.parity.report import progress_bar, show, to_json
    from understudy.parity.verify import verify as prove
    from understudy.terminal import loading

    prompts = load_prompts(arguments.prompts) if arguments.prompts is not None else own_prompts()
    known = _known_weights(arguments)
    console = make_console(stderr=True)
    teller = Teller(console)
    config = EngineConfig(
        draft=arguments.draft or AUTO_DRAFT,
        cross_tokenizer=arguments.cross_tokenizer,
        device=arguments.device or "auto",
        num_threads=arguments.threads,
    )
    targets = _OneTarget(arguments.model, config, teller)
    with loading(console, arguments.model) as progress:
        target = targets.under(arguments.weights or known[0], progress)
    settings = _settings(arguments, known, targets.trained_kinds(target))
    case_set = make_cases(prompts, target, count=arguments.num_prompts, max_tokens=arguments.max_tokens)
    del target  # only one is in memory at a time
    with progress_bar(console) as watcher:
        report = prove(targets, case_set, settings, budget_s=budget_s, watcher=watcher)
    try:  # whatever becomes of the file or of the table, the other is not lost
        write_json(to_json(report, case_set, notices=teller.notes), arguments.json)
    finally:
        show(report, case_set, make_console(stderr=arguments.json == "-"))
    if report.interrupted:
        return INTERRUPTED
    return 0 if report.proven else DIFFERENT


def own_layers(num_layers: int) -> int:
    """How many of a model's own layers draft for it where no draft is named: some guesses right, and some wrong."""
    return max(1, min(num_layers - 1, round(num_layers * OWN_SHARE)))


def _known_weights(arguments: argparse.Namespace) -> tuple[WeightType, ...]:
    from understudy.assembly import weights_on

    return weights_on(arguments.device or "auto", arguments.weights)


def _settings(arguments: argparse.Namespace, known: tuple[WeightType, ...], trained: list[str]) -> list[Setting]:
    from understudy.parity.settings import by_weights, every_setting, pairwise

    allowed = [setting for setting in every_setting(known, trained) if arguments.weights in (None, setting.weights)]
    return by_weights(allowed if arguments.full else pairwise(allowed))


def _budget(arguments: argparse.Namespace) -> float | None:
    budget_s: float | None = arguments.budget
    if budget_s is None:
        return None if arguments.full else DEFAULT_BUDGET_S
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise ConfigError(f"--budget is {budget_s}.", "Give a number of seconds above 0.")
    return budget_s


class _OneTarget:
    """The target under the weights of a setting, with the draft of a setting; the one before is let go of first."""

    def __init__(self, model: str | None, config: EngineConfig, emit: EventSink) -> None:
        self._model = model
        self._is_named = config.draft != AUTO_DRAFT
        self._config = config if self._is_named else replace(config, draft=NO_DRAFT)
        self._emit = emit
        self._target: Target | None = None

    def __call__(self, setting: Setting, progress: Callable[[int, int], None]) -> Target:
        """Where no model drafts by name, the target's own first layers do: drafting by a model is proven too."""
        from understudy.assembly import with_draft, with_draft_for

        target = self.under(setting.weights, progress)
        num_layers = target.decoder.config.num_layers
        if MODEL in setting.drafters and target.draft_kind != MODEL and num_layers > 1:
            return with_draft(target, f"layers:{own_layers(num_layers)}", emit=self._emit)
        return with_draft_for(target, setting.drafters, emit=self._emit)

    def under(self, weights: WeightType, progress: Callable[[int, int], None]) -> Target:
        """The target under these weights, with the draft that was named, if one was."""
        from understudy.assembly import load_configured

        if self._target is None or self._target.weights != weights:
            self._target = None
            gc.collect()  # engines hold on to themselves, and to their target
            config = replace(self._config, weights=weights)
            self._target = load_configured(self._model, config, emit=self._emit, progress=progress)
        return self._target

    def trained_kinds(self, target: Target) -> list[str]:
        """The kinds of trained drafts to prove: the one that was named, or all that come with the package."""
        from understudy.assembly import shipped_kinds

        if self._is_named:
            return [kind for kind in TRAINED_DRAFTERS if kind == target.draft_kind]
        return shipped_kinds(target, emit=self._emit)

"""`understudy replay`: what other settings would have done with recorded traffic."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.commands.model_arguments import add_model_arguments, check_drafted, check_models, load
from understudy.commands.result import check_writable, make_console, write_json
from understudy.commands.teller import Teller
from understudy.config import AUTO_DRAFT, DRAFTERS, MODEL, EngineConfig, default_drafters, names_a_draft
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from understudy.advise.settings import Machine
    from understudy.advise.what_if import Found
    from understudy.commands.recorded import Records, Summary
    from understudy.core.events import EventSink

DEFAULT_BUDGET_S = 600.0
DEFAULT_DEPTHS = "1,2,4,8"
DEFAULT = "default"
"""The engine's own rule with the drafters that it would have."""
_MOST_DEPTH = 64
_MOST_AT_ONCE = 4096

_EXAMPLES = """examples:
  understudy serve --record records       (requests and answers are kept as token ids)
  understudy replay records
  understudy replay records --drafter suffix --depth 2,4,8 --concurrency 1,8
  understudy replay records path/to/model --draft path/to/smaller --json what-if.json
  understudy replay records --steps-ms 1=9.1,4=10.2,8=12      (no model is loaded)
"""


def add_replay(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "replay",
        help="what other drafters and depths would have done with recorded traffic",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=replay)
    add = parser.add_argument
    add("directory", metavar="DIR", help="what `understudy serve --record DIR` has written")
    can = ", ".join(("suffix", "ngram", MODEL))
    add(
        "--drafter",
        action="append",
        metavar="NAME",
        help=f"{can}, or {DEFAULT} for what the engine would decide by itself; may be repeated (default: all)",
    )
    add("--depth", default=DEFAULT_DEPTHS, metavar="LIST", help=f"with commas between (default: {DEFAULT_DEPTHS})")
    add("--concurrency", default="1", metavar="LIST", help="texts of a kind that share a pass (default: 1)")
    add("--classes", metavar="LIST", help="only these classes, with commas between")
    add("--steps-ms", metavar="TABLE", help="what a pass costs, as rows=milliseconds: needs no model")
    add("--budget", type=float, default=DEFAULT_BUDGET_S, metavar="S", help="seconds to spend (default: 600)")
    add("--json", metavar="OUT", help="write what was found to this file; - for the standard output")
    add_model_arguments(parser, positional=True)


def replay(arguments: argparse.Namespace) -> int:
    """Replay, print the tables, and write them where they are wanted."""
    depths = _numbers(arguments.depth, "--depth", least=0, most=_MOST_DEPTH)
    concurrencies = _numbers(arguments.concurrency, "--concurrency", least=1, most=_MOST_AT_ONCE)
    names = _drafters(arguments)
    check_models(arguments)
    check_writable(arguments.json)
    if not (math.isfinite(arguments.budget) and arguments.budget > 0):
        raise ConfigError(f"--budget is {arguments.budget}.", "Give a number of seconds above 0.")

    from understudy.advise.settings import engine_setting, fixed_settings
    from understudy.advise.what_if import what_if
    from understudy.commands.recorded import read_folder, summaries_of
    from understudy.commands.replay_report import progress_bar, show

    records = read_folder(Path(arguments.directory), classes=_listed(arguments.classes))
    console = make_console(stderr=True)
    teller = Teller(console)
    machine, left_out = _machine(arguments, records, emit=teller, console=console)
    kind = None if machine.target is None else machine.target.draft_kind
    if arguments.drafter is None and kind == MODEL:
        names.append(MODEL)
    settings = fixed_settings([name for name in names if name != DEFAULT], depths, machine)
    if DEFAULT in names:
        settings = [engine_setting(default_drafters(kind), machine), *settings]
    with progress_bar(console, len(settings)) as told:
        found = what_if(
            records.transcripts,
            settings,
            machine=machine,
            concurrencies=concurrencies,
            budget_s=arguments.budget,
            told=told,
        )
    summaries = summaries_of(records)
    notes = [*left_out, *_notes(records, found)]
    try:  # whatever becomes of the file or of the tables, the other is not lost
        value = _to_json(found, summaries, concurrencies, machine)
        write_json({**value, "notes": [*teller.notes, *notes]}, arguments.json)
    finally:
        show(found, summaries, concurrencies, notes, make_console(stderr=arguments.json == "-"))
    return 0


def _drafters(arguments: argparse.Namespace) -> list[str]:
    from understudy.advise.replay import refusal

    free = [name for name in DRAFTERS if name != MODEL and not refusal(name)]
    names: list[str] = list(dict.fromkeys(arguments.drafter or [DEFAULT, *free]))
    for name in names:
        if name not in (DEFAULT, *DRAFTERS):
            known = ", ".join((DEFAULT, *free, MODEL))
            raise ConfigError(f"There is no drafter named {name!r}.", f"Choose from {known}.")
        if refusal(name):
            raise ConfigError(f"{name} cannot be replayed: {refusal(name)}.", "Leave it out.")
    check_drafted(tuple(names), arguments.draft, option="--drafter")
    return names


def _machine(
    arguments: argparse.Namespace, records: Records, *, emit: EventSink, console: Console
) -> tuple[Machine, list[str]]:
    """What passes cost: as given, or as measured with the model on this machine; and what is left out of the replay."""
    from understudy.advise.settings import Machine, measured, steps_cost, without_trained
    from understudy.terminal import Waiting

    cost = None if arguments.steps_ms is None else steps_cost(arguments.steps_ms)
    if cost is not None and not names_a_draft(arguments.draft):
        return Machine(cost), []
    config = EngineConfig(
        draft=arguments.draft or AUTO_DRAFT,
        cross_tokenizer=arguments.cross_tokenizer,
        device=arguments.device or "auto",
        weights=arguments.weights,
        num_threads=arguments.threads,
    )
    target, left_out = without_trained(load(arguments.model, config, console=console, emit=emit))
    most = target.decoder.config.vocab_size - 1
    if records.largest_token > most:
        raise ConfigError(
            f"The records hold token {records.largest_token}, and {target.name} knows none beyond {most}.",
            "Name the model that served them.",
        )
    with Waiting(console, "measuring what a row costs"):
        return measured(target, cost=cost), left_out


def _notes(records: Records, found: Found) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = []
    if records.num_torn:
        notes.append(f"{records.num_torn} lines are no records and were passed over: a server died while it wrote.")
    notes += [f"{count} answers were left out: {reason}." for reason, count in records.left_out.items()]
    notes += [
        f"{count} answers were left out where the engine decides: {reason}." for reason, count in found.left_out.items()
    ]
    notes += [f"The budget left no time for {name}." for name in found.cut]
    return notes


def _to_json(
    found: Found, summaries: Sequence[Summary], concurrencies: Sequence[int], machine: Machine
) -> dict[str, Any]:
    from understudy.advise.what_if import EXACT_AND_MODELLED

    return {
        "what": EXACT_AND_MODELLED,
        "classes": [
            summary.to_json() | {"best": [_best(found, summary, concurrency) for concurrency in concurrencies]}
            for summary in summaries
        ],
        "rows": [row.describe() for row in found.rows if row.workload_class in {s.workload_class for s in summaries}],
        "pass_ms": {rows: round(1000 * seconds, 4) for rows, seconds in sorted(machine.cost.rows_s.items())},
    }


def _best(found: Found, summary: Summary, concurrency: int) -> dict[str, Any]:
    best = found.best(summary.workload_class, concurrency)
    chosen = {"drafter": None, "depth": 0} if best is None else {"drafter": best.drafter, "depth": best.depth}
    return {"concurrency": concurrency, "speculate": best is not None, **chosen}


def _listed(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(text: str, option: str, *, least: int, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in _listed(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise ConfigError(f"{option} is {text!r}.", f"Give whole numbers from {least} to {most}, with commas between.")
    return numbers

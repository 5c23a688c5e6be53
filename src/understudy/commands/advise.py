"""`understudy advise`: does speculation pay, for which traffic, with which drafter and depth, and if not, why not."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.commands.advise_arguments import Settings, add_arguments, is_arithmetic, read_question, read_settings
from understudy.commands.model_arguments import load
from understudy.commands.result import INTERRUPTED, check_writable, make_console, write_json
from understudy.commands.teller import Teller
from understudy.config import TRAINED_DRAFTERS, default_drafters

if TYPE_CHECKING:
    from understudy.advise.study import Study
    from understudy.assembly import Target
    from understudy.bench.workloads import Questions

_FEW_ANSWERS = 5


def add_advise(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "advise",
        help="find out whether speculation pays, for which traffic, and with which drafter and depth",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=advise)
    add_arguments(parser)


def advise(arguments: argparse.Namespace) -> int:
    """Answer from numbers alone, or from what a model says and how long it takes."""
    return _from_numbers(arguments) if is_arithmetic(arguments) else _from_model(read_settings(arguments))


def _from_numbers(arguments: argparse.Namespace) -> int:
    from understudy.advise.estimate import estimate
    from understudy.advise.report import show_estimate

    check_writable(arguments.json)
    found = estimate(read_question(arguments))
    write_json(found.describe(), arguments.json)
    show_estimate(found, make_console(stderr=arguments.json == "-"))
    return 0


def _from_model(settings: Settings) -> int:
    from understudy.advise.report import progress, show_advice
    from understudy.advise.study import study
    from understudy.bench.prompts import load_prompts, own_prompts
    from understudy.bench.workloads import choose, wanted_classes

    prompts = load_prompts(settings.prompts) if settings.prompts is not None else own_prompts()
    wanted_classes(prompts, settings.classes)  # a model may take long to load
    console = make_console(stderr=True)
    teller = Teller(console)
    target = load(settings.model, settings.models, console=console, emit=teller)
    from understudy.bench.engines import encoder

    questions = choose(
        prompts,
        encoder(target),
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        classes=settings.classes,
        per_class=settings.num_prompts,
    )
    with progress(console) as watcher:
        found = study(
            target,
            questions.by_class,
            temperatures=settings.temperatures,
            concurrencies=settings.concurrencies,
            budget_s=settings.budget_s,
            watcher=watcher,
        )
    if found.interrupted and not found.advice:
        return INTERRUPTED
    notes = _notes(settings, questions, found)
    _write(settings, target, found, [*teller.notes, *notes])
    show_advice(found.advice, notes, make_console(stderr=settings.json == "-"))
    return INTERRUPTED if found.interrupted else 0


def _write(settings: Settings, target: Target, found: Study, notes: list[str]) -> None:
    from understudy.advise.recommend import make_policy
    from understudy.bench.manifest import commit, hardware, versions
    from understudy.control.policy_file import write_policy

    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = {
        "date": date,
        "model": {"name": target.name, "hash": target.source_hash},
        "draft": None if target.draft is None else {"name": target.draft.name, "bytes": target.draft.num_bytes},
        "weights": target.weights,
        "system_fingerprint": target.system_fingerprint,
        "settings": settings.describe(),
        "hardware": hardware() | target.device_facts,
        "versions": versions(),
        **commit(),
        **found.describe(),
        "notes": notes,
    }
    write_json(record, settings.json)
    if settings.policy is not None:
        policy = make_policy(
            found.advice,
            model=target.name,
            system_fingerprint=target.system_fingerprint,
            date=date,
            drafters=default_drafters(target.draft_kind),
            unscored=[kind for kind in TRAINED_DRAFTERS if kind == target.draft_kind],
        )
        write_policy(Path(settings.policy), policy)


def _notes(settings: Settings, questions: Questions, found: Study) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = list(found.notes)
    if questions.num_left_out:
        notes.append(f"{questions.num_left_out} prompts do not fit in the model's context and were left out.")
    if found.num_answers < found.num_wanted and not found.interrupted:
        notes.append(
            f"{found.num_answers} of {found.num_wanted} prompts were answered within {settings.budget_s:g} s; "
            "a larger --budget answers more."
        )
    fewest = min((case.num_texts for case in found.advice), default=0)
    if 0 < fewest < _FEW_ANSWERS:
        notes.append(f"A class has only {fewest} answers: its interval says little. Give more prompts of each class.")
    if found.interrupted:
        notes.append("The run was interrupted; the advice rests on what there was until then.")
    return notes

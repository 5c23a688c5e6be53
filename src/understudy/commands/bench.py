"""`understudy bench`: how fast, by class of prompt, with and without speculation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.commands.api_key import key_from
from understudy.commands.bench_arguments import Settings, add_arguments, read_settings
from understudy.commands.model_arguments import load
from understudy.commands.result import DIFFERENT, INTERRUPTED, make_console, write_json
from understudy.commands.teller import Teller
from understudy.core.weights import NUMERICS

if TYPE_CHECKING:
    from understudy.bench.alternate import Measured, Serve
    from understudy.bench.arrivals import TraceLine
    from understudy.bench.prompts import Prompt
    from understudy.bench.record import ArmFacts
    from understudy.bench.remote import RemoteArm
    from understudy.bench.run import EngineArm
    from understudy.bench.workloads import Encode, Plan, Questions

_MOST_ERRORS_KEPT = 20
NOT_THE_SAME = DIFFERENT
"""The exit code where a word differs, and where a request failed."""


def add_bench(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "bench",
        help="measure speed with and without speculation; exit code 1 if a word differs or a request fails",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=bench)
    add_arguments(parser)


@dataclass(frozen=True, slots=True)
class _Run:
    """All that is needed to measure, and what the manifest says of it."""

    arms: Sequence[EngineArm] | Sequence[RemoteArm]
    serve: Serve[Any]
    plan: Plan
    questions: Questions
    subject: dict[str, Any]
    """What is measured: a model or a server."""
    notices: list[str] = field(default_factory=list)
    """What was told while the models were loaded."""
    device: dict[str, str] = field(default_factory=dict)
    """What names a GPU, where one computes."""

    @property
    def facts(self) -> list[ArmFacts]:
        return [arm.facts for arm in self.arms]


def bench(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and write the record where it is wanted."""
    settings = read_settings(arguments)
    from understudy.bench.alternate import alternate
    from understudy.bench.prompts import load_prompts, own_prompts
    from understudy.bench.record import groups, row_of
    from understudy.bench.report import progress_bar, show

    write_page = _page_writer() if settings.html is not None else None
    prompts = load_prompts(settings.prompts) if settings.prompts is not None else own_prompts()
    started = datetime.now(UTC)
    trace = _trace(settings, prompts)
    run = (_on_engine if settings.url is None else _on_server)(settings, prompts, trace)
    with progress_bar(make_console(stderr=True), run.facts) as watcher:
        measured = alternate(run.arms, run.plan, serve=run.serve, budget_s=settings.budget_s, watcher=watcher)
    if measured.interrupted and not measured.turns:
        return INTERRUPTED
    rows = [row_of(group) for group in groups(measured, run.facts)]
    manifest = _manifest(settings, run, measured, started)
    untold = [note for note in manifest["notes"] if note not in run.notices]
    record = {"manifest": manifest, "rows": [row.describe() for row in rows]}
    try:  # whatever becomes of the table or of the files, the others are not lost
        write_json(record, settings.json)
        if write_page is not None and rows:
            write_page(record, Path(settings.html or ""))
    finally:
        console = make_console(stderr=settings.json == "-")
        show(rows, measured, untold, console, cycle_times=manifest["cycle_time"])
    if measured.interrupted:
        return INTERRUPTED
    fine = rows and not measured.errors and all(row.identical for row in rows)
    return 0 if fine else NOT_THE_SAME


def _page_writer() -> Callable[[dict[str, Any], Path], None]:
    from understudy.bench.page import write_page

    return write_page


def _on_engine(settings: Settings, prompts: Sequence[Prompt], trace: Sequence[TraceLine]) -> _Run:
    """Load the model once, and build an engine around it for each arm."""
    from understudy.bench.alternate import in_turn
    from understudy.bench.engines import build_arms, encoder
    from understudy.bench.record import PLAIN
    from understudy.bench.run import in_step
    from understudy.terminal import Waiting
    from understudy.upkeep import calm_process

    console = make_console(stderr=True)
    teller = Teller(console)
    target = load(settings.model, settings.models, console=console, emit=teller, widen=settings.widen)
    questions, plan = _plan(settings, prompts, trace, encoder(target))
    with Waiting(console, "measuring what a row costs"):
        arms = build_arms(target, [PLAIN, *settings.drafters], plan, draft_tree=settings.draft_tree)
    calm_process()  # as where it is served: one look at all of the model takes as long as thirty steps
    subject = {
        "model": {"name": target.name, "hash": target.source_hash},
        "draft": None if target.draft is None else {"name": target.draft.name, "place": settings.draft},
        "weights": target.weights,
        "numerics": NUMERICS,
        "system_fingerprint": target.system_fingerprint,
    }
    serve: Serve[Any] = in_turn if target.device_facts else in_step  # a GPU is at an arm's next pass after its step
    return _Run(arms, serve, plan, questions, subject, teller.notes, target.device_facts)


def _on_server(settings: Settings, prompts: Sequence[Prompt], trace: Sequence[TraceLine]) -> _Run:
    """Find the server, and what it is compared with."""
    from understudy.bench.alternate import in_turn
    from understudy.bench.record import DEFAULT, PLAIN, ArmFacts
    from understudy.bench.remote import RemoteArm
    from understudy.client import Endpoint, find_model

    assert settings.url is not None
    key = key_from(settings.api_key_env)
    endpoints = {DEFAULT: Endpoint(settings.url, key)}
    if settings.plain_by_field:
        endpoints = {PLAIN: Endpoint(settings.url, key, {"speculation": {"enabled": False}}), **endpoints}
    elif settings.baseline_url is not None:
        endpoints = {PLAIN: Endpoint(settings.baseline_url, key), **endpoints}
    arms = [
        RemoteArm(ArmFacts(name), endpoint, find_model(endpoint, settings.model))
        for name, endpoint in endpoints.items()
    ]
    questions, plan = _plan(settings, prompts, trace, lambda prompt: ())
    subject = {
        "model": {"name": arms[-1].model, "hash": None},
        "draft": None,
        "weights": "unknown",
        "numerics": "unknown",
        "system_fingerprint": None,
        "urls": {name: endpoint.url for name, endpoint in endpoints.items()},
    }
    return _Run(arms, in_turn, plan, questions, subject)


def _trace(settings: Settings, prompts: Sequence[Prompt]) -> list[TraceLine]:
    """Read the trace if there is one, and check what is asked for: a model may take long to load."""
    from understudy.bench.arrivals import read_trace
    from understudy.bench.workloads import wanted_classes

    wanted_classes(prompts, settings.classes)
    if settings.trace is None:
        return []
    return read_trace(settings.trace, unit=settings.trace_unit, count=settings.num_requests)


def _plan(
    settings: Settings, prompts: Sequence[Prompt], trace: Sequence[TraceLine], encode: Encode
) -> tuple[Questions, Plan]:
    """Choose the questions, and when they arrive."""
    from understudy.bench.arrivals import Poisson, Recorded
    from understudy.bench.workloads import Plan, choose, follow_trace

    questions = choose(
        prompts,
        encode,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        classes=settings.classes,
        per_class=settings.num_prompts,
    )
    times: Poisson | Recorded | None = None
    if settings.rate is not None:
        times = Poisson(settings.rate, settings.num_requests, settings.seed)
    elif trace:
        questions = follow_trace(trace, questions, encode)
        times = Recorded([line.time_s for line in trace])
    plan = Plan(
        questions=questions.by_class,
        temperatures=settings.temperatures,
        concurrencies=settings.concurrencies,
        arrival_times=times,
    )
    return questions, plan


def _manifest(settings: Settings, run: _Run, measured: Measured, started: datetime) -> dict[str, Any]:
    from understudy.bench.manifest import DEFINITIONS, commit, hardware, prompts_hash, versions
    from understudy.bench.record import cycle_time_of, groups, samples_of

    found = list(groups(measured, run.facts))
    cycle_times = [cycle_time_of(group) for group in found]
    questions = run.plan.all_questions
    return {
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(measured.seconds, 3),
        "rounds": measured.num_rounds,
        "requests": measured.num_requests,
        "interrupted": measured.interrupted,
        **run.subject,
        "drafters": {arm.name: arm.drafters for arm in run.facts[1:]} if settings.url is None else None,
        "prompts": {
            "source": settings.prompts or "own",
            "sha256": prompts_hash(question.prompt for question in questions),
            "by_class": {name: len(row) for name, row in run.plan.questions.items()},
            "left_out": run.questions.num_left_out,
        },
        "seeds": {"words_and_arrivals": settings.seed},
        "settings": settings.describe(),
        "hardware": hardware() | run.device,
        "versions": versions(),
        **commit(),
        "definitions": DEFINITIONS,
        "errors": {"count": len(measured.errors), "messages": measured.errors[:_MOST_ERRORS_KEPT]},
        "notes": _notes(settings, run, measured),
        "cycle_time": [value for value in cycle_times if value is not None],
        "samples": [samples_of(group) for group in found],
    }


def _notes(settings: Settings, run: _Run, measured: Measured) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = [*run.notices, *(note for arm in run.arms for note in _arm_notes(arm))]
    if run.questions.num_left_out:
        notes.append(f"{run.questions.num_left_out} prompts do not fit in the model's context and were left out.")
    if measured.num_rounds <= 1:
        notes.append("There was a single round: the interval of a class's speed-up is the point itself.")
    if measured.num_rounds == 1 and measured.seconds > settings.budget_s:
        notes.append(
            f"The round took {measured.seconds:.0f} s, more than the budget of {settings.budget_s:g} s; "
            "fewer classes or shorter answers make it shorter."
        )
    if measured.interrupted:
        notes.append("The run was interrupted; what was measured until then is here.")
    if measured.errors:
        notes.append("Turns in which a request failed are left out under every arm.")
    if settings.url is not None and len(run.arms) == 1:
        notes.append("There is no baseline: no speed-up, and `identical` compares repetitions.")
    if settings.plain_by_field:
        notes.append(
            "Both arms ask the same server: what it keeps of one arm's prompts and answers may help the other, "
            "and who asks first changes from turn to turn."
        )
    elif settings.url is not None:
        notes.append("A server may keep prompts and answers: later rounds can be faster than the first.")
    return notes


def _arm_notes(arm: EngineArm | RemoteArm) -> list[str]:
    from understudy.bench.remote import RemoteArm

    if isinstance(arm, RemoteArm):
        return sorted(arm.notes)
    return [f"{arm.name}: {text}" for text in dict.fromkeys(arm.listener.notes)]

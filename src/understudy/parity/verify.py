"""The proof: every case under every setting, against an engine that has no speculation at all.

The baseline is an engine without any drafter that serves one request at a time, with no prefix cache and with all
the room it wants. Under a setting a fresh engine on the same weights serves the same cases, with drafts forced past
the rule that would buy only those that pay. All that a user sees must be equal. int8 weights are another model than
fp32 ones, with words of its own: each kind has its own baseline.

A proof can also be empty. A setting under which nothing was drafted, accepted or rejected, no prefix found, nothing
preempted, no row scouted or never four sequences were computed together has shown nothing: it is called vacuous, and
fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from understudy.assembly import Target, build_engine
from understudy.config import EngineConfig
from understudy.control.cost import CostModel
from understudy.core.request import Request, Speculation
from understudy.core.weights import WeightType
from understudy.engine.engine import Engine
from understudy.parity.cases import Case, CaseSet
from understudy.parity.compare import Difference, differences
from understudy.parity.run import Answer, Happenings, serve
from understudy.parity.settings import Setting

_DEPTH, _MODEL_DEPTH = 8, 4
"""Deep enough for trees and chains; a draft model pays a pass for each of its tokens, right or wrong."""
_ROWS = 16
Targets = Callable[[Setting, Callable[[int, int], None]], Target]
"""Gives the target under a setting's weights, with the draft that its drafters need; told (tensors done, tensors in
all) while it is loaded."""
_FREE = CostModel({1: 1.0})
"""Drafts are forced, so nothing is decided by what a row costs, and nothing needs to be measured."""
_LEAST_MERGED = 2
"""Drafters whose words must have been accepted where several share a tree."""
_TOGETHER = 4
"""Sequences that start together where blocks are made scarce."""
_SPARE_BLOCKS = 2
"""Blocks beyond what they need to start with; each of the four will ask for about two more."""


@dataclass(slots=True)
class SettingReport:
    """What came out under one setting."""

    setting: Setting
    compared: int = 0
    identical: int = 0
    happenings: Happenings = field(default_factory=Happenings)
    vacuous: list[str] = field(default_factory=list)
    """Why this setting has shown nothing; empty if it has."""
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What came out of a proof."""

    model: str = ""
    model_hash: str = ""
    drafts: dict[str, str] = field(default_factory=dict)
    """Names of the drafts that were used, by the drafter."""
    system_fingerprints: dict[WeightType, str] = field(default_factory=dict)
    """By the weights that were run."""
    settings: list[SettingReport] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    cut: list[Setting] = field(default_factory=list)
    """Settings that the budget left no time for, or that were interrupted."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        """Answers that were compared."""
        return sum(report.compared for report in self.settings)

    @property
    def identical(self) -> int:
        """Answers that were the same in every field."""
        return sum(report.identical for report in self.settings)

    @property
    def vacuous(self) -> list[SettingReport]:
        """Settings under which what they are there to test did not happen."""
        return [report for report in self.settings if report.vacuous]

    @property
    def proven(self) -> bool:
        """Whether every answer was the same and every setting meant something."""
        return bool(self.compared) and not self.differences and not self.vacuous


class Watcher(Protocol):
    """Who wants to see a proof while it runs."""

    def at(self, what: str, done: int, total: int) -> None:
        """See that `done` of `total` answers are there, and what is being run."""

    def finished(self, report: SettingReport) -> None:
        """See that a setting is done."""


class Unwatched:
    """Sees nothing."""

    def at(self, what: str, done: int, total: int) -> None:
        """Ignore it."""

    def finished(self, report: SettingReport) -> None:
        """Ignore it."""


def verify(
    targets: Targets,
    case_set: CaseSet,
    settings: Sequence[Setting],
    *,
    budget_s: float | None = None,
    watcher: Watcher | None = None,
) -> Report:
    """Compare under each setting in order, until the budget would be exceeded; the first one always runs."""
    started = time.monotonic()
    proof = _Proof(targets, case_set, settings, watcher or Unwatched())
    for place, setting in enumerate(settings):
        used_s = time.monotonic() - started
        if budget_s is not None and place and used_s * (1 + proof.share_of(setting)) > budget_s:
            proof.report.cut = list(settings[place:])
            break
        try:
            proof.run(setting)
        except KeyboardInterrupt:
            proof.report.cut = list(settings[place:])
            proof.report.interrupted = True
            break
    proof.report.seconds = time.monotonic() - started
    return proof.report


class _Proof:
    """A proof that is under way."""

    def __init__(self, targets: Targets, case_set: CaseSet, settings: Sequence[Setting], watcher: Watcher) -> None:
        self.report = Report()
        self._targets = targets
        self._cases = case_set.cases
        self._page_tokens = case_set.page_tokens
        self._watcher = watcher
        self._baselines: dict[tuple[WeightType, float], dict[int, Answer]] = {}  # by weights and temperature, by case
        self._done = 0
        num_baselines = len({(setting.weights, setting.temperature) for setting in settings}) * len(self._cases)
        self._total = num_baselines + sum(len(self._requests(setting)) for setting in settings)

    def share_of(self, setting: Setting) -> float:
        """How much a setting has to do, by what was done so far."""
        num_baseline = 0 if (setting.weights, setting.temperature) in self._baselines else len(self._cases)
        return (len(self._requests(setting)) + num_baseline) / max(1, self._done)

    def run(self, setting: Setting) -> None:
        """Serve all cases under a setting and compare them with the baseline."""
        target = self._target(setting)
        baseline = self._baseline(target, setting.temperature)
        started = time.monotonic()
        report = SettingReport(setting)
        requests = self._requests(setting)
        engine = make_engine(target, setting, self._cases, report.happenings)
        answers = self._serve(engine, requests, report.happenings, setting.concurrency, setting.name)
        for request, case in requests:
            found = differences(baseline[case.index], answers[request.request_id], case, setting.name)
            report.compared += 1
            report.identical += not found
            self.report.differences.extend(found)
        report.vacuous = vacuous_reasons(setting, report.happenings)
        if errors := [answer.error for answer in answers.values() if answer.error is not None]:
            report.vacuous.append(f"an answer ended with an error ({errors[0]})")  # plain decoding may have the same
        report.seconds = time.monotonic() - started
        self.report.settings.append(report)
        self._watcher.finished(report)

    def _target(self, setting: Setting) -> Target:
        """The target of a setting, which may have to be loaded first."""
        weights = setting.weights

        def progress(done: int, total: int) -> None:
            self._watcher.at(f"loading {weights} weights, {done} of {total}", self._done, self._total)

        self._watcher.at(f"loading {weights} weights", self._done, self._total)
        target = self._targets(setting, progress)
        report = self.report
        report.model, report.model_hash = target.name, target.source_hash
        if target.draft is not None and target.draft.kind in setting.drafters:
            report.drafts[target.draft.kind] = target.draft.name
        report.system_fingerprints.setdefault(weights, target.system_fingerprint)
        return target

    def _baseline(self, target: Target, temperature: float) -> dict[int, Answer]:
        """Answer every case plainly, once for each temperature and kind of weights."""
        key = (target.weights, temperature)
        if key not in self._baselines:
            happenings = Happenings()
            engine = make_engine(target, None, self._cases, happenings)
            requests = [(_request(case, temperature, Speculation(enabled=False)), case) for case in self._cases]
            name = f"plain, temperature {temperature:g}, {target.weights}"
            answers = self._serve(engine, requests, happenings, 1, name)
            assert not happenings.counts.drafted, "an engine without drafters has drafted"
            self._baselines[key] = {case.index: answers[request.request_id] for request, case in requests}
        return self._baselines[key]

    def _requests(self, setting: Setting) -> list[tuple[Request, Case]]:
        """The requests of a setting, in order of arrival, each with its case."""
        cases = self._cases
        if setting.preemption:
            cases = tuple(scarce(cases, self._page_tokens)[0])
        return [
            (_request(case, setting.temperature, forced(setting), repetition), case)
            for case, repetition in _arrivals(cases, setting)
        ]

    def _serve(
        self,
        engine: Engine,
        requests: Sequence[tuple[Request, Case]],
        happenings: Happenings,
        concurrency: int,
        name: str,
    ) -> dict[str, Answer]:
        def on_answer() -> None:
            self._done += 1
            self._watcher.at(name, self._done, self._total)

        self._watcher.at(name, self._done, self._total)
        order = [request for request, _ in requests]
        return serve(engine, order, happenings, concurrency=concurrency, on_answer=on_answer)


def make_engine(target: Target, setting: Setting | None, cases: Sequence[Case], happenings: Happenings) -> Engine:
    """Build the engine of a setting, or of the baseline."""
    page = target.page_tokens
    num_blocks = 2 * _TOGETHER * max(_blocks(case.num_tokens, page) for case in cases)
    if setting is not None and setting.preemption:
        _, num_blocks = scarce(cases, page)
    config = EngineConfig(
        drafters=setting.drafters if setting else (),
        draft_tree=setting.draft_tree if setting else 1,
        prefix_cache=setting.prefix_cache if setting else False,
        kv_tokens=num_blocks * page,
    )
    return build_engine(target, config, cost=_FREE, draft_cost=_FREE, emit=happenings.listen)


def forced(setting: Setting) -> Speculation:
    """Drafts that are never left out because they would not pay."""
    depth = _MODEL_DEPTH if "model" in setting.drafters else _DEPTH
    return Speculation(forced=True, max_depth=depth, max_rows=_ROWS)


def scarce(cases: Sequence[Case], page_tokens: int) -> tuple[list[Case], int]:
    """Choose a number of blocks in which four sequences can start but not end together, and the cases that fit it.

    A sequence joins when there is room for its prompt and one more block for each that runs. So the blocks below let
    the four shortest prompts in; it is their answers that run out of room. Where the longest case fits into little
    more than that, it is given room too; else it is left out of these settings.
    """
    shortest = cases[:_TOGETHER]
    to_start = sum(len(case.prompt_ids) // page_tokens + 1 for case in shortest) + len(shortest) - 1
    least = max(to_start, *(_blocks(case.num_tokens, page_tokens) for case in shortest))
    longest = max(_blocks(case.num_tokens, page_tokens) for case in cases)
    num_blocks = longest if least < longest <= least + _SPARE_BLOCKS else least
    return [case for case in cases if _blocks(case.num_tokens, page_tokens) <= num_blocks], num_blocks


def vacuous_reasons(setting: Setting, happenings: Happenings) -> list[str]:
    """Say what the setting is there to test and what did not happen."""
    counts = happenings.counts
    scouts = "lookahead" in setting.drafters
    merges = len(setting.drafters) > 1
    reasons = {
        "no token was drafted": not counts.drafted,
        "no drafted token was accepted": not counts.accepted,
        "no drafted token was rejected": not counts.rejected,
        "only one drafter's tokens were accepted": merges and len(happenings.accepted_by_drafter) < _LEAST_MERGED,
        "no row was scouted": scouts and not happenings.num_scout_rows,
        "no prompt found its beginning in the prefix cache": setting.prefix_cache and not happenings.num_cache_hits,
        "nothing was preempted; longer answers may help": setting.preemption and not happenings.preemptions,
        f"never {setting.concurrency} sequences in one pass": happenings.most_sequences < setting.concurrency,
    }
    silent = [f"{name} proposed nothing" for name in setting.drafters if not counts.proposed.get(name)]
    failures = [f"a drafter failed ({text})" for text in happenings.fallbacks if text.startswith("drafter ")]
    return [reason for reason, holds in reasons.items() if holds] + silent + failures[:1]


def _arrivals(cases: Sequence[Case], setting: Setting) -> Iterator[tuple[Case, int]]:
    """With a prefix cache every case comes twice, the second time after as many others as run at once.

    The oldest of them is likely to end first, and never gives its blocks back. So the second oldest comes back first:
    where blocks are scarce, what it has computed is still there.
    """
    for start in range(0, len(cases), setting.concurrency):
        group = cases[start : start + setting.concurrency]
        yield from ((case, 0) for case in group)
        if setting.prefix_cache:
            yield from ((case, 1) for case in (*group[1:], *group[:1]))


def _request(case: Case, temperature: float, speculation: Speculation, repetition: int = 0) -> Request:
    return Request(
        request_id=f"case-{case.index}-{repetition}",
        prompt_ids=case.prompt_ids,
        sampling=case.sampling(temperature),
        speculation=speculation,
        tenant="verify",
        workload_class=case.prompt_class,
    )


def _blocks(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)

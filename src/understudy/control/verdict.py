"""What is to be done with a trial: a pure function of what it has seen, with its reason in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from understudy.control.experiment import Experiment

Action = Literal["advance", "stay", "roll back", "stop", "done"]

SAMPLE_RATIO_ALPHA = 0.001
"""The chance that a lot which is in order stops a stage."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The treatment against the control, with an interval that is valid however often one looks."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        if not math.isfinite(self.high):
            return f"{self.estimate:.3f} (too few yet for an interval)"
        return f"{self.estimate:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One stage of a trial."""

    stage: int
    num_control: int
    num_treatment: int
    """Units that were observed."""
    sample_ratio_evidence: float
    """See `sequential.sample_ratio_evidence`."""
    time_per_token: Comparison
    """A ratio, and so is the next."""
    first_token: Comparison
    failures: Comparison
    """A difference of shares."""
    num_with_company: int
    """Observations of requests that others were computed beside."""
    num_observations: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, and why."""

    action: Action
    reason: str


def verdict(experiment: Experiment, seen: Snapshot) -> Verdict:
    """Judge a stage."""
    found = _mismatch(experiment, seen) or _harm(experiment, seen) or _progress(experiment, seen)
    return Verdict(found.action, f"{found.reason} {_company(experiment, seen)}".strip())


def _mismatch(experiment: Experiment, seen: Snapshot) -> Verdict | None:
    """Units that are missing from one arm are not missing by chance: nothing can be said of the others."""
    if seen.sample_ratio_evidence <= math.log(1.0 / SAMPLE_RATIO_ALPHA):
        return None
    share, total = experiment.stages[seen.stage], seen.num_control + seen.num_treatment
    return Verdict(
        "stop",
        f"Sample ratio mismatch: {seen.num_treatment} of {total} {experiment.unit}s were treated, "
        f"{seen.num_treatment / total:.1%} where the lot sends {share:.1%}. Something takes some away before they are "
        "counted, so the arms cannot be compared.",
    )


def _harm(experiment: Experiment, seen: Snapshot) -> Verdict | None:
    guardrails = experiment.guardrails
    if seen.time_per_token.low > 1.0:
        return Verdict("roll back", f"Harm: time per token is {seen.time_per_token} of the control's. {_basis(seen)}")
    if seen.first_token.low > 1.0 and seen.first_token.estimate > guardrails.worst_first_token:
        return Verdict(
            "roll back",
            f"Guardrail: time to the first token is {seen.first_token} of the control's, "
            f"{guardrails.worst_first_token:g} is allowed. {_basis(seen)}",
        )
    if seen.failures.low > 0.0 and seen.failures.estimate > guardrails.worst_error_rise:
        return Verdict(
            "roll back",
            f"Guardrail: the share of failures rose by {seen.failures}, "
            f"{guardrails.worst_error_rise:g} is allowed. {_basis(seen)}",
        )
    return None


def _progress(experiment: Experiment, seen: Snapshot) -> Verdict:
    least, share = min(seen.num_control, seen.num_treatment), experiment.stages[seen.stage]
    if least < experiment.min_per_arm:
        return Verdict("stay", f"{least} of the {experiment.min_per_arm} {experiment.unit}s that each arm needs.")
    found = f"time per token is {seen.time_per_token} of the control's"
    if seen.stage < len(experiment.stages) - 2:
        return Verdict("advance", f"No harm was seen at {share:.0%}: {found}. {_basis(seen)}")
    worst = experiment.guardrails.worst_time_per_token
    if seen.time_per_token.high > worst:  # beyond this stage nobody is left to compare with
        return Verdict("stay", f"Not yet shown to be at most {worst:g}: {found}. {_basis(seen)}")
    is_faster = " The treatment is faster." if seen.time_per_token.high < 1.0 else ""
    return Verdict("done", f"Shown to be at most {worst:g}: {found}.{is_faster} {_basis(seen)}")


def _basis(seen: Snapshot) -> str:
    return f"It rests on {seen.num_treatment} with the treatment and {seen.num_control} without."


def _company(experiment: Experiment, seen: Snapshot) -> str:
    """The trap of arms that share their steps, named where it is one."""
    if experiment.unit == "window" or 2 * seen.num_with_company <= seen.num_observations:
        return ""
    return (
        f"{seen.num_with_company} of {seen.num_observations} requests had company, so this is an estimate of the mixed "
        "batch; the unit window compares the engine with and without."
    )

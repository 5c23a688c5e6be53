"""The admin's routes of experiments: what runs, starting one, and moving, pausing or stopping it."""

from __future__ import annotations

import math
import secrets
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from understudy.control.experiment import MOST_STAGES, STAGES, Experiment, Guardrails, Unit
from understudy.control.trial import Trial
from understudy.control.verdict import Comparison
from understudy.core.request import Speculation
from understudy.server.admin import Why
from understudy.server.errors import error_body
from understudy.server.experiments import Act
from understudy.server.identity import admin_name
from understudy.server.service import Service

_DEFAULT = Speculation()
_RAILS = Guardrails()
_STRICT = ConfigDict(extra="forbid", strict=True)

Name = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,32}$")]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Ratio = Annotated[float, Field(gt=1.0, le=10.0)]


class Treatment(BaseModel):
    """What the treated may draft, at most. What is not named is left to the caller."""

    model_config = _STRICT

    enabled: bool = True
    max_depth: Annotated[int, Field(ge=0, le=64)] = _DEFAULT.max_depth
    max_rows: Annotated[int, Field(ge=0, le=256)] = _DEFAULT.max_rows
    drafter: Annotated[str, Field(max_length=64)] | None = None
    """Only this one."""


class Rails(BaseModel):
    """What a treatment must not do. Ratios are of the treatment to the control: below 1 is faster."""

    model_config = _STRICT

    worst_time_per_token: Ratio = _RAILS.worst_time_per_token
    """All are treated only when the ratio is shown to be no worse. Being shown to be slower ends a trial anyway."""
    worst_first_token: Ratio = _RAILS.worst_first_token
    worst_error_rise: Annotated[float, Field(ge=0.0, le=1.0)] = _RAILS.worst_error_rise


class Start(BaseModel):
    """An experiment to begin with."""

    model_config = _STRICT

    name: Name
    treatment: Treatment
    unit: Unit = "request"
    """Above concurrency 1, requests computed together share their steps: `window` is the honest unit there."""
    workload_class: Name | None = None
    """Only requests of this class."""
    stages: Annotated[list[Share], Field(min_length=2, max_length=MOST_STAGES)] = list(STAGES)
    """Shares of the traffic, rising to 1."""
    guardrails: Rails = Rails()
    min_per_arm: Annotated[int, Field(ge=2, le=10**6)] = 30
    """Units of each arm before a stage can be left."""
    salt: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Decides who is treated. One is drawn if none is given."""
    why: Why
    """For the audit log."""


class Change(BaseModel):
    """What to do with a running experiment."""

    model_config = _STRICT

    action: Act
    why: Why
    """For the audit log."""


class ComparisonView(BaseModel):
    """The treatment against the control, with an interval that is valid however often one looks; null: not yet."""

    estimate: float
    low: float | None
    high: float | None


class ExperimentView(BaseModel):
    """How an experiment stands, and why. Numbers are those of the present stage, or of the last one."""

    name: str
    unit: Unit
    treatment: Treatment
    workload_class: str | None
    stages: list[float]
    status: str
    share: float
    """Of the traffic that is treated now."""
    reason: str
    num_control: int
    num_treatment: int
    num_observations: int
    num_with_company: int
    """Observations of requests that others were computed beside."""
    time_per_token: ComparisonView
    """A ratio."""
    first_token: ComparisonView
    """A ratio."""
    failures: ComparisonView
    """A difference of shares."""


class ExperimentsView(BaseModel):
    """All that run, and the last that ended."""

    experiments: list[ExperimentView]


def routes(service: Service) -> APIRouter:
    """The routes of experiments."""
    router = APIRouter(prefix="/admin/v1/experiments", tags=["admin"])
    experiments = service.experiments

    @router.get("")
    async def read_experiments() -> ExperimentsView:
        """All experiments, the oldest first: how each stands, and why."""
        return ExperimentsView(experiments=[_view(trial) for trial in experiments.trials])

    @router.post("", response_model=ExperimentView)
    async def start_experiment(start: Start, request: Request) -> ExperimentView | JSONResponse:
        """Begin with an experiment. It goes from share to share by itself, and back at the first sign of harm."""
        known = None if service.backend.state.phase == "starting" else service.backend.info.drafters
        drafter = start.treatment.drafter
        if drafter is not None and known is not None and drafter not in known:
            message = f"There is no drafter named {drafter!r} here. Choose from {', '.join(known) or 'none'}."
            return JSONResponse(error_body(message, param="treatment", code="invalid_value"), 400)
        experiment = _experiment(start)
        return _view(experiments.start(experiment, who=admin_name(request), why=start.why))

    @router.post("/{name}", response_model=ExperimentView)
    async def change_experiment(
        name: Annotated[str, Path(pattern=r"^[a-z0-9_-]{1,32}$")], change: Change, request: Request
    ) -> ExperimentView | JSONResponse:
        """Move an experiment on to its next share, pause it, resume it, or stop it."""
        trial = experiments.get(name)
        if trial is None:
            return JSONResponse(error_body("There is no such experiment.", param="name", code="not_found"), 404)
        experiments.act(trial, change.action, who=admin_name(request), why=change.why)
        return _view(trial)

    return router


def _experiment(start: Start) -> Experiment:
    return Experiment(
        name=start.name,
        treatment=Speculation(**start.treatment.model_dump()),
        salt=start.salt or secrets.token_hex(8),
        unit=start.unit,
        workload_class=start.workload_class,
        stages=tuple(start.stages),
        guardrails=Guardrails(**start.guardrails.model_dump()),
        min_per_arm=start.min_per_arm,
    )


def _view(trial: Trial) -> ExperimentView:
    experiment, seen = trial.experiment, trial.snapshot()
    treatment = experiment.treatment
    return ExperimentView(
        name=experiment.name,
        unit=experiment.unit,
        treatment=Treatment(
            enabled=treatment.enabled,
            max_depth=treatment.max_depth,
            max_rows=treatment.max_rows,
            drafter=treatment.drafter,
        ),
        workload_class=experiment.workload_class,
        stages=list(experiment.stages),
        status=trial.status,
        share=trial.share,
        reason=trial.reason,
        num_control=seen.num_control,
        num_treatment=seen.num_treatment,
        num_observations=seen.num_observations,
        num_with_company=seen.num_with_company,
        time_per_token=_shown(seen.time_per_token),
        first_token=_shown(seen.first_token),
        failures=_shown(seen.failures),
    )


def _shown(comparison: Comparison) -> ComparisonView:
    is_known = math.isfinite(comparison.high)
    return ComparisonView(
        estimate=comparison.estimate,
        low=comparison.low if is_known else None,
        high=comparison.high if is_known else None,
    )

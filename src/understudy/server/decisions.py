"""What the control plane decided and why, and how things stand now, for an admin."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, Field

from understudy.core.control import BreakerState, ControlView
from understudy.server.journal import Decision
from understudy.server.service import Service
from understudy.server.shadow import Tally


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no infinity: a bound that is not known yet is null."""


class BreakerNow(BaseModel):
    """One drafter for texts of one class at about one temperature."""

    workload_class: str
    temperature: str
    drafter: str
    state: BreakerState
    reason: str
    num_cycles: int
    acceptance: Number


class ClassNow(BaseModel):
    """One class, in the present window of its ledger."""

    workload_class: str
    plain_s: Number
    debt_s: Number
    allowance_s: Number
    num_refused: int
    max_depth: int
    reason: str


class SpeedupNow(BaseModel):
    """The live speed-up, with an interval that is valid however often one looks."""

    estimate: Number
    low: Number
    high: Number
    num_windows: int


class ControlNow(BaseModel):
    """How things stand."""

    classes: list[ClassNow]
    breakers: list[BreakerNow]
    speedup: SpeedupNow | None
    num_steps: int
    num_overruns: int


class ShadowsOfClass(BaseModel):
    """Answers of a class that were computed again, without drafts and with them."""

    count: int
    same: int
    different: int
    num_timed: int = Field(description="Of those, the ones whose times could be compared.")
    speedup: Number = Field(description="Time per token without drafts over that with them, the geometric mean.")


class DecisionMade(BaseModel):
    """One decision."""

    time: datetime
    what: str = Field(examples=["breaker", "shadow", "switch"])
    subject: str
    outcome: str
    reason: str
    who: str


class DecisionsView(BaseModel):
    """How things stand, and how it came to that."""

    now: ControlNow | None = Field(description="Null where the engine does not answer in time.")
    shadows: dict[str, ShadowsOfClass]
    decisions: list[DecisionMade] = Field(description="The newest first.")


def routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(prefix="/admin/v1", tags=["admin"])

    @router.get("/decisions")
    async def read_decisions(
        limit: Annotated[int, Query(ge=1, le=10_000, description="No more decisions than this.")] = 100,
        what: Annotated[str | None, Query(max_length=64, description="Only those of one part.")] = None,
        subject: Annotated[str | None, Query(max_length=200, description="Only those about this.")] = None,
    ) -> DecisionsView:
        """What was decided, by whom and why, and how things stand."""
        view = await service.keeper.look()
        found = service.journal.find(limit=limit, what=what, subject=subject)
        return DecisionsView(
            now=None if view is None else _now(view),
            shadows={name: _shadows(tally) for name, tally in sorted(service.shadows.tallies.items())},
            decisions=[_made(decision) for decision in found],
        )

    return router


def _now(view: ControlView) -> ControlNow:
    return ControlNow.model_validate(asdict(view))


def _shadows(tally: Tally) -> ShadowsOfClass:
    return ShadowsOfClass(
        count=tally.num_same + tally.num_different,
        same=tally.num_same,
        different=tally.num_different,
        num_timed=tally.num_timed,
        speedup=tally.speedup,
    )


def _made(decision: Decision) -> DecisionMade:
    values = asdict(decision)
    return DecisionMade(time=datetime.fromtimestamp(values.pop("time_s"), UTC), **values)

"""What an admin sees and does: the kill switch, the state of everything, and an audit of the engine's blocks."""

from __future__ import annotations

import asyncio
import platform
import re
from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from understudy import __version__
from understudy.core.switches import ALL_ON, Switches
from understudy.errors import ConfigError, EngineLost
from understudy.server.errors import error_body
from understudy.server.identity import admin_name
from understudy.server.service import Service
from understudy.server.switchboard import described

CHECK_TIMEOUT_S = 30.0
_LABEL = re.compile(r"[a-z0-9_-]{1,32}")


def _stripped(why: str) -> str:
    """Spaces count towards the length, as the description says, and are no reason by themselves."""
    if not why.strip():
        raise ValueError("a reason must not be empty")
    return why.strip()


Why = Annotated[str, StringConstraints(min_length=1, max_length=500), AfterValidator(_stripped)]


class Flip(BaseModel):
    """A change of what the admin source says. What is not named stays as it was."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool | None = None
    """False: nobody drafts."""
    classes: dict[str, bool] = Field(default_factory=dict, max_length=256)
    """Workload classes by name: false switches drafting off for them, true no longer does."""
    drafters: dict[str, bool] = Field(default_factory=dict, max_length=256)
    """Drafters by name, likewise."""
    max_depth: Annotated[int, Field(ge=0, le=64)] | None = None
    """No draft reaches further than this; null lifts the limit."""
    why: Why
    """For the audit log."""


class SwitchesView(BaseModel):
    """What is switched off."""

    enabled: bool
    classes_off: list[str]
    drafters_off: list[str]
    max_depth: int | None


class SettingView(BaseModel):
    """What one source says, and who made it say so."""

    switches: SwitchesView
    who: str
    why: str


class SpeculationView(BaseModel):
    """The kill switch: what holds, what each source says, and what was changed, the oldest first."""

    effective: SwitchesView
    sources: dict[str, SettingView]
    history: list[dict[str, object]]


def routes(service: Service) -> APIRouter:
    """The admin's routes."""
    router = APIRouter(prefix="/admin/v1", tags=["admin"])
    switchboard = service.switchboard

    @router.get("/speculation")
    async def read_speculation() -> SpeculationView:
        """What is switched off, by whom, and what holds."""
        return _speculation(service)

    @router.post("/speculation", response_model=SpeculationView)
    async def flip_speculation(flip: Flip, request: Request) -> SpeculationView | JSONResponse:
        """Switch speculation. It holds from the engine's next step on, for running requests too."""
        problem = _unknown_name(service, flip)
        if problem is not None:
            return problem
        setting = switchboard.settings.get("admin")
        try:
            switches = _flipped(ALL_ON if setting is None else setting.switches, flip)
        except ConfigError as error:
            return JSONResponse(error_body(str(error), code="invalid_value"), 400)
        switchboard.set("admin", switches, who=admin_name(request), why=flip.why)
        return _speculation(service)

    @router.delete("/speculation")
    async def clear_speculation(
        request: Request,
        source: Annotated[
            Literal["admin", "parity"],
            Query(description="Whose word is taken back: what was said here, or what a shadow run found."),
        ] = "admin",
    ) -> SpeculationView:
        """Forget what one source said; what the others say still holds."""
        switchboard.clear(source, who=admin_name(request), why="cleared")
        return _speculation(service)

    @router.get("/state")
    async def read_state() -> dict[str, object]:
        """The engine, the queue, the model, versions and the configuration, without its keys."""
        return _state(service)

    @router.post("/check", response_model=dict[str, object])
    async def check() -> dict[str, object] | JSONResponse:
        """Let the engine count its blocks and compare them with those who hold them."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return asdict(await service.backend.check())
        except (TimeoutError, EngineLost):
            body = error_body("The engine does not answer.", kind="server_error", code="engine_restarting")
            return JSONResponse(body, 503, {"retry-after": "5"})

    return router


def _unknown_name(service: Service, flip: Flip) -> JSONResponse | None:
    # the drafters' names come with the engine
    known = None if service.backend.state.phase == "starting" else service.backend.info.drafters
    for name in flip.drafters:
        if known is not None and name not in known and flip.drafters[name] is False:
            message = f"There is no drafter named {name!r} here. Choose from {', '.join(known) or 'none'}."
            return JSONResponse(error_body(message, param="drafters", code="invalid_value"), 400)
    for name in (*flip.classes, *flip.drafters):
        if not _LABEL.fullmatch(name):
            message = "A name has at most 32 of a to z, 0 to 9, - and _."
            return JSONResponse(error_body(message, param="classes", code="invalid_value"), 400)
    return None


def _flipped(before: Switches, flip: Flip) -> Switches:
    named = flip.model_fields_set
    return Switches(
        enabled=before.enabled if flip.enabled is None else flip.enabled,
        classes_off=_set_after(before.classes_off, flip.classes),
        drafters_off=_set_after(before.drafters_off, flip.drafters),
        max_depth=flip.max_depth if "max_depth" in named else before.max_depth,
    )


def _set_after(off: frozenset[str], changes: dict[str, bool]) -> frozenset[str]:
    switched_off = frozenset(name for name, is_on in changes.items() if not is_on)
    return off.difference(changes) | switched_off


def _speculation(service: Service) -> SpeculationView:
    switchboard = service.switchboard
    return SpeculationView(
        effective=_view(switchboard.effective),
        sources={
            source: SettingView(switches=_view(setting.switches), who=setting.who, why=setting.why)
            for source, setting in switchboard.settings.items()
        },
        history=switchboard.audit.entries,
    )


def _view(switches: Switches) -> SwitchesView:
    return SwitchesView.model_validate(described(switches))


def _state(service: Service) -> dict[str, object]:
    backend, admission, recorder = service.backend, service.admission, service.recorder
    state = backend.state
    return {
        "state": state.phase,
        "reason": state.reason,
        "num_restarts": backend.num_restarts,
        "num_tasks": len(asyncio.all_tasks()),
        "model": None if state.phase == "starting" else asdict(backend.info),
        "engine": asdict(backend.load),
        "fallbacks": list(service.fallbacks),
        "queue": {
            "num_running": admission.num_running,
            "num_waiting": admission.num_waiting,
            "mean_hold_s": admission.mean_hold_s,
            "is_draining": admission.is_draining,
        },
        "num_audit_failures": service.switchboard.audit.num_failures,
        "num_state_failures": service.keeper.num_failures,
        "num_records_dropped": 0 if recorder is None else recorder.num_dropped,
        "versions": {"understudy": __version__, "python": platform.python_version()},
        "config": service.config.described(),
    }

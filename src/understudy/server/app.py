"""The routes, put together behind the gate. What they need comes in through `Service`."""

from __future__ import annotations

from starlette.types import ASGIApp

from understudy import __version__
from understudy.core.backend import BackendState
from understudy.server import admin, decisions, experiment_admin, system
from understudy.server.errors import add_error_handlers
from understudy.server.exchange import Caller
from understudy.server.gate import Gate
from understudy.server.metrics import Metrics
from understudy.server.openai import chat, completions, models, tokens
from understudy.server.openapi import ERRORS, Application
from understudy.server.service import Service

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})


class ServiceDoor:
    """A service as the gate sees it."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics

    @property
    def state(self) -> BackendState:
        """Whether there is an engine."""
        return self._service.backend.state

    def check(self, path: str, caller: Caller, body: bytes | None) -> None:
        """Send away whoever could not be taken on. An admin may be more urgent than who waits, if the body says so."""
        may_be_urgent = caller.is_admin and (body is None or b'"priority"' in body)
        if path in GENERATING and not may_be_urgent:
            self._service.admission.check(caller.tenant)

    def refused(self, code: str) -> None:
        """Count it."""
        self._metrics.rejected(code)


def make_app(service: Service) -> ASGIApp:
    """The application of a server. Its backend is started and closed by whoever made it."""
    metrics = _watching(service)
    return Gate(make_routes(service, metrics), service.config, door=ServiceDoor(service, metrics))


def make_routes(service: Service, metrics: Metrics | None = None) -> Application:
    """The same without the gate: who asks is nobody in particular. `metrics` watch the service already, if given."""
    metrics = metrics or _watching(service)
    app = Application(title="Understudy", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    add_error_handlers(app)
    for module in (chat, completions, models, tokens, admin, decisions, experiment_admin):
        app.include_router(module.routes(service), responses=ERRORS)
    app.include_router(system.routes(service, metrics), responses=ERRORS)
    return app


def _watching(service: Service) -> Metrics:
    metrics = Metrics()
    metrics.watch(
        service,
        audit_failures=lambda: service.switchboard.audit.num_failures,
        records_dropped=lambda: 0 if service.recorder is None else service.recorder.num_dropped,
    )
    return metrics

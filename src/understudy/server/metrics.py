"""Everything that a server counts, for Prometheus. docs/SERVER.md says what each number means.

Requests are counted when they end, speculation when a choice ends (so that aborted ones count too), steps as they come.
Labels come from outside only through names of a limited number. Nothing here may fail a request: an error of our own is
logged and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.exposition import choose_encoder

from understudy.control.classes import OTHER, BoundedNames, ClassNames, label_of
from understudy.core.events import Cycle, Ended, Event, Fallback, Preempted
from understudy.core.switches import ALL_ON, Switches
from understudy.server.exchange import Exchange
from understudy.server.meters.control import ControlMeter
from understudy.server.meters.engine import EngineMeter
from understudy.server.meters.requests import RequestMeter
from understudy.server.meters.speculation import SpeculationMeter
from understudy.server.meters.state import StateCollector, model_name
from understudy.server.meters.vllm_names import VllmNames
from understudy.server.service import Service
from understudy.server.shadow import SHADOW_PREFIX

log = logging.getLogger("understudy.server")

MOST_FIELDS = 64
"""Names of ignored fields that are told apart."""
_MOST_CAUSES = 32
_MOST_BROKEN = 4096
_DEEPEST = 64

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second line for every counter, which nothing here reads


class Metrics:
    """An observer of requests and a sink of events, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._speculation = SpeculationMeter(self.registry)
        self._requests = RequestMeter(self.registry)
        self._engine = EngineMeter(self.registry)
        self._control = ControlMeter(self.registry)
        self._classes = ClassNames()
        self._labels: dict[str, str] = {}  # of classes, as they come in
        self._names: dict[Counter | Gauge, BoundedNames] = {}
        self._broken: set[str] = set()  # requests of which a choice ended with an error
        self._service: Service | None = None

        self._preemptions = self._counter("preemptions", "Choices that gave their blocks back")
        self._fallbacks = self._counter("fallbacks", "What did not go the first way", "what")
        self._parity = self._counter("parity_checks", "Answers computed again without drafts", "result")
        self._flips = self._counter("switch_flips", "Changes of the kill switch, by who made them", "source")
        self._ignored = self._counter("ignored_fields", "Fields of requests that were not understood", "field")
        self._rejections = self._counter("http_rejections", "Requests that were turned away", "cause")
        self._errors = self._counter("metrics_errors", "Events that could not be counted")
        self._speculates = Gauge(
            "understudy_speculation_enabled",
            "0 where the kill switch holds: for all, or for a class or drafter by name",
            ("scope", "name"),
            registry=self.registry,
        )
        self._max_depth = Gauge(
            "understudy_speculation_max_depth", "No draft reaches further than this", registry=self.registry
        )
        for result in ("same", "different"):
            self._parity.labels(result)
        self._show(ALL_ON)

    def watch(
        self,
        service: Service,
        *,
        audit_failures: Callable[[], int] = lambda: 0,
        records_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """Count all that a service does, and read its state and what others count whenever somebody asks."""
        assert self._service is None, "one registry holds the numbers of one service"
        self._service = service
        service.observers.append(self)
        service.backend.listen(self.hear, Cycle, Ended, Preempted, Fallback)
        self._engine.tell_cycles = service.backend.tell_cycles
        service.on_ignored_fields = self.ignored
        service.switchboard.on_change = lambda switches, source: self.switched(switches, source=source)
        self.registry.register(StateCollector(service, audit_failures=audit_failures, records_dropped=records_dropped))
        service.journal.listeners.append(self._control.decided)
        service.keeper.on_view = self._control.show
        service.shadows.on_compared = self.parity
        self.registry.register(VllmNames(service, self._speculation, self._requests))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All numbers in the form that an Accept header asks for, and the type of that form."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    # what a service and its engine tell

    def ended(self, exchange: Exchange) -> None:
        """Count a request that ended."""
        try:
            request, workload_class = exchange.request, self._class(exchange.request.workload_class)
            self._requests.ended(workload_class, exchange)
            cause = "choice" if request.request_id in self._broken else exchange.outcome
            self._broken.discard(request.request_id)
            if cause not in ("finished", "cancelled"):
                model = "" if self._service is None else model_name(self._service)
                self._requests.failed(request, model=model, cause=cause)
        except Exception:
            self._failed()

    def hear(self, event: Event) -> None:
        """Count what the engine tells."""
        try:
            match event:
                case Cycle():
                    self._engine.add(event)
                case Ended() if not event.request_id.startswith(SHADOW_PREFIX):  # nobody asked for those
                    workload_class = self._class(event.facts.workload_class)
                    self._requests.choice_ended(workload_class, event)
                    self._speculation.add(workload_class, event.facts)
                    if event.finish_reason == "error" and len(self._broken) < _MOST_BROKEN:
                        self._broken.add(event.request_id)
                case Preempted():
                    self._preemptions.inc()
                case Fallback():
                    self._add(self._fallbacks, event.what)
        except Exception:
            self._failed()

    # what others tell

    def parity(self, ok: bool) -> None:
        """Count an answer that was computed again without drafts: whether its words were the same."""
        self._parity.labels("same" if ok else "different").inc()

    def switched(self, switches: Switches, *, source: str) -> None:
        """Show what the kill switch says now, and count that somebody changed it."""
        self._add(self._flips, source)
        self._show(switches)

    def ignored(self, fields: Iterable[str]) -> None:
        """Count the fields of a request that nobody understood."""
        for field in fields:
            self._add(self._ignored, field)

    def rejected(self, cause: str) -> None:
        """Count a request that was turned away before it reached the engine."""
        self._add(self._rejections, cause)

    # within

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"understudy_{name}", meaning, labels, registry=self.registry)

    def _add(self, counter: Counter, name: str) -> None:
        most = MOST_FIELDS if counter is self._ignored else _MOST_CAUSES
        names = self._names.setdefault(counter, BoundedNames(most))
        counter.labels(names.known(label_of(name) or OTHER)).inc()

    def _class(self, name: str) -> str:
        known = self._labels.get(name)
        if known is None:
            known = self._classes.known(label_of(name) or OTHER)
            if known == name:  # only as many as there are classes
                self._labels[name] = known
        return known

    def _show(self, switches: Switches) -> None:
        self._speculates.clear()
        self._speculates.labels("all", "").set(switches.enabled)
        for name in switches.classes_off:
            self._speculates.labels("class", self._class(name)).set(0)
        names = self._names.setdefault(self._speculates, BoundedNames(_MOST_CAUSES))
        for name in switches.drafters_off:
            self._speculates.labels("drafter", names.known(label_of(name) or OTHER)).set(0)
        self._max_depth.set(_DEEPEST if switches.max_depth is None else switches.max_depth)

    def _failed(self) -> None:
        log.exception("something could not be counted")
        self._errors.inc()

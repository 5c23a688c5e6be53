"""The control plane in numbers: decisions as they are made, and how things stood when the engine was last asked."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from understudy.control.classes import OTHER, BoundedNames, ClassNames, label_of
from understudy.core.control import BREAKER_STATES, ControlView
from understudy.server.journal import Decision

log = logging.getLogger("understudy.server")

_MOST_NAMES = 32


class ControlMeter(Collector):
    """Counts decisions, and shows a view."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Counter(
            "understudy_decisions", "Decisions of the control plane", ("what", "outcome"), registry=registry
        )
        self._whats, self._outcomes = BoundedNames(_MOST_NAMES), BoundedNames(_MOST_NAMES)
        self._classes, self._drafters = ClassNames(), BoundedNames(_MOST_NAMES)
        self._shown: list[Metric] = _families(ControlView(), self._classes, self._drafters)
        registry.register(self)

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        what = self._whats.known(label_of(decision.what) or OTHER)
        self._decisions.labels(what, self._outcomes.known(label_of(decision.outcome) or OTHER)).inc()

    def show(self, view: ControlView) -> None:
        """Show how things stand. Whoever asks sees all of one view: numbers are read in a thread."""
        try:
            self._shown = _families(view, self._classes, self._drafters)
        except Exception:  # a number that cannot be shown must not cost the ones that are kept
            log.exception("the control plane's numbers cannot be shown")

    def collect(self) -> Iterator[Metric]:
        """Yield what was shown last."""
        yield from self._shown


def _families(view: ControlView, classes: ClassNames, drafters: BoundedNames) -> list[Metric]:
    speedup = GaugeMetricFamily(
        "understudy_live_speedup_ratio", "Tokens per second with speculation over those without", labels=("bound",)
    )
    if view.speedup is not None:
        for bound in ("estimate", "low", "high"):
            value = getattr(view.speedup, bound)
            if math.isfinite(value):
                speedup.add_metric((bound,), value)
    overruns = CounterMetricFamily(
        "understudy_ledger_overruns", "Cycles beyond the worst case that was reckoned with", value=view.num_overruns
    )
    return [speedup, _breakers(view, classes, drafters), _debts(view, classes), overruns]


def _breakers(view: ControlView, classes: ClassNames, drafters: BoundedNames) -> Metric:
    """Of those that share a label the one that is furthest off."""
    states: dict[tuple[str, str], int] = {}
    for breaker in view.breakers:
        key = (
            classes.known(label_of(breaker.workload_class) or OTHER),
            drafters.known(label_of(breaker.drafter) or OTHER),
        )
        states[key] = max(states.get(key, 0), BREAKER_STATES.index(breaker.state))
    family = GaugeMetricFamily(
        "understudy_breaker_state", "0 on, 1 probing, 2 off", labels=("workload_class", "drafter")
    )
    for key, state in states.items():
        family.add_metric(key, state)
    return family


def _debts(view: ControlView, classes: ClassNames) -> Metric:
    """Of those that share a label the sum."""
    debts: dict[str, float] = {}
    for one in view.classes:
        if math.isfinite(one.debt_s):
            name = classes.known(label_of(one.workload_class) or OTHER)
            debts[name] = debts.get(name, 0.0) + one.debt_s
    family = GaugeMetricFamily(
        "understudy_ledger_debt_seconds",
        "By how much speculation made a class later in this window; below zero: earlier",
        labels=("workload_class",),
    )
    for name, debt_s in debts.items():
        family.add_metric((name,), debt_s)
    return family

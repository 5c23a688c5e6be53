"""The experiments of a server: who is treated, what came of it, and everything that is decided about them.

Requests are given their arm where they are made, and observed where they end. For the unit `window` the engine's cycles
are the clock: the treatment is what the switchboard's source `experiment` says. Words do not depend on speculation, so
neither does the number of tokens: leaving out answers that are too short to time is no choice between the arms.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from understudy.control.experiment import Experiment, strictest
from understudy.control.trial import Observation, Trial
from understudy.control.windows import Window
from understudy.core.backend import Backend
from understudy.core.events import Cycle, Decided, Event
from understudy.core.request import Speculation
from understudy.errors import InvalidRequest
from understudy.server.exchange import Caller, Exchange
from understudy.server.switchboard import Switchboard

log = logging.getLogger("understudy.server")

Act = Literal["advance", "pause", "resume", "stop"]

MOST_EXPERIMENTS = 16
_MOST_ASSIGNED = 65536
"""Requests on their way; one that never comes to run is forgotten after as many others."""
_FEWEST_TOKENS = 8
"""An answer with fewer, after the first of each choice, is not timed."""
_COUNTED = {"finished": 0.0, "lost": 1.0, "error": 1.0}
"""Outcomes that say something of an arm, and whether they are failures. Others never ran, or were given up."""


@dataclass(frozen=True, slots=True)
class _Assigned:
    """The arm of a request that has not ended."""

    trial: Trial
    unit: str
    stage: int
    in_treatment: bool


class Experiments:
    """An observer of requests and of the engine's cycles, and the one who changes what requests may draft."""

    def __init__(
        self,
        backend: Backend,
        switchboard: Switchboard,
        *,
        decide: Callable[[Decided], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._switchboard = switchboard
        self._decide = decide
        self._now_s = now_s
        self._trials: dict[str, Trial] = {}
        self._assigned: OrderedDict[str, _Assigned] = OrderedDict()
        self._window: Window | None = None
        self._num_windows = 0
        self._hears_cycles = False

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All that are known, the oldest first."""
        return tuple(self._trials.values())

    def get(self, name: str) -> Trial | None:
        """The trial of that name."""
        return self._trials.get(name)

    def _keep(self, trial: Trial) -> None:
        """Take a trial on. The engine's cycles, hundreds a second, are only listened to where windows are counted."""
        self._trials[trial.experiment.name] = trial
        if trial.experiment.unit == "window" and not self._hears_cycles:
            self._backend.listen(self.hear, Cycle, at_once=True)
            self._hears_cycles = True

    # what an admin does

    def start(self, experiment: Experiment, *, who: str, why: str) -> Trial:
        """Begin with an experiment; one of the same name must have ended, and is forgotten."""
        self._check_room(experiment)
        trial = Trial(experiment)
        self._trials.pop(experiment.name, None)
        self._keep(trial)
        if len(self._trials) > MOST_EXPERIMENTS:
            ended = [name for name, other in self._trials.items() if not other.holds]
            del self._trials[ended[0]]
        self._tell(trial, "none", who=who, why=why)
        return trial

    def act(self, trial: Trial, action: Act, *, who: str, why: str) -> None:
        """Do to a trial what an admin wants."""
        before = _described(trial)
        if action not in _ACTS[trial.status]:
            allowed = ", ".join(_ACTS[trial.status]) or "nothing: start another"
            raise InvalidRequest(
                f"The experiment is {trial.status}.", f"What can be done: {allowed}.", parameter="action"
            )
        match action:
            case "advance":
                trial.advance(f"By hand: {why}")
            case "pause":
                trial.set_status("paused", f"By hand: {why}")
            case "resume":
                trial.set_status("running", f"By hand: {why}")
            case "stop":
                trial.set_status("stopped", f"By hand: {why}")
        self._tell(trial, before, who=who, why=why)

    def _check_room(self, experiment: Experiment) -> None:
        same = self._trials.get(experiment.name)
        if same is not None and same.holds:
            raise InvalidRequest("An experiment of this name is there.", "Stop it first.", parameter="name")
        holding = [trial.experiment for trial in self._trials.values() if trial.holds]
        if len(holding) >= MOST_EXPERIMENTS:
            raise InvalidRequest(f"There are {MOST_EXPERIMENTS} experiments already.", "Stop one first.")
        for other in holding:
            if (other.unit == "window") != (experiment.unit == "window"):
                continue
            if None in (other.workload_class, experiment.workload_class) or (
                other.workload_class == experiment.workload_class
            ):
                raise InvalidRequest(
                    f"The experiment {other.name} has the same requests.",
                    "Stop it first, or give both a workload_class of their own.",
                    parameter="workload_class",
                )

    # requests

    def overlay(self, wanted: Speculation, *, request_id: str, caller: Caller, workload_class: str) -> Speculation:
        """What a request may draft: what its caller wants, and under a treatment no more than that allows."""
        for trial in self._trials.values():
            experiment = trial.experiment
            if experiment.unit == "window" or not trial.share or not experiment.takes(wanted, workload_class):
                continue
            unit = request_id if experiment.unit == "request" else caller.tenant
            in_treatment = trial.treats(unit)
            if trial.status == "running":
                self._assigned[request_id] = _Assigned(trial, unit, trial.stage, in_treatment)
            if len(self._assigned) > _MOST_ASSIGNED:
                self._assigned.popitem(last=False)
            return strictest(wanted, experiment.treatment) if in_treatment else wanted
        return wanted

    def ended(self, exchange: Exchange) -> None:
        """See what a request came to. An error of our own fails no request."""
        try:
            self._ended(exchange)
        except Exception:
            log.exception("a request could not be counted for its experiment")

    def _ended(self, exchange: Exchange) -> None:
        assigned = self._assigned.pop(exchange.request.request_id, None)
        failures = _COUNTED.get(exchange.outcome)
        if failures is None:
            return
        if self._window is not None:
            self._window.ended(failures > 0.0)
        if assigned is None or self._is_off():
            return
        seen = Observation(
            unit=assigned.unit,
            in_treatment=assigned.in_treatment,
            stage=assigned.stage,
            log_time_per_token=None if failures else _log_time_per_token(exchange),
            log_first_token=_log_first_token(exchange),
            failures=failures,
            workload_class=exchange.request.workload_class,
            has_company=self._backend.load.num_running > 0,  # it has left itself
        )
        self._observe(assigned.trial, seen)

    # windows

    def hear(self, event: Event) -> None:
        """Let the engine's cycles drive the windows."""
        if not isinstance(event, Cycle):
            return
        trial = next((t for t in self._trials.values() if t.experiment.unit == "window" and t.share), None)
        if trial is None:
            return
        if trial.status == "done":
            self._try_out(trial, True)
            return
        if self._is_off():
            self._window = None
            return
        now_s = self._now_s()
        if self._window is None or self._window.is_over(now_s):
            if self._window is not None:
                self._close(trial, self._window)
            if trial.status != "running":  # what the window came to ended the trial
                return
            self._num_windows += 1
            self._window = Window.open(trial.experiment, self._num_windows, now_s)
            self._try_out(trial, trial.treats(self._window.unit))
        self._window.add(event, now_s)

    def _close(self, trial: Trial, window: Window) -> None:
        self._window = None
        if window.log_time_per_token is None:
            return
        seen = Observation(
            unit=window.unit,
            in_treatment=trial.treats(window.unit),
            stage=trial.stage,
            log_time_per_token=window.log_time_per_token,
            failures=window.num_failed / window.num_ended if window.num_ended else None,
        )
        self._observe(trial, seen)

    def _try_out(self, trial: Trial, in_treatment: bool) -> None:
        switches = trial.experiment.switches(self._backend.info.drafters) if in_treatment else None
        self._switchboard.try_out(switches, who=f"experiment {trial.experiment.name}")

    def _is_off(self) -> bool:
        """Whether the kill switch holds: then the arms are alike, and nothing is compared."""
        settings = self._switchboard.settings.items()
        return any(not setting.switches.enabled for source, setting in settings if source != "experiment")

    # what is decided

    def _observe(self, trial: Trial, seen: Observation) -> None:
        trial.observe(seen)
        if trial.status != "running":
            return
        before = _described(trial)
        found = trial.judge()
        if found.action != "stay":
            self._tell(trial, before, who=f"experiment {trial.experiment.name}", why=found.reason)

    def _tell(self, trial: Trial, before: str, *, who: str, why: str) -> None:
        """Write a change down, and let it hold."""
        after = _described(trial)
        entry = {"who": who, "source": "experiment", "experiment": trial.experiment.name, "why": why}
        self._switchboard.audit.write({**entry, "before": before, "after": after})
        self._decide(Decided("experiment", trial.experiment.name, after, why))
        if trial.experiment.unit == "window":
            self._window = None  # the lot of the next one is drawn under what holds now
            if trial.status != "done":
                self._try_out(trial, False)

    # a restart

    def export(self) -> dict[str, Any]:
        """Everything, as plain data that JSON can hold."""
        return {"num_windows": self._num_windows, "trials": [trial.state() for trial in self._trials.values()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `export` was made. What cannot be understood is forgotten, and that is told."""
        self._num_windows = int(state.get("num_windows", 0))
        for kept in state.get("trials", ()):
            try:
                trial = Trial.from_state(kept)
            except (InvalidRequest, TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
                reason = f"What was kept of an experiment cannot be understood: {error!r:.200}"
                self._decide(Decided("experiment", "a kept one", "forgotten", reason))
            else:
                self._keep(trial)


_ACTS: dict[str, tuple[Act, ...]] = {
    "running": ("advance", "pause", "stop"),
    "paused": ("resume", "stop"),
    "done": ("stop",),
    "rolled back": (),
    "stopped": (),
}
"""What can be done with a trial, by its status."""


def _described(trial: Trial) -> str:
    return f"{trial.status} at {trial.share:.0%}"


def _log_time_per_token(exchange: Exchange) -> float | None:
    num_choices = exchange.request.sampling.n
    num_tokens = exchange.num_tokens - num_choices  # the first of each came with its prompt
    if exchange.first_s is None or exchange.last_s is None or num_tokens < _FEWEST_TOKENS:
        return None
    waited_s = (exchange.last_s - exchange.first_s) * num_choices
    return math.log(waited_s / num_tokens) if waited_s > 0.0 else None


def _log_first_token(exchange: Exchange) -> float | None:
    if exchange.first_s is None or exchange.admitted_s is None or exchange.first_s <= exchange.admitted_s:
        return None
    return math.log(exchange.first_s - exchange.admitted_s)

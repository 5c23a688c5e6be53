"""A running experiment: who is treated now, what was seen in this stage, and what that comes to.

Every stage is a comparison of its own. The share changes what the arms do to each other, so what was true at 1 % need
not be at 50 %; and an interval for each stage needs no assumption that joins them. The allowed error is divided.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from understudy.control.experiment import Experiment
from understudy.control.sequential import TwoArms, ratio, sample_ratio_evidence
from understudy.control.verdict import Comparison, Snapshot, Verdict, verdict

Status = Literal["running", "paused", "rolled back", "stopped", "done"]

OBSERVATIONS_OF_A_KEY = 8
"""Requests of a key whose means are its one observation; later ones of the same stage no longer count."""
_MOST_KEYS = 4096
"""Keys that are told apart in one stage; more are treated alike, and not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one request, or one window, came to."""

    unit: str
    in_treatment: bool
    stage: int
    """The stage in which its lot was drawn."""
    log_time_per_token: float | None = None
    """None: too short to say."""
    log_first_token: float | None = None
    failures: float | None = 0.0
    """1 or 0 for a request; for a window, the share of its requests, if any ended."""
    workload_class: str = ""
    has_company: bool = False


@dataclass(slots=True)
class _Key:
    """What the requests of one key came to so far. Sums."""

    count: int = 0
    failures: float = 0.0
    log_time_per_token: float = 0.0
    num_timed: int = 0
    log_first_token: float = 0.0
    num_first: int = 0


@dataclass(slots=True)
class Stage:
    """What was seen in one stage."""

    time_per_token: TwoArms
    first_token: TwoArms
    failures: TwoArms
    num_control: int = 0
    num_treatment: int = 0
    num_with_company: int = 0
    num_observations: int = 0
    keys: dict[str, _Key] = field(default_factory=dict)

    @classmethod
    def begin(cls, experiment: Experiment, stage: int) -> Stage:
        """Nothing yet."""
        share = experiment.stages[stage]
        # tuned for the number at which an effect of a few per cent can be seen: the more uneven the arms, the more
        tuned_for = round(250 / (share * (1.0 - share)))

        def arms() -> TwoArms:
            return TwoArms(share=share, tuned_for=tuned_for)

        return cls(time_per_token=arms(), first_token=arms(), failures=arms())

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Stage:
        """What `asdict` told."""
        arms = {name: TwoArms.from_state(state[name]) for name in ("time_per_token", "first_token", "failures")}
        keys = {unit: _Key(**known) for unit, known in state["keys"].items()}
        return cls(**{**state, **arms, "keys": keys})

    def add(self, seen: Observation) -> None:
        """Count a unit: what it came to goes to each comparison that it says something of."""
        self.num_treatment += seen.in_treatment
        self.num_control += not seen.in_treatment
        stratum = seen.workload_class
        if seen.log_time_per_token is not None:
            self.time_per_token.add(seen.in_treatment, seen.log_time_per_token, stratum=stratum)
        if seen.log_first_token is not None:
            self.first_token.add(seen.in_treatment, seen.log_first_token, stratum=stratum)
        if seen.failures is not None:
            self.failures.add(seen.in_treatment, seen.failures)

    def add_of_key(self, seen: Observation) -> None:
        """Count a request of a key; with the last one of those that count, the key."""
        if seen.unit not in self.keys and len(self.keys) >= _MOST_KEYS:
            return
        key = self.keys.setdefault(seen.unit, _Key())
        key.count += 1
        key.failures += seen.failures or 0.0
        if seen.log_time_per_token is not None:
            key.log_time_per_token += seen.log_time_per_token
            key.num_timed += 1
        if seen.log_first_token is not None:
            key.log_first_token += seen.log_first_token
            key.num_first += 1
        if key.count == OBSERVATIONS_OF_A_KEY:
            means = Observation(
                unit=seen.unit,
                in_treatment=seen.in_treatment,
                stage=seen.stage,
                log_time_per_token=key.log_time_per_token / key.num_timed if key.num_timed else None,
                log_first_token=key.log_first_token / key.num_first if key.num_first else None,
                failures=key.failures / key.count,
            )
            self.add(means)


class Trial:
    """An experiment and how far it has come."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.status: Status = "running"
        self.stage = 0
        self.reason = "It has just begun."
        """Why it stands where it does."""
        self.seen = Stage.begin(experiment, 0)

    @property
    def share(self) -> float:
        """Of the traffic that is treated now."""
        if self.status == "done":
            return 1.0
        return self.experiment.stages[self.stage] if self.status == "running" else 0.0

    @property
    def holds(self) -> bool:
        """Whether anybody is treated, or will be."""
        return self.status in ("running", "paused", "done")

    def treats(self, unit: str) -> bool:
        """Whether a unit is treated now."""
        return self.experiment.place_of(unit) < self.share

    def observe(self, seen: Observation) -> None:
        """Take in what a unit came to; of an earlier stage, or while nothing is compared, it says nothing."""
        if self.status != "running" or seen.stage != self.stage:
            return
        self.seen.num_observations += 1
        self.seen.num_with_company += seen.has_company
        if self.experiment.unit == "key":
            self.seen.add_of_key(seen)
        else:
            self.seen.add(seen)

    def snapshot(self) -> Snapshot:
        """This stage, in numbers."""
        seen, alpha = self.seen, self.experiment.alpha_of_an_interval
        share = self.experiment.stages[self.stage]
        return Snapshot(
            stage=self.stage,
            num_control=seen.num_control,
            num_treatment=seen.num_treatment,
            sample_ratio_evidence=sample_ratio_evidence(seen.num_control, seen.num_treatment, share=share),
            time_per_token=_ratio_of(seen.time_per_token, alpha),
            first_token=_ratio_of(seen.first_token, alpha),
            failures=Comparison(seen.failures.effect, *seen.failures.interval(alpha)),
            num_with_company=seen.num_with_company,
            num_observations=seen.num_observations,
        )

    def judge(self) -> Verdict:
        """Look, and do what the verdict says. One may look after every observation."""
        assert self.status == "running"
        found = verdict(self.experiment, self.snapshot())
        self.reason = found.reason
        match found.action:
            case "advance" | "done":
                self.advance(found.reason)
            case "roll back":
                self.status = "rolled back"
            case "stop":
                self.status = "stopped"
        return found

    def advance(self, reason: str) -> None:
        """Go to the next share; at 1 there is nothing left to compare."""
        assert self.status == "running"
        self.reason = reason
        if self.stage == len(self.experiment.stages) - 2:
            self.status = "done"  # what the last stage saw stays to be read
        else:
            self.stage += 1
            self.seen = Stage.begin(self.experiment, self.stage)

    def set_status(self, status: Status, reason: str) -> None:
        """Pause, resume or stop it by hand."""
        self.status, self.reason = status, reason

    def state(self) -> dict[str, Any]:
        """All of it, as plain data that JSON can hold."""
        return {
            "experiment": self.experiment.state(),
            "status": self.status,
            "stage": self.stage,
            "reason": self.reason,
            "seen": asdict(self.seen),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trial:
        """What `state` told."""
        trial = cls(Experiment.from_state(state["experiment"]))
        trial.status, trial.stage, trial.reason = state["status"], state["stage"], state["reason"]
        if trial.status not in get_args(Status) or not 0 <= trial.stage < len(trial.experiment.stages) - 1:
            raise ValueError(f"a trial that is {trial.status!r} in stage {trial.stage!r}")
        trial.seen = Stage.from_state(state["seen"])
        return trial


def _ratio_of(arms: TwoArms, alpha: float) -> Comparison:
    low, high = arms.interval(alpha)
    return Comparison(ratio(arms.effect), 0.0 if low == -math.inf else ratio(low), ratio(high))

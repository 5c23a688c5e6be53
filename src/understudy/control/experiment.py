"""An experiment: a change of what speculation may do, for a share of the traffic that a lot chooses and that grows.

The treatment is a `Speculation` that is laid over the caller's: of both, the strictest holds, so it never does what a
caller did not allow. The control is whatever holds without it. Who is treated is decided by a hash of a salt and the
unit, a number from 0 to 1 that does not change: whoever is treated at 1 % still is at 5 %.

The unit is what the lot is drawn for:

    request   every request by itself
    key       all requests of a key alike; a key counts once, since its requests are no lots of their own
    window    a few seconds in which the treatment holds for everybody

Requests that are computed together share their steps: a plain request beside long cycles of others looks slow, and one
that drafts makes its neighbours look slow. So above concurrency 1 the arms of `request` and `key` interfere, and their
difference is that of two kinds of requests in a mixed batch, not that of an engine with and without the treatment. A
trial counts how many of its observations had such company, and says so. `window` is the honest unit there.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from understudy.core.request import Speculation
from understudy.core.switches import Switches
from understudy.errors import InvalidRequest

Unit = Literal["request", "key", "window"]
STAGES = (0.01, 0.05, 0.25, 0.5, 1.0)
MOST_STAGES = 10
NAME = r"[a-z0-9_-]{1,32}"
"""What an experiment may be called."""
_NO_TREATMENT = Speculation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrails:
    """What a treatment must not do. Ratios are of the treatment to the control: below 1 is faster."""

    worst_time_per_token: float = 1.05
    """The last stage before all is left only when the ratio is shown to be no worse. Being slower is never allowed."""
    worst_first_token: float = 1.05
    """Of the time to the first token: a ratio above it that is no chance ends the trial."""
    worst_error_rise: float = 0.01
    """Of the share of requests that fail: a rise above it that is no chance ends the trial."""

    def __post_init__(self) -> None:
        for name in ("worst_time_per_token", "worst_first_token"):
            if not 1.0 < getattr(self, name) <= 10.0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}.", "Give a ratio above 1.", parameter=name)
        if not 0.0 <= self.worst_error_rise <= 1.0:
            raise InvalidRequest(f"worst_error_rise is {self.worst_error_rise}.", "Give a share from 0 to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is tried, on whom, and how carefully."""

    name: str
    treatment: Speculation
    salt: str
    """Makes this experiment's lots its own. Whoever knows it can foresee them."""
    unit: Unit = "request"
    workload_class: str | None = None
    """Only requests of this class; None takes all."""
    stages: tuple[float, ...] = STAGES
    """Shares of the traffic, rising to 1."""
    guardrails: Guardrails = field(default_factory=Guardrails)
    min_per_arm: int = 30
    """Units of each arm before a stage can be left."""
    alpha: float = 0.05
    """The chance that a treatment without an effect is ever rolled back."""

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.name):
            remedy = "A name has at most 32 of a to z, 0 to 9, - and _."
            raise InvalidRequest("This is no name for an experiment.", remedy, parameter="name")
        if self.unit not in get_args(Unit):
            raise InvalidRequest(f"There is no unit {self.unit!r}.", "Give request, key or window.", parameter="unit")
        if not 1 <= len(self.salt) <= 64:
            raise InvalidRequest("A salt has 1 to 64 characters.", parameter="salt")
        rising = all(low < high for low, high in zip((0.0, *self.stages), self.stages, strict=False))
        if not rising or not 2 <= len(self.stages) <= MOST_STAGES or self.stages[-1] != 1.0:
            remedy = f"Give 2 to {MOST_STAGES} shares that rise and end with 1."
            raise InvalidRequest("These are no stages.", remedy, parameter="stages")
        if not 2 <= self.min_per_arm <= 10**6:
            raise InvalidRequest(f"min_per_arm is {self.min_per_arm}.", "Give 2 to 1000000.", parameter="min_per_arm")
        if not 0.0 < self.alpha < 1.0:
            raise InvalidRequest(f"alpha is {self.alpha}.", "Give a share between 0 and 1.", parameter="alpha")
        if self.treatment.forced:
            raise InvalidRequest("A treatment cannot force drafts.", parameter="treatment")
        if self.unit == "window":
            self._check_window()

    def _check_window(self) -> None:
        if self.workload_class is not None:
            remedy = "Leave out workload_class, or take the unit request."
            raise InvalidRequest("A window holds for every class.", remedy, parameter="workload_class")
        if self.treatment.max_rows != _NO_TREATMENT.max_rows:
            remedy = "Take max_depth, or the unit request."
            raise InvalidRequest("max_rows cannot be switched for everybody.", remedy, parameter="treatment")

    @property
    def alpha_of_an_interval(self) -> float:
        """What each interval may err by: three outcomes in each stage that compares."""
        return self.alpha / (3 * (len(self.stages) - 1))

    def place_of(self, unit: str) -> float:
        """Where a unit stands between 0 and 1; it is treated where the share is above that."""
        digest = hashlib.blake2b(f"{len(self.salt)}:{self.salt}{unit}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def takes(self, wanted: Speculation, workload_class: str) -> bool:
        """Whether a request takes part. It must not depend on the arm, and does not: it is the caller's wish alone.

        Who wants no drafts, or those of another drafter, cannot be treated, and therefore is no control either.
        """
        if self.workload_class not in (None, workload_class):
            return False
        rivals = {wanted.drafter, self.treatment.drafter} - {None}
        return wanted.enabled and not wanted.forced and len(rivals) <= 1

    def switches(self, drafters: tuple[str, ...]) -> Switches:
        """The treatment for everybody, where these drafters run."""
        depth, only = self.treatment.max_depth, self.treatment.drafter
        return Switches(
            enabled=self.treatment.enabled,
            max_depth=None if depth == _NO_TREATMENT.max_depth else depth,
            drafters_off=frozenset() if only is None else frozenset(drafters) - {only},
        )

    def state(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Experiment:
        """What `state` told."""
        parts = {
            "treatment": Speculation(**state["treatment"]),
            "guardrails": Guardrails(**state["guardrails"]),
            "stages": tuple(state["stages"]),
        }
        return cls(**{**state, **parts})


def strictest(wanted: Speculation, treatment: Speculation) -> Speculation:
    """What both allow."""
    return replace(
        wanted,
        enabled=wanted.enabled and treatment.enabled,
        max_depth=min(wanted.max_depth, treatment.max_depth),
        max_rows=min(wanted.max_rows, treatment.max_rows),
        drafter=wanted.drafter or treatment.drafter,
    )

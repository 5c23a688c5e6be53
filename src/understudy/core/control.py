"""What the control plane is told, what it remembers, and what it shows: plain data that travels and is kept.

Policy      what is believed of each class before anything was measured: written by `advise`, loaded by `serve`
Learned     what was measured and is worth keeping over a restart
PassCosts   what passes of the target cost on this machine: measured once in a server's life
ControlView how things stand: what is on, what is off, and why, in words
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from understudy.errors import ConfigError

BreakerState = Literal["on", "probing", "off"]
BREAKER_STATES: tuple[BreakerState, ...] = ("on", "probing", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPolicy:
    """What to begin with for one class. Measurement overrules it."""

    enabled: bool = True
    """False: off until a probe says otherwise."""
    max_depth: int | None = None
    """No draft of this class reaches further; None leaves it to the depth rule."""
    drafters: tuple[str, ...] | None = None
    """Only these are asked; None asks all that there are."""
    reason: str = ""
    """Why, in words."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"enabled is {self.enabled!r}.", "Give true or false.")
        depth = self.max_depth
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 64):
            raise ConfigError(f"max_depth is {depth!r}.", "Give a whole number from 0 to 64.")
        names = self.drafters
        if names is not None and not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"drafters is {names!r}.", "Give a list of names.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to begin with, by class."""

    classes: dict[str, ClassPolicy] = field(default_factory=dict)
    model: str = ""
    """What it was made for; empty if nobody says."""
    system_fingerprint: str = ""

    def of(self, workload_class: str) -> ClassPolicy:
        """What holds for a class; one that is not named has nothing to hold it."""
        return self.classes.get(workload_class, _UNNAMED)

    def unserved(self, drafters: Collection[str]) -> list[str]:
        """The classes that nothing is drafted for by these drafters, though the policy has them drafted for."""
        return [
            name
            for name, policy in self.classes.items()
            if policy.enabled and policy.drafters is not None and not set(policy.drafters) & set(drafters)
        ]

    def doubt(self, model: str, system_fingerprint: str) -> str:
        """Why it may not hold for a model, in words; empty if it was made for this one, or nobody says for which."""
        if self.model not in ("", model):
            return f"The policy was made for {self.model}, and this is {model}: measurement will correct it."
        if self.system_fingerprint not in ("", system_fingerprint):
            return (
                f"The policy was made for {self.system_fingerprint}, and this is {system_fingerprint}: "
                "the weights or how they are computed have changed since."
            )
        return ""


_UNNAMED = ClassPolicy()


@dataclass(frozen=True, slots=True)
class LearnedRate:
    """How often something came true: hits out of trials, both decayed."""

    kind: Literal["confidence", "position"]
    workload_class: str
    temperature_band: int
    drafter: str
    index: int
    """The band of stated confidence, or the position in a draft."""
    hits: float
    trials: float


@dataclass(frozen=True, slots=True)
class LearnedBreaker:
    """A breaker as it stood."""

    workload_class: str
    temperature_band: int
    drafter: str
    state: BreakerState
    reason: str
    rest_steps: int
    """Steps that it rests for when it is off, before it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """All that is worth keeping."""

    rates: tuple[LearnedRate, ...] = ()
    breakers: tuple[LearnedBreaker, ...] = ()
    answer_lengths: dict[str, float] = field(default_factory=dict)
    """Mean number of tokens of an answer, by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """A cost model as it was measured (control/cost.py says what it means)."""

    rows_s: dict[int, float]
    per_key_s: float
    per_read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerView:
    """One drafter for texts of one class at about one temperature."""

    workload_class: str
    temperature: str
    """Which, in words."""
    drafter: str
    state: BreakerState
    reason: str
    num_cycles: int
    """Cycles lately in which rows of it were verified, or its guesses compared."""
    acceptance: float | None
    """Of the drafted positions lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """One class, in the present window of its ledger."""

    workload_class: str
    plain_s: float
    """What its words would have taken plainly."""
    debt_s: float
    """By how much speculation made it later; below zero where it made it earlier."""
    allowance_s: float
    """What the debt may come to."""
    num_refused: int
    """Steps in which the ledger did not let it draft."""
    max_depth: int
    """How deep a greedy request of it may be drafted for now."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The live speed-up: windows with speculation against windows without, at equal batch and context."""

    estimate: float
    low: float
    high: float
    """An interval that is valid however often one looks."""
    num_windows: int
    """Plain windows that it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlView:
    """How things stand."""

    classes: tuple[ClassView, ...] = ()
    breakers: tuple[BreakerView, ...] = ()
    speedup: Speedup | None = None
    num_steps: int = 0
    num_overruns: int = 0
    """Cycles that took longer than the worst case that the ledger had reckoned with."""
    learned: Learned = field(default_factory=Learned)

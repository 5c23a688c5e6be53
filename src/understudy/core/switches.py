"""What is switched off from outside, whatever a request allows. An engine looks at it before every step."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.core.request import Speculation
from understudy.errors import ConfigError

MOST_NAMES = 256
"""Classes or drafters that one state may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The kill switch: everything, single classes, single drafters; and a cap on depth."""

    enabled: bool = True
    classes_off: frozenset[str] = frozenset()
    drafters_off: frozenset[str] = frozenset()
    max_depth: int | None = None
    """No draft reaches further than this; None leaves it to the requests."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"enabled is {self.enabled!r}.", "Give true or false.")
        for name in ("classes_off", "drafters_off"):
            value = getattr(self, name)
            if not isinstance(value, frozenset) or not all(isinstance(entry, str) for entry in value):
                raise ConfigError(f"{name} must be a set of names.")
            if len(value) > MOST_NAMES:
                raise ConfigError(f"{name} has {len(value)} names.", f"Give at most {MOST_NAMES}.")
        depth = self.max_depth
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= 64):
            raise ConfigError(f"max_depth is {depth!r}.", "Give a whole number from 0 to 64.")

    def depth_of(self, wanted: Speculation, workload_class: str) -> int:
        """How deep a request of a class may be drafted for, now."""
        if not self.enabled or not wanted.enabled or workload_class in self.classes_off:
            return 0
        return wanted.max_depth if self.max_depth is None else min(wanted.max_depth, self.max_depth)

    def allows(self, drafter: str) -> bool:
        """Whether a drafter may be asked."""
        return drafter not in self.drafters_off


ALL_ON = Switches()
OFF = Switches(enabled=False)
"""What anything that cannot be read or understood is taken for."""

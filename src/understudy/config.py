"""One frozen configuration. Unknown keys are refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from understudy.core.control import Policy
from understudy.core.weights import DEVICE_CHOICES, WEIGHT_TYPES, DeviceChoice, WeightType
from understudy.errors import ConfigError

DRAFTERS = ("suffix", "ngram", "lookahead", "model")
DEFAULT_DRAFTERS = ("suffix",)


def default_drafters(*, has_draft: bool) -> tuple[str, ...]:
    """Who drafts where nobody says so: a draft model that is there is there to be used."""
    return (*DEFAULT_DRAFTERS, "model") if has_draft else DEFAULT_DRAFTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built."""

    drafters: tuple[str, ...] = DEFAULT_DRAFTERS
    """Which drafters share the draft tree; none at all is an engine without speculation. A draft model joins them."""
    draft: str | None = None
    """A smaller model that drafts: a folder, a GGUF file, `layers:N` or `twin:S` (see `assembly.with_draft`)."""
    cross_tokenizer: bool = False
    """Whether the draft model may have another vocabulary than its target."""
    max_rows_per_step: int = 256
    """One budget for prompt chunks, decoded tokens and drafted rows."""
    max_sequences: int = 64
    max_context: int | None = None
    """Longest text, prompt and answer; the model's own limit if None."""
    kv_tokens: int | None = None
    """Room for keys and values, in tokens; measured from free memory if None."""
    prefix_cache: bool = True
    num_threads: int | None = None
    device: DeviceChoice = "auto"
    """Where a model that is loaded is computed; a target that is handed over has made its choice, of weights too."""
    weights: WeightType | None = None
    """How its weights are held; what is fastest on its device if None."""

    policy: Policy | None = None
    """What to begin with for each class; measurement overrules it."""
    control_share: float = 0.0
    """Share of the time in which everybody is served plainly, so that the gain can be told."""

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, tuple | list):
            raise ConfigError(f"drafters is {self.drafters!r}.", "Give a list of names; an empty one drafts nothing.")
        for name in ("prefix_cache", "cross_tokenizer"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}.", "Give true or false.")
        if self.device not in DEVICE_CHOICES:
            raise ConfigError(f"device is {self.device!r}.", f"Choose from {', '.join(DEVICE_CHOICES)}.")
        if self.weights is not None and self.weights not in WEIGHT_TYPES:
            raise ConfigError(f"weights is {self.weights!r}.", f"Choose from {', '.join(WEIGHT_TYPES)}.")
        unknown = [name for name in self.drafters if name not in DRAFTERS]
        if unknown:
            raise ConfigError(f"There is no drafter named {unknown[0]!r}.", f"Choose from {', '.join(DRAFTERS)}.")
        if len(set(self.drafters)) < len(self.drafters):
            raise ConfigError("A drafter is named twice.", "Name each once.")
        if self.draft is not None and not isinstance(self.draft, str):
            raise ConfigError(f"draft is {self.draft!r}.", "Give the folder or the file of a model.")
        if self.draft is not None and tuple(self.drafters) == DEFAULT_DRAFTERS:
            object.__setattr__(self, "drafters", default_drafters(has_draft=True))
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(f"policy is {self.policy!r}.", "Give a Policy, such as `read_policy(path).policy`.")
        self._check_numbers()

    def _check_numbers(self) -> None:
        share = self.control_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 0.5:
            raise ConfigError(f"control_share is {share!r}.", "Give a number from 0 to 0.5.")
        for name in ("max_rows_per_step", "max_sequences", "max_context", "kv_tokens", "num_threads"):
            value = getattr(self, name)
            if value is None and name in ("max_context", "kv_tokens", "num_threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}.", "Give a whole number of at least 1.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values, refusing names that do not exist."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"There is no setting named {unknown[0]!r}.", f"Choose from {', '.join(sorted(known))}.")
        return cls(**values)

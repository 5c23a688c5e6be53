"""One frozen configuration. Unknown keys are refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from understudy.core.control import Policy
from understudy.core.weights import DEVICE_CHOICES, WEIGHT_TYPES, DeviceChoice, WeightType
from understudy.errors import ConfigError

MODEL = "model"
"""The drafter that needs a draft model."""
TRAINED_DRAFTERS = ("eagle", "block", "medusa")
"""Those that need a trained draft, which is of one of these kinds."""
DRAFTERS = ("suffix", "ngram", "lookahead", MODEL, *TRAINED_DRAFTERS)
DEFAULT_DRAFTERS = ("suffix",)
DEFAULT = "default"
"""Stands for those who draft where nobody says so, among the drafters of a configuration."""
AUTO_DRAFT = "auto"
"""The draft that comes with the package for this very target, if there is one."""
NO_DRAFT = "none"
MOST_CHILDREN = 16


def default_drafters(draft_kind: str | None = None) -> tuple[str, ...]:
    """Who drafts where nobody says so: a draft that is there, by the name of its drafter, is there to be used."""
    return DEFAULT_DRAFTERS if draft_kind is None else (*DEFAULT_DRAFTERS, draft_kind)


def names_a_draft(draft: str | None) -> bool:
    """Whether somebody asked for a draft of their own choice."""
    return draft not in (None, AUTO_DRAFT, NO_DRAFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built."""

    drafters: tuple[str, ...] = (DEFAULT,)
    """Which drafters share the draft tree; none at all is an engine without speculation. `default` stands for
    `default_drafters`, which a draft joins."""
    draft: str = AUTO_DRAFT
    """What drafts beside the target: `auto`, the draft that comes with the package for this very target, if there is
    one; `none`; a kind of trained draft, for one that comes with the package; the folder of a trained draft; or a
    smaller model: a folder, a GGUF file, `layers:N` or `twin:S` (see `drafts.with_draft`)."""
    draft_tree: int = 1
    """Children of a node in the trees that a trained draft grows; with 1 they are chains."""
    cross_tokenizer: bool = False
    """Whether the draft model may have another vocabulary than its target."""
    max_rows_per_step: int | None = None
    """One budget for prompt chunks, decoded tokens and drafted rows; what the device does best with if None."""
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
        self._check_drafters()
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(f"policy is {self.policy!r}.", "Give a Policy, such as `read_policy(path).policy`.")
        self._check_numbers()

    def _check_drafters(self) -> None:
        unknown = [name for name in self.drafters if name not in (DEFAULT, *DRAFTERS)]
        if unknown:
            raise ConfigError(f"There is no drafter named {unknown[0]!r}.", f"Choose from {', '.join(DRAFTERS)}.")
        if len(set(self.drafters)) < len(self.drafters):
            raise ConfigError("A drafter is named twice.", "Name each once.")
        if not isinstance(self.draft, str):
            raise ConfigError(
                f"draft is {self.draft!r}.", f"Give {AUTO_DRAFT}, {NO_DRAFT}, or the folder or the file of a draft."
            )
        drafting = self._drafting
        if len(drafting) > 1:
            raise ConfigError(
                f"{drafting[0]} and {drafting[1]} cannot draft together: an engine has one draft.", "Name one of them."
            )
        if drafting and self.draft != drafting[0] and self.draft in TRAINED_DRAFTERS:
            raise ConfigError(f"The draft is {self.draft}, and the drafter {drafting[0]}.", "Name the same in both.")

    @property
    def _drafting(self) -> list[str]:
        """Those of the drafters that need a draft."""
        return [name for name in self.drafters if name in (MODEL, *TRAINED_DRAFTERS)]

    @property
    def wanted_draft(self) -> str:
        """What of a draft is to be loaded: none where nobody would use it, and one of the kind that a drafter names."""
        drafting = self._drafting
        if not drafting:
            return self.draft if DEFAULT in self.drafters else NO_DRAFT
        if self.draft != AUTO_DRAFT:
            return self.draft
        return drafting[0] if drafting[0] in TRAINED_DRAFTERS else NO_DRAFT

    def drafters_with(self, draft_kind: str | None) -> tuple[str, ...]:
        """Who drafts, where the target has a draft of this kind, or none."""
        named = ((name,) if name != DEFAULT else default_drafters(draft_kind) for name in self.drafters)
        return tuple(dict.fromkeys(name for names in named for name in names))

    def _check_numbers(self) -> None:
        share = self.control_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 0.5:
            raise ConfigError(f"control_share is {share!r}.", "Give a number from 0 to 0.5.")
        for name in ("max_rows_per_step", "max_sequences", "max_context", "kv_tokens", "num_threads", "draft_tree"):
            value = getattr(self, name)
            if value is None and name in ("max_rows_per_step", "max_context", "kv_tokens", "num_threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}.", "Give a whole number of at least 1.")
        if self.draft_tree > MOST_CHILDREN:
            raise ConfigError(f"draft_tree is {self.draft_tree}.", f"Give a whole number from 1 to {MOST_CHILDREN}.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values, refusing names that do not exist."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"There is no setting named {unknown[0]!r}.", f"Choose from {', '.join(sorted(known))}.")
        return cls(**values)

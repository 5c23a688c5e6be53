"""The settings under which the words must be the same, and a few of them that stand for all.

Seven things could change a word if the engine were wrong: the drafters, whether a trained draft grows chains or trees,
the temperature, neighbours in the batch, keys and values out of the prefix cache, a sequence that gave its blocks back
and was computed again, and how the weights are held. The whole product of them is long; most faults need only two of
them to meet, so `pairwise` chooses settings until every two values have met.

Preemption takes blocks from the youngest of several running sequences. A sequence that runs alone always has room
(one that could not fit is refused at the door), so at concurrency 1 there is nothing to preempt, and the product
leaves that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product

from understudy.config import TRAINED_DRAFTERS
from understudy.core.weights import WEIGHTS_ON, WeightType

# The most demanding value of each comes first, so that a short list begins with the hardest settings.
DRAFTERS = (("suffix", "ngram", "lookahead", "model"), ("model",), ("lookahead",), ("suffix",), ("ngram",))
TREES = (3, 1)
"""Children of a node in the trees of a trained draft: trees, and chains."""
TEMPERATURES = (0.0, 0.7, 1.0)
CONCURRENCIES = (4, 1)

Value = tuple[str, object]
"""The name of a field, and what it is set to."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the prompts."""

    drafters: tuple[str, ...]
    temperature: float
    concurrency: int
    prefix_cache: bool
    preemption: bool
    weights: WeightType
    draft_tree: int = 1

    @property
    def name(self) -> str:
        """The setting in words; no two share one."""
        parts = [
            "+".join(self.drafters),
            *([f"trees of {self.draft_tree}"] if self.draft_tree > 1 else []),
            f"temperature {self.temperature:g}",
            f"{self.concurrency} at once",
            *(["prefix cache"] if self.prefix_cache else []),
            *(["preemption"] if self.preemption else []),
            self.weights,
        ]
        return ", ".join(parts)

    @property
    def is_valid(self) -> bool:
        """Whether what it asks for can happen at all: alone, nothing is preempted; only trained drafts grow trees."""
        has_trees = self.draft_tree == 1 or self.trained is not None
        return has_trees and (not self.preemption or self.concurrency > 1)

    @property
    def trained(self) -> str | None:
        """The kind of trained draft that it needs."""
        return next((name for name in self.drafters if name in TRAINED_DRAFTERS), None)

    def values(self) -> list[Value]:
        """Its fields by name, in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def pairs(self) -> Iterator[tuple[Value, Value]]:
        """Every two of its values."""
        return combinations(self.values(), 2)


def every_setting(
    weights: Sequence[WeightType] = WEIGHTS_ON["cpu"], trained: Sequence[str] = ()
) -> list[Setting]:  # fmt: skip
    """The whole product, without the settings that make no sense.

    `weights` are those that a device computes with, `trained` the kinds of trained drafts that the target has: each
    drafts alone, and the first beside the suffix drafter, as by default.
    """
    drafters = (*(("suffix", kind) for kind in trained[:1]), *((kind,) for kind in trained), *DRAFTERS)
    combined = product(drafters, TEMPERATURES, CONCURRENCIES, (True, False), (True, False), weights, TREES)
    settings = [Setting(*values) for values in combined]
    return [setting for setting in settings if setting.is_valid]


def pairwise(settings: Sequence[Setting]) -> list[Setting]:
    """Choose settings, the most telling first, until every two values that occur together have been together.

    Greedy: each next one covers the most pairs that are still missing; of equals, the first. So it is always the same
    list, and any beginning of it is a good use of a short time.
    """
    missing = {pair for setting in settings for pair in setting.pairs()}
    chosen: list[Setting] = []
    while missing:
        best = max(settings, key=lambda setting: sum(pair in missing for pair in setting.pairs()))
        chosen.append(best)
        missing.difference_update(best.pairs())
    return chosen


def by_weights(settings: Sequence[Setting]) -> list[Setting]:
    """Sort settings so that each kind of weights is needed once; those of a kind stay in order."""
    kinds = list(dict.fromkeys(setting.weights for setting in settings))
    return sorted(settings, key=lambda setting: kinds.index(setting.weights))

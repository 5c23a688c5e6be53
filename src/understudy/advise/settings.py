"""What is tried in a replay, and what is needed of a machine and its models for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from understudy.advise.replay import Limits, refusal
from understudy.config import MODEL, EngineConfig
from understudy.control.cost import CostModel
from understudy.drafters.base import Drafter
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.assembly import Target

_ROOM_TOKENS = 2080
"""Room for measuring what context costs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What passes cost, and what the models allow."""

    cost: CostModel
    """Of the target's passes."""
    draft_cost: CostModel | None = None
    limits: Limits = field(default_factory=Limits)
    target: Target | None = None
    """Needed where a draft model drafts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What drafts, and how far."""

    name: str
    depths: tuple[int, ...] | None
    """Those of a draft model are replayed at once; None leaves it to the engine's own rule."""
    make: Callable[[], Sequence[Drafter]]
    """Makes new drafters, which have learned nothing; one where depths are given."""

    def __str__(self) -> str:
        depths = None if self.depths is None else ", ".join(map(str, self.depths))
        return f"{self.name}, {'the engine decides' if depths is None else f'depth {depths}'}"


def without_trained(target: Target) -> tuple[Target, list[str]]:
    """The target without a draft that cannot be replayed, and what a reader of the numbers must know of that."""
    draft = target.draft
    if draft is None or not refusal(draft.kind):
        return target, []
    why = refusal(draft.kind)
    note = f"The trained draft {draft.name} is left out of the table: {why}. `understudy bench` measures it."
    return replace(target, draft=None), [note]


def measured(target: Target, *, cost: CostModel | None = None) -> Machine:
    """Measure what the passes of a target, unless its cost is given, and of its draft model take on this machine."""
    from understudy.assembly import build_engine, make_drafter

    num_blocks = -(-_ROOM_TOKENS // target.page_tokens)
    if cost is None:
        config = EngineConfig(kv_tokens=num_blocks * target.page_tokens, drafters=("ngram",), prefix_cache=False)
        cost = build_engine(target, config).cost
    draft_cost: CostModel | None = None
    if target.draft_kind == MODEL:
        draft_cost = getattr(make_drafter("model", target, num_blocks=num_blocks), "cost", None)
    model = target.decoder.config
    limits = Limits(vocab_size=model.vocab_size, max_context=model.max_positions)
    return Machine(cost, draft_cost, limits, target)


def fixed_settings(names: Sequence[str], depths: Sequence[int], machine: Machine) -> list[Setting]:
    """Each drafter at each depth, forced."""
    return [
        Setting(name, group, partial(_make, (name,), machine))
        for name in names
        for group in ([tuple(depths)] if name == "model" else [(depth,) for depth in depths])
    ]


def engine_setting(drafters: Sequence[str], machine: Machine) -> Setting:
    """What the engine's own rule does with these drafters and those that every engine has."""
    from understudy.assembly import built_in_drafters

    names = tuple(drafters)
    return Setting("+".join(names), None, lambda: [*built_in_drafters(), *_make(names, machine)])


def _make(names: Sequence[str], machine: Machine) -> list[Drafter]:
    return [_drafter(name, machine) for name in names]


def _drafter(name: str, machine: Machine) -> Drafter:
    from understudy.drafters.ngram import NgramDrafter
    from understudy.drafters.prediction import PredictionDrafter
    from understudy.drafters.suffix import SuffixDrafter

    free: dict[str, Callable[[], Drafter]] = {
        "suffix": SuffixDrafter,
        "ngram": NgramDrafter,
        "prediction": PredictionDrafter,
    }
    if name in free:
        return free[name]()
    from understudy.assembly import make_drafter

    target = machine.target
    assert name == "model", f"{name} cannot be replayed"
    assert target is not None, "a draft model needs its target"
    # one text at a time: room for the longest, and for as much again, so that prefixes are kept as a server does
    longest = 2 * min(machine.limits.max_context, target.decoder.config.max_positions)
    own_cost = deepcopy(machine.draft_cost)  # its passes correct it; what was measured beside the target's must stay
    return make_drafter(name, target, num_blocks=-(-longest // target.page_tokens), draft_cost=own_cost)


def steps_cost(text: str) -> CostModel:
    """Read what a pass costs as given by hand: rows=milliseconds, with commas between."""
    table: dict[int, float] = {}
    for entry in text.split(","):
        rows, _, milliseconds = entry.strip().partition("=")
        try:
            count, seconds = int(rows), float(milliseconds) / 1000
        except ValueError:
            count, seconds = 0, math.nan
        if count < 1 or not (math.isfinite(seconds) and seconds > 0) or count in table:
            raise ConfigError(
                f"{entry.strip()!r} is no number of rows with its time.",
                "Give each number once, as in 1=9.1,4=10.2,8=12: rows=milliseconds.",
            )
        table[count] = seconds
    if 1 not in table or len(table) < 2:
        raise ConfigError("The table lacks the time of 1 row, or of more.", "Give both, as in 1=9.1,4=10.2,8=12.")
    return CostModel(table)

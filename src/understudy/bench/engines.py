"""Builds the arms that are engines of ours: one without any drafter, and one for each drafter setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from understudy.bench.prompts import Prompt, prompt_ids
from understudy.bench.record import NONE, PLAIN, ArmFacts, MemoryBytes, PassBytes
from understudy.bench.run import EngineArm, Listener
from understudy.bench.workloads import Encode, Plan
from understudy.config import EngineConfig
from understudy.core.weights import NUMERICS

if TYPE_CHECKING:
    from understudy.assembly import Target

_LEAST_ROOM_TOKENS = 2080
"""Room for measuring what context costs, where the prompts themselves are short."""
_MOST_ROOM_BYTES = 2 << 30
"""Where requests want more at once than this, they wait for each other, as in a server."""
_DRAFT_TOKENS = 64
"""Room of each sequence for what is drafted beyond its text."""


def drafters_of(name: str) -> tuple[str, ...]:
    """Take the name of an arm apart: `plain` or `none`, or drafters with a plus between."""
    return () if name in (PLAIN, NONE) else tuple(name.split("+"))


def encoder(target: Target) -> Encode:
    """Turn prompts into token ids; None for those that the context cannot hold."""
    context = target.decoder.config.max_positions

    def encode(prompt: Prompt) -> tuple[int, ...] | None:
        ids = prompt_ids(prompt, target)
        return ids if 0 < len(ids) < context else None

    return encode


def build_arms(loaded: Target, names: Sequence[str], plan: Plan, *, draft_tree: int = 1) -> list[EngineArm]:
    """Build an engine for each name, all around one target and its draft, or the one of the kind that an arm names."""
    from understudy.assembly import build_engine, with_draft_for

    room = room_tokens(loaded, plan)
    arms = []
    for name in names:
        listener = Listener()
        target = with_draft_for(loaded, drafters_of(name), emit=listener)
        config = EngineConfig(
            drafters=drafters_of(name),
            draft_tree=draft_tree,
            weights=target.weights,
            prefix_cache=False,
            kv_tokens=room,
            max_sequences=max(EngineConfig().max_sequences, plan.most_at_once),
        )
        engine = build_engine(target, config, emit=listener)
        drafters = config.drafters_with(target.draft_kind)
        memory = memory_bytes(target, drafters, room)
        read = PassBytes(target.decoder.pass_bytes, target.kv_bytes_per_token)
        facts = ArmFacts(name, target.weights, NUMERICS, memory, drafters, read)
        arms.append(EngineArm(facts, engine, listener))
    return arms


def memory_bytes(target: Target, drafters: Sequence[str], room: int) -> MemoryBytes:
    """Memory of an arm with room for so many tokens; a draft has a cache of its own, with as many."""
    draft = target.draft if target.draft_kind in drafters else None
    per_token = target.kv_bytes_per_token + (draft.kv_bytes_per_token if draft else 0)
    return MemoryBytes(target=target.num_bytes, draft=draft.num_bytes if draft else 0, kv=room * per_token)


def room_tokens(target: Target, plan: Plan) -> int:
    """Room for keys and values, in whole blocks, for as many of the longest questions as can run at once."""
    page = target.page_tokens
    context = target.decoder.config.max_positions
    longest = max(min(len(q.prompt_ids) + q.max_tokens, context) for q in plan.all_questions) + _DRAFT_TOKENS
    alone = -(-longest // page) * page
    most = _MOST_ROOM_BYTES // target.kv_bytes_per_token
    wanted = min(alone * plan.most_at_once, max(alone, most))
    return -(-max(wanted, _LEAST_ROOM_TOKENS) // page) * page

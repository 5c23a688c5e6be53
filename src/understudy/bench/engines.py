"""Builds the arms that are engines of ours: one without any drafter, and one for each drafter setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from understudy.bench.prompts import Prompt, prompt_ids
from understudy.bench.record import DEFAULT, PLAIN, ArmFacts, MemoryBytes
from understudy.bench.run import EngineArm, Listener
from understudy.bench.workloads import Encode, Plan
from understudy.config import EngineConfig

if TYPE_CHECKING:
    from understudy.assembly import Target

NUMERICS = "exact"
_LEAST_ROOM_TOKENS = 2080
"""Room for measuring what context costs, where the prompts themselves are short."""
_MOST_ROOM_BYTES = 2 << 30
"""Where requests want more at once than this, they wait for each other, as in a server."""
_DRAFT_TOKENS = 64
"""Room of each sequence for what is drafted beyond its text."""


def drafters_of(name: str) -> tuple[str, ...]:
    """Take the name of an arm apart: `plain`, `default`, or drafters with a plus between."""
    if name == PLAIN:
        return ()
    return EngineConfig().drafters if name == DEFAULT else tuple(name.split("+"))


def encoder(target: Target) -> Encode:
    """Turn prompts into token ids; None for those that the context cannot hold."""
    context = target.decoder.config.max_positions

    def encode(prompt: Prompt) -> tuple[int, ...] | None:
        ids = prompt_ids(prompt, target)
        return ids if 0 < len(ids) < context else None

    return encode


def build_arms(target: Target, names: Sequence[str], plan: Plan, *, weights: str) -> list[EngineArm]:
    """Build an engine for each name, all around one target."""
    from understudy.assembly import build_engine

    room = room_tokens(target, plan)
    given: dict[str, Any] = {
        "prefix_cache": False,
        "kv_tokens": room,
        "max_sequences": max(EngineConfig().max_sequences, plan.most_at_once),
    }
    if "weights" in {field.name for field in fields(EngineConfig)}:
        given["weights"] = weights
    memory = MemoryBytes(target=weight_bytes(target), draft=0, kv=room * target.kv_bytes_per_token)
    arms = []
    for name in names:
        listener = Listener()
        config = EngineConfig.from_mapping({**given, "drafters": drafters_of(name)})
        engine = build_engine(target, config, emit=listener)
        arms.append(EngineArm(ArmFacts(name, weights, NUMERICS, memory), engine, listener))
    return arms


def room_tokens(target: Target, plan: Plan) -> int:
    """Room for keys and values, in whole blocks, for as many of the longest questions as can run at once."""
    page = target.page_tokens
    context = target.decoder.config.max_positions
    longest = max(min(len(q.prompt_ids) + q.max_tokens, context) for q in plan.all_questions) + _DRAFT_TOKENS
    alone = -(-longest // page) * page
    most = _MOST_ROOM_BYTES // target.kv_bytes_per_token
    wanted = min(alone * plan.most_at_once, max(alone, most))
    return -(-max(wanted, _LEAST_ROOM_TOKENS) // page) * page


def weight_bytes(target: Target) -> int:
    """Bytes of the target's weights: as it tells, or else every parameter in fp32."""
    told: int | None = getattr(target, "num_bytes", None)
    if told is not None:
        return told
    shape = target.decoder.config
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys) + (queries + 2 * keys) * shape.attention_bias
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    return 4 * (shape.num_layers * layer + vocabulary + shape.hidden_size)

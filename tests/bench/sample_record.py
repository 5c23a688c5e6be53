"""A made-up record of a bench, shaped like a real one. Its numbers were measured nowhere."""

from __future__ import annotations

import random
from typing import Any

CLASSES = {"code": 1.95, "structured": 1.72, "chat": 1.18, "summarization": 1.64, "rag": 1.81, "math": 1.37}
SLOW = {"multilingual": 1.02, "creative": 0.94}
PLAIN_TOKENS_PER_S = {1: 38.0, 4: 96.0, 8: 141.0, 16: 172.0}
GAIN_KEPT = {1: 1.0, 4: 0.62, 8: 0.21, 16: -0.12}
"""The share of the gain at concurrency 1 that is left at others."""


def sample_record(
    *,
    classes: dict[str, float] | None = None,
    drafters: tuple[str, ...] = ("default",),
    temperatures: tuple[float, ...] = (0.0, 0.8),
    concurrencies: tuple[int, ...] = (1, 4, 8, 16),
    notes: tuple[str, ...] = ("SAMPLE: made-up numbers, to show the page.",),
) -> dict[str, Any]:
    """Make a record; the classes are names with their speed-up at temperature 0, one request at a time."""
    chance = random.Random(7)
    speedups = dict(classes or {**CLASSES, **SLOW})
    speedups["all"] = sum(speedups.values()) / len(speedups)
    rows, cycles, samples = [], [], []
    for temperature in temperatures:
        for concurrency in concurrencies:
            for name, speedup in speedups.items():
                for drafter in ("plain", *drafters):
                    kept = GAIN_KEPT.get(concurrency, 0.1) * (1 - 0.25 * temperature)
                    gain = (
                        1.0 if drafter == "plain" else 1 + (speedup - 1) * kept * (1 if drafter == "default" else 0.7)
                    )
                    key = {"class": name, "drafter": drafter, "temperature": temperature, "concurrency": concurrency}
                    rows.append({**key, **_row(drafter, concurrency, gain, chance)})
                    cycles.append({**key, **_cycle(drafter, concurrency, gain)})
                    if name == "all":
                        samples.append({**key, **_samples(concurrency, gain, chance)})
    return {"manifest": {**_manifest(notes), "cycle_time": cycles, "samples": samples}, "rows": rows}


def _row(drafter: str, concurrency: int, gain: float, chance: random.Random) -> dict[str, Any]:
    plain = drafter == "plain"
    tokens_per_s = PLAIN_TOKENS_PER_S.get(concurrency, 50.0) * gain
    spread = 0.02 + 0.03 * chance.random()
    share = min(0.92, max(0.25, 0.35 + 0.5 * (gain - 0.9)))
    return {
        "weights": "int8",
        "numerics": "row-invariant",
        "tokens_per_s": tokens_per_s,
        "speedup": None if plain else gain,
        "speedup_low": None if plain else gain * (1 - spread),
        "speedup_high": None if plain else gain * (1 + spread),
        "acceptance_rate": None if plain else share,
        "acceptance_by_position": [] if plain else [share * 0.86**place for place in range(8)],
        "tokens_per_cycle": 1.0 if plain else 1 + 2.1 * share,
        "rows_per_cycle": 1.0 if plain else 4.2,
        "ttft_ms": _quantiles(62.0 * concurrency**0.6),
        "tpot_ms": _quantiles(1000 * concurrency / tokens_per_s),
        "request_ms": _quantiles(128_000 * concurrency / tokens_per_s),
        "memory_bytes": {"target": 148_000_000, "draft": 0 if plain else 2_400_000, "kv": 47_000_000 * concurrency},
        "identical": None if plain else True,
    }


def _quantiles(middle: float) -> dict[str, float]:
    return {"p50": middle, "p95": middle * 1.5, "p99": middle * 1.9}


def _cycle(drafter: str, concurrency: int, gain: float) -> dict[str, float]:
    plain = drafter == "plain"
    forward = 0.0245 * concurrency**0.6
    return {
        "draft_s": 0.0 if plain else 0.0006,
        "forward_s": forward if plain else forward * (1.3 + 0.1 * gain),
        "sample_s": 0.0004 if plain else 0.0011,
        "other_s": 0.0005,
    }


def _samples(concurrency: int, gain: float, chance: random.Random) -> dict[str, list[float]]:
    per_token = 1000 * concurrency / (PLAIN_TOKENS_PER_S.get(concurrency, 50.0) * gain)
    return {
        "ttft_ms": [62.0 * concurrency**0.6 * chance.lognormvariate(0, 0.22) for _ in range(64)],
        "tpot_ms": [per_token * chance.lognormvariate(0, 0.18) for _ in range(64)],
        "request_ms": [128 * per_token * chance.lognormvariate(0, 0.35) for _ in range(64)],
    }


def _manifest(notes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "hardware": {"cpu": "Sample CPU 9000", "num_cores": 2, "memory_bytes": 25_769_803_776, "simd": "avx2"},
        "versions": {"understudy": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numba": "0.68.1"},
        "commit": "0000000000000000000000000000000000000000",
        "dirty": False,
        "seeds": {"requests": 17, "order": 3},
        "prompts": {"source": "own", "sha256": "0" * 64, "num": 64},
        "settings": {"command": "understudy bench --json out.json --html out.html", "max_tokens": 128, "repeats": 5},
        "started": "2000-01-01T00:00:00Z",
        "duration_s": 1260.0,
        "model": {"name": "Sample-135M-Instruct", "parameters": 134_515_008},
        "notes": list(notes),
    }

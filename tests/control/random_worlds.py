"""Worlds drawn by lot, hostile ones among them."""

from __future__ import annotations

import random

from tests.control.worlds import Class, Factor, World, always, slowly, suddenly


def honest(rate: float, rng: random.Random) -> float:
    """States what is true."""
    return rate


def boasts(rate: float, rng: random.Random) -> float:
    """Is always sure."""
    return 0.99


def is_modest(rate: float, rng: random.Random) -> float:
    """Is never sure."""
    return 0.05


def babbles(rate: float, rng: random.Random) -> float:
    """States anything."""
    return rng.random()


def contradicts(rate: float, rng: random.Random) -> float:
    """The better, the less sure."""
    return 1.0 - rate


def random_world(seed: int, *, num_cycles: int = 1200) -> World:
    """Any world: about one in four has nothing hostile about it."""
    rng = random.Random(seed)
    concurrency = rng.choice((1, 1, 2, 3, 4, 8, 16))
    num_classes = rng.randint(1, 3)
    num_words = rng.choice((20, 60, 200))
    plain_s = rng.choice((0.002, 0.02, 0.1, 0.4))
    at = rng.randint(100, num_cycles - 300)
    return World(
        tuple(
            Class(
                name,
                _acceptance(rng, num_cycles),
                decay=rng.choice((1.0, 1.0, 0.9, 0.6)),
                states=rng.choice((honest, honest, boasts, is_modest, babbles, contradicts)),
                temperature=rng.choice((0.0, 0.0, 0.7, 1.2)),
                num_words=num_words,
            )
            for name in ("code", "chat", "math")[:num_classes]
        ),
        seed=seed,
        num_texts=max(2, num_cycles * concurrency // num_words),
        concurrency=concurrency,
        plain_s=plain_s,
        row_cost=rng.choice((0.0, 0.002, 0.02, 0.1, 0.25, 0.5)),
        padding=rng.choice((1, 1, 4)),
        drift=rng.choice((always(1.0), slowly(1.0, 1.6, over=num_cycles), suddenly(1.0, 2.0, at=at, until=at + 200))),
        drafted_factor=rng.choice((always(1.0), always(1.0), suddenly(1.0, 2.0, at=at), always(1.5))),
        noise=rng.choice((0.0, 0.05, 0.2)),
        hiccups=rng.choice((0.0, 0.0, 0.01)),
        asking_s=_asking(rng, plain_s, at),
        draft_cost=rng.choice((None, None, None, 0.02, 0.1, 0.3)),
        slow_draft=rng.choice((always(1.0), always(1.0), suddenly(1.0, 5.0, at=at))),
        believed=_beliefs(rng),
    )


def _acceptance(rng: random.Random, num_cycles: int) -> Factor:
    first, then = rng.uniform(0.02, 0.98), rng.uniform(0.02, 0.98)
    at = rng.randint(50, num_cycles)
    return rng.choice(
        (
            always(first),
            slowly(first, then, over=num_cycles),
            suddenly(max(first, 0.8), 0.02, at=at),
            suddenly(0.02, 0.9, at=at, until=at + 300),
            lambda cycle: 0.95 if cycle // 60 % 2 else 0.02,
        )
    )


def _asking(rng: random.Random, plain_s: float, at: int) -> Factor:
    share = rng.choice((0.0, 0.001, 0.01, 0.05))
    slow = rng.choice((share, share, 0.3, 2.0))
    return suddenly(share * plain_s, slow * plain_s, at=at)


def _beliefs(rng: random.Random) -> Factor:
    """How wrong the cost model is at first, by rows."""
    low, high = rng.choice(((1.0, 1.0), (1.0, 1.0), (1.0, 0.5), (1.0, 2.0), (0.6, 0.6), (1.5, 1.5), (1.4, 0.8)))
    return lambda rows: low if rows <= 1 else low + (high - low) * min(1.0, rows / 16)

"""What deciding costs: microseconds per step in which every request offers a draft, beside the twin in plain Python.

    python benchmarks/deciding.py [--steps 2000] [--seed 0]

A step's deciding begins with one merged draft per request, its class, temperature, context and room, and ends with the
nodes to verify and the reason. Making the offers out of these is counted. Drafts are made just before, as drafters
make them, and no two are alike. What the twin decides is compared. Requests have mixed classes, temperatures and
drafters, of which some is known.

Where the target runs on this processor, its pass leaves nothing of the last step in the caches. "Caches wiped" is the
same after 64 MiB were read, the worst that a step can find.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.control import reference

from understudy.control.classes import INFERRED
from understudy.control.cost import CostModel, Load
from understudy.control.policy import Decision, StatedOffers, decide, prepare
from understudy.control.stats import AcceptanceStats
from understudy.core.draft import ROOT, Draft

Answer = TypeVar("Answer")

NODES = {1: 32, 4: 12, 16: 4, 64: 4}
"""Requests in a step -> nodes that each offers: the more share a step, the fewer each may draft."""
DRAFTERS = ("ngram", "suffix", "lookahead", "forced")
CERTAIN = frozenset({"forced"})
MAX_ROWS = 256
WEIGHTS_BYTES = 1 << 26
RARE = 8
"""Every so manyth step is decided by the twin, and another one with wiped caches."""
PROFILED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 320)
COST = CostModel({rows: 0.02 + 0.0002 * rows for rows in PROFILED_ROWS}, per_key_s=1e-8, per_read_s=1e-9)


@dataclass(frozen=True)
class Wanted:
    """What deciding is given of one request."""

    draft: Draft
    group: int
    context: int
    room_s: float
    forced: bool = False


def random_draft(choose: random.Random, num_nodes: int) -> Draft:
    """A tree that mostly goes on where it ended."""
    parents = [node - 1 if choose.random() < 0.7 else choose.randint(ROOT, node - 1) for node in range(num_nodes)]
    confidence = [choose.random() ** 0.5 for _ in parents]
    sources = choose.choices(DRAFTERS, k=num_nodes)
    return Draft(tuple(range(num_nodes)), tuple(parents), tuple(confidence), tuple(sources))


def random_step(choose: random.Random, stats: AcceptanceStats, num_requests: int) -> list[Wanted]:
    """One step of so many requests."""
    return [
        Wanted(
            random_draft(choose, NODES[num_requests]),
            stats.group(choose.choice(INFERRED), choose.choice((0.0, 0.7, 1.0))),
            choose.randint(10, 4000),
            choose.uniform(0.005, 0.05),
        )
        for _ in range(num_requests)
    ]


def offers_of(step: Sequence[Wanted]) -> StatedOffers:
    """As the engine makes them."""
    return StatedOffers(
        drafts=[wanted.draft for wanted in step],
        groups=[wanted.group for wanted in step],
        contexts=[wanted.context for wanted in step],
        rooms_s=[wanted.room_s for wanted in step],
        forced=[wanted.forced for wanted in step],
    )


def base_of(step: Sequence[Wanted]) -> Load:
    """The pass without drafts."""
    return Load.of((1, wanted.context) for wanted in step)


def learned_stats(choose: random.Random) -> AcceptanceStats:
    """Statistics that have seen some traffic, most of it right."""
    stats = AcceptanceStats(certain=CERTAIN)
    for _ in range(3000):
        draft = random_draft(choose, 4)
        words = [token if choose.random() < 0.8 else 99 for token in draft.tokens]
        stats.observe(choose.choice(INFERRED), draft, words, temperature=choose.choice((0.0, 0.7, 1.0)))
    return stats


@dataclass
class Timed:
    """Microseconds of every step, by side."""

    compiled: list[float]
    cold: list[float]
    twin: list[float]

    def step(self, step: Sequence[Wanted], stats: AcceptanceStats, *, is_cold: bool) -> Decision:
        """Decide one step."""
        base, side = base_of(step), self.cold if is_cold else self.compiled
        return timed(side, lambda: decide(offers_of(step), base, COST, stats, max_rows=MAX_ROWS))

    def twin_step(self, step: Sequence[Wanted], rates: reference.Rates) -> list[list[int]]:
        """Decide one step slowly."""
        offers, base = offers_of(step), base_of(step)
        decide_slowly = partial(reference.decide, offers, base, COST, rates, certain=CERTAIN, max_rows=MAX_ROWS)
        return timed(self.twin, decide_slowly)[0]


def timed(microseconds: list[float], call: Callable[[], Answer]) -> Answer:
    """Call, and note how long that took."""
    started_ns = time.perf_counter_ns()
    answer = call()
    microseconds.append((time.perf_counter_ns() - started_ns) / 1000)
    return answer


def measure(num_requests: int, num_steps: int, seed: int) -> list[str]:
    """One line of the table."""
    choose = random.Random(seed)
    stats = learned_stats(choose)
    rates = reference.rates_by_group(stats)
    sides = Timed([], [], [])
    weights = np.ones(WEIGHTS_BYTES // 8)
    num_bought = 0
    for number in range(num_steps):
        step = random_step(choose, stats, num_requests)
        nodes = sides.step(step, stats, is_cold=False).nodes
        num_bought += sum(len(line) for line in nodes)
        if number % RARE == 0:
            assert sides.twin_step(step, rates) == nodes, "both decide alike"
            step = random_step(choose, stats, num_requests)
            weights.sum()  # as a pass of the target does
            sides.step(step, stats, is_cold=True)
    columns = [
        f"{statistics.median(side):.0f} ({statistics.quantiles(side, n=20)[-1]:.0f})"
        for side in (sides.compiled, sides.cold, sides.twin)
    ]
    return [str(num_requests), str(NODES[num_requests]), f"{num_bought / num_steps:.1f}", *columns]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare()
    table = Table("requests", "nodes of each", "bought", "compiled", "caches wiped", "plain Python")
    for num_requests in NODES:
        table.add_row(*measure(num_requests, arguments.steps, arguments.seed))
    console = Console()
    console.print("Microseconds per step, median (95th percentile)")
    console.print(table)


if __name__ == "__main__":
    main()

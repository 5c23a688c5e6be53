"""Drawing words on a GPU: microseconds of one draw in a graph, by rows and by how they are drawn.

    PYTHONPATH=src python benchmarks/gpu_sample.py [--vocabulary 151936] [--json FILE]

A graph holds many draws, one after the other, and is replayed; its time is divided by their number. The logits stay
where they are, as they would after an output layer: in the GPU's cache, as far as they fit. `read` is the time that
torch takes for the largest of each row, alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from understudy.kernels.cuda_sample import INTS_PER_ROW, DrawnRows, DrawScratch, draw

ROWS = (1, 8, 32, 512)
NUM_DRAWS = 20
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Way:
    """How all rows of a measurement are drawn."""

    name: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0


WAYS = (
    Way("greedy", 0.0),
    Way("temperature 1", 1.0),
    Way("top-p 0.9", 1.0, top_p=0.9),
    Way("top-k 20, top-p 0.8", 0.7, top_p=0.8, top_k=20),
)


def microseconds(work: Callable[[], object], *, repeats: int = 25) -> float:
    """The median over replays of a graph of many times the work, for one of them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_DRAWS):
            work()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000 / NUM_DRAWS)
    return sorted(found)[repeats // 2]


def like_a_model(num_rows: int, vocabulary: int) -> Tensor:
    """Logits with a few likely words and a broad rest: half of a row's weight lies on its first few."""
    logits = 2.5 * torch.randn(num_rows, vocabulary, device=DEVICE)
    likely = torch.randint(vocabulary, (num_rows, 30), device=DEVICE)
    return logits.scatter_add(1, likely, 4 + 4 * torch.rand(num_rows, 30, device=DEVICE))


def measured(way: Way, logits: Tensor) -> float:
    """The time of one draw of all rows."""
    num_rows, vocabulary = logits.shape
    how = DrawnRows.within(torch.zeros(INTS_PER_ROW * num_rows, dtype=torch.int32, device=DEVICE))
    how.temperatures.fill_(way.temperature)
    how.top_ps.fill_(way.top_p)
    how.top_ks.fill_(way.top_k)
    how.positions.copy_(torch.arange(num_rows))
    scratch = DrawScratch.new(num_rows, num_sayable=vocabulary, device=DEVICE)
    words = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
    sureness = torch.empty(num_rows, dtype=torch.float32, device=DEVICE)
    rivals = torch.empty_like(words)
    return microseconds(lambda: draw(logits, how, words=words, sureness=sureness, rivals=rivals, scratch=scratch))


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=200, highlight=False)
    console.print(f"{torch.cuda.get_device_name()}; vocabulary {arguments.vocabulary}; microseconds of one draw")
    console.print("| rows | " + " | ".join(way.name for way in WAYS) + " | read |")
    console.print("|---" * (len(WAYS) + 2) + "|")
    record = {}
    for num_rows in ROWS:
        logits = like_a_model(num_rows, arguments.vocabulary)
        found = record[num_rows] = {way.name: measured(way, logits) for way in WAYS}
        found["read"] = microseconds(lambda given=logits: given.amax(dim=1))
        console.print(f"| {num_rows} | " + " | ".join(f"{time:.1f}" for time in found.values()) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

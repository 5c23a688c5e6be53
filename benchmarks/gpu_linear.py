"""Linear layers on a GPU: bytes of weights per second beside cuBLAS, for each weight of two models and each row count.

    PYTHONPATH=src python benchmarks/gpu_linear.py [--json FILE]

Weights are rotated so that none is in the GPU's cache when it is read; launches are replayed as a graph. With each
weight it is checked that rows are the same bits for every number of rows and every tile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kernels.cuda_plans import Tile

SHAPES = {
    "8B": {
        "qkv": (6144, 4096), "attention out": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336),
        "output": (49152, 4096),
    },
    "135M": {
        "qkv": (960, 576), "attention out": (576, 576), "gate-up": (3072, 576), "down": (576, 1536),
        "output": (49152, 576),
    },
}  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_BYTES = 400_000_000
"""Weights that one measurement reads: several times the GPU's cache."""
MOST_COPIES = 100
TILES = (
    *(Tile(64, 16, 32, 4, 3), Tile(64, 32, 64, 4, 3), Tile(64, 64, 64, 4, 3), Tile(128, 64, 64, 8, 3)),
    *(Tile(64, 16, 32, 4, 3, by_box=True), Tile(128, 128, 64, 4, 3, by_box=True)),
)


def seconds(work: Callable[[], object], *, repeats: int = 9) -> float:
    """The median of replays of a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1000)
    return sorted(found)[repeats // 2]


def is_exact(linear: Linear | GatedLinear, num_inputs: int) -> bool:
    """Whether 1 to 256 rows and some more, and every tile, give the bits that 512 rows give."""
    x = torch.randn(512, num_inputs, device="cuda", dtype=torch.bfloat16)
    whole = linear(x)
    rows_first = whole if whole.dim() == 2 else whole.transpose(0, 1)

    def same(found: Tensor) -> bool:
        found = found if found.dim() == 2 else found.transpose(0, 1)
        return torch.equal(found, rows_first[: found.shape[0]])

    return all(same(linear(x[:count].contiguous())) for count in (*range(1, 257), 300, 384)) and all(
        same(linear(x[:count].contiguous(), tile=tile)) for tile in TILES for count in (1, 5, 100, 256)
    )


def measured(model: str, name: str) -> dict[str, Any]:
    """One weight with every row count: terabytes per second, ours and cuBLAS's, and whether rows are exact."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_outputs, num_inputs = SHAPES[model][name]
    num_bytes = 2 * num_outputs * num_inputs
    copies = min(MOST_COPIES, max(2, -(-COLD_BYTES // num_bytes)))
    weights = [torch.randn(num_outputs, num_inputs, device=device, dtype=dtype) * 0.02 for _ in range(copies)]
    layers: list[Linear | GatedLinear] = [
        GatedLinear.pack(*weight.chunk(2), device=device, dtype=dtype)
        if name == "gate-up"
        else Linear.pack(weight, device=device, dtype=dtype)
        for weight in weights
    ]

    def both(x: Tensor) -> tuple[float, float]:
        ours = seconds(lambda: [layer(x) for layer in layers])
        theirs = seconds(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])
        return copies * num_bytes / ours / 1e12, copies * num_bytes / theirs / 1e12

    speeds = [both(torch.randn(count, num_inputs, device=device, dtype=dtype)) for count in ROWS]
    return {"rows": ROWS, "tb_per_s": speeds, "exact": is_exact(layers[0], num_inputs)}


def main() -> None:
    """Measure all weights and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    console = Console(width=200, highlight=False)
    console.print(f"{torch.cuda.get_device_name()}; TB/s of weights, cuBLAS in brackets")
    console.print("| model, weight | " + " | ".join(f"{count} rows" for count in ROWS) + " | exact |")
    console.print("|---" * (len(ROWS) + 2) + "|")
    record = {}
    for model, shapes in SHAPES.items():
        for name in shapes:
            found = record[f"{model} {name}"] = measured(model, name)
            line = " | ".join(f"{ours:.2f} ({theirs:.2f})" for ours, theirs in found["tb_per_s"])
            console.print(f"| {model} {name} | {line} | {'yes' if found['exact'] else 'NO'} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

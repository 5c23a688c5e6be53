"""Plain decoding on a GPU with random weights of a model's shape: time of a step, tokens and bytes per second.

    PYTHONPATH=src python benchmarks/gpu_forward.py [--shape 8b] [--streams 1,8,32] [--context 256] [--fast]

One step computes one row of each stream and is replayed as a graph. Bytes are those that a step must read: all weights
once (of the embedding only the rows) and the keys and values of all streams. --fast has cuBLAS compute the linear
layers, which promises nothing about rows: what exactness costs is the difference.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from understudy.core.draft import EMPTY
from understudy.kernels.cuda import CudaKernels
from understudy.kernels.cuda_linear import GatedLinear, Linear
from understudy.kv.pool import BlockPool
from understudy.kv.sequence import SequenceCache
from understudy.models.config import ModelConfig
from understudy.models.decoder import Decoder
from understudy.runtime.inputs import Work, build_rows

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim, vocabulary
    "135m": (576, 1536, 30, 9, 3, 64, 49152),
    "8b": (4096, 14336, 32, 32, 8, 128, 49152),
}


def random_model(shape: str) -> Decoder:
    """A Llama of this shape on the GPU, with weights that keep its numbers in range."""
    hidden, inner, num_layers, heads, kv_heads, dim, vocab = SHAPES[shape]
    config = ModelConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=num_layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_positions=8192, rms_norm_eps=1e-5, rope_theta=1e5,
    )  # fmt: skip
    torch.manual_seed(0)

    def drawn(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5

    tensors = {"model.embed_tokens.weight": drawn(vocab, hidden), "lm_head.weight": drawn(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
        for name, outputs, inputs in (
            ("self_attn.q_proj", heads * dim, hidden), ("self_attn.k_proj", kv_heads * dim, hidden),
            ("self_attn.v_proj", kv_heads * dim, hidden), ("self_attn.o_proj", hidden, heads * dim),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            tensors[f"{prefix}{name}.weight"] = drawn(outputs, inputs)
    return Decoder(config, tensors, CudaKernels(), weights="bf16")


def step_seconds(decoder: Decoder, *, num_streams: int, num_rows: int, context: int) -> tuple[float, float]:
    """The median seconds of a step as a graph, and of one launched kernel by kernel."""
    blocks_each = -(-(context + num_rows) // 32)
    pool = BlockPool(num_streams * blocks_each)
    cache = decoder.new_cache(num_streams * blocks_each)
    works = []
    for _ in range(num_streams):
        sequence = SequenceCache(pool, 32, None, "")
        sequence.reserve(context + num_rows)
        sequence.length = context
        works.append(Work(sequence, list(range(1, num_rows + 1)), EMPTY, wants_logits=True, scored=range(num_rows - 1)))
    config = decoder.config
    rows = CudaKernels().place(build_rows(works, heads_per_kv_head=config.num_heads // config.num_kv_heads))
    decoder.compute(rows, cache)
    torch.cuda.synchronize()
    launched = []
    for _ in range(5):
        started = time.perf_counter()
        decoder.compute(rows, cache)
        torch.cuda.synchronize()
        launched.append(time.perf_counter() - started)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.compute(rows, cache)
    replayed = []
    for _ in range(21):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        replayed.append(start.elapsed_time(end) / 1000)
    return sorted(replayed)[10], sorted(launched)[2]


def use_cublas() -> None:
    """Let cuBLAS compute linear layers; the rest stays as it is."""

    def linear(self: Linear, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[: self.num_outputs].to(x.dtype)
        return functional.linear(x, self.weight[: self.num_outputs, : self.num_inputs], bias).float()[None]

    def gated(self: GatedLinear, x: Tensor) -> Tensor:
        both = functional.linear(x, self.stacked.weight[:, : self.stacked.num_inputs])
        gate, up = both.chunk(2, dim=1)
        return functional.silu(gate[:, : self.num_features]) * up[:, : self.num_features]

    Linear.__call__ = linear  # type: ignore[method-assign]
    GatedLinear.__call__ = gated  # type: ignore[method-assign]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rows", default="1", help="rows of each stream")
    parser.add_argument("--context", default="256")
    parser.add_argument("--fast", action="store_true", help="cuBLAS for the linear layers")
    arguments = parser.parse_args()
    if arguments.fast:
        use_cublas()
    decoder = random_model(arguments.shape)
    config = decoder.config
    num_weight_bytes = decoder.num_bytes - 2 * config.vocab_size * config.hidden_size
    num_key_bytes = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    console = Console(width=200, highlight=False)
    console.print(
        f"{torch.cuda.get_device_name()}, {arguments.shape}: {num_weight_bytes / 1e9:.2f} GB of weights a step"
    )
    console.print("| streams | rows each | context | step, ms | rows/s | TB/s | without a graph, ms |")
    console.print("|---" * 7 + "|")
    for context in map(int, arguments.context.split(",")):
        for num_rows in map(int, arguments.rows.split(",")):
            for num_streams in map(int, arguments.streams.split(",")):
                step, launched = step_seconds(decoder, num_streams=num_streams, num_rows=num_rows, context=context)
                num_bytes = num_weight_bytes + num_streams * context * num_key_bytes
                speeds = f"{step * 1e3:.3f} | {num_streams * num_rows / step:,.0f} | {num_bytes / step / 1e12:.2f}"
                console.print(f"| {num_streams} | {num_rows} | {context} | {speeds} | {launched * 1e3:.2f} |")


if __name__ == "__main__":
    main()

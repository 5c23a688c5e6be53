"""What the server costs: tokens per second through HTTP beside the engine alone, and CPU per event.

    python benchmarks/serve_overhead.py [--streams 1,16] [--rounds 4] [--max-tokens 96]

Both sides answer the same prompts in turn, round after round, in one run. The engine alone is an `LLM` in
this process; the server is `understudy serve`; the client is a process of its own
that reads bytes and counts events, and whose CPU time is stated. CPU times are those that the kernel counts. The same
prompts are also answered by two words through the server, which tells a request's own cost from its events'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.live.client import connect, request_bytes
from tests.live.serving import serve

from understudy.bench.prompts import own_prompts
from understudy.core.request import SamplingParams
from understudy.llm import LLM

CHAT = "/v1/completions"
_FEW_TOKENS = 2


@dataclass
class Round:
    """One side, one number of streams, one round."""

    tokens: int
    seconds: float
    events: int = 0
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Words that arrived by the time they took."""
        return self.tokens / self.seconds


def prompts(count: int) -> list[str]:
    """Texts of every class in turn."""
    own = own_prompts()
    texts = [prompt.text or prompt.messages[-1]["content"] if not prompt.turns else prompt.turns[0] for prompt in own]
    return [texts[(number * 13) % len(texts)][:600] for number in range(count)]


def alone(llm: LLM, texts: list[str], max_tokens: int, at: int) -> Round:
    """Let an engine in this process answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    requests = [llm.request(text, sampling, tenant=f"{at}-{number}") for number, text in enumerate(texts)]
    started_s = time.perf_counter()
    results = llm.run(requests)
    return Round(sum(len(result.token_ids) for result in results), time.perf_counter() - started_s)


async def _read(port: int, text: str, max_tokens: int, salt: str) -> int:
    body = {
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "seed": 0,
        "cache_salt": salt,
    }
    async with connect(port) as connection:
        connection.writer.write(request_bytes("POST", CHAT, body))
        await connection.read_head()
        assert connection.status == 200, connection.status
        return sum([piece.count(b"data: ") async for piece in connection.pieces()])


def client(port: int, pipe: Connection) -> None:
    """The other process: reads streams, and says how many events came and what that cost it."""
    while True:
        work: Any = pipe.recv()
        if work is None:
            return
        texts, max_tokens, at = work
        started = time.process_time()

        async def run(texts: list[str] = texts, max_tokens: int = max_tokens, at: int = at) -> list[int]:
            return await asyncio.gather(*(_read(port, text, max_tokens, f"{at}-{i}") for i, text in enumerate(texts)))

        started_s = time.perf_counter()
        counts = asyncio.run(run())
        pipe.send((sum(counts), time.perf_counter() - started_s, time.process_time() - started))


def _cpu_s(process: psutil.Process) -> float:
    """Seconds on a core so far, of all its threads: the scheduler counts nanoseconds, the usual times only ticks."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measure(streams: list[int], num_rounds: int, max_tokens: int) -> dict[int, dict[str, list[Round]]]:
    """Run both sides in turn."""
    llm = LLM()
    found: dict[int, dict[str, list[Round]]] = {count: {"alone": [], "served": [], "short": []} for count in streams}
    context = multiprocessing.get_context("spawn")
    # an idle server must not compute beside the engine alone, nor be plain where that one drafts
    with serve("--shadow-share", "0", "--control-share", "0") as server:
        ours, theirs = context.Pipe()
        reader = context.Process(target=client, args=(server.port, theirs))
        reader.start()
        http = psutil.Process(server.process.pid)
        try:
            for number in range(-1, num_rounds):  # the first one is for warming up
                for count in streams:
                    texts = prompts(count)
                    at = (number + 1) * 1000 + count
                    for side in ("alone", "served", "short") if number % 2 else ("short", "served", "alone"):
                        if side == "alone":
                            result = alone(llm, texts, max_tokens, at)
                        else:
                            num_tokens = max_tokens if side == "served" else _FEW_TOKENS
                            before = _cpu_s(http)
                            ours.send((texts, num_tokens, at + (500 if side == "short" else 0)))
                            num_events, seconds, cpu_s = ours.recv()
                            result = Round(count * num_tokens, seconds, num_events, _cpu_s(http) - before, cpu_s)
                        if number >= 0:
                            found[count][side].append(result)
        finally:
            ours.send(None)
            reader.join()
    return found


def report(found: dict[int, dict[str, list[Round]]]) -> dict[str, Any]:
    """Sum up."""
    lines: dict[str, Any] = {}
    for count, sides in found.items():
        alone_rate = [entry.tokens_per_s for entry in sides["alone"]]
        served_rate = [entry.tokens_per_s for entry in sides["served"]]
        ratios = [served / plain for served, plain in zip(served_rate, alone_rate, strict=True)]
        events, few_events = (sum(entry.events for entry in sides[side]) for side in ("served", "short"))
        cpu_ms, few_cpu_ms = (1000 * sum(entry.server_cpu_s for entry in sides[side]) for side in ("served", "short"))
        event_ms = (cpu_ms - few_cpu_ms) / (events - few_events)
        lines[str(count)] = {
            "alone_tokens_per_s": round(statistics.median(alone_rate), 1),
            "served_tokens_per_s": round(statistics.median(served_rate), 1),
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_all": round(sum(served_rate) / sum(alone_rate), 4),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "server_cpu_ms_per_event": round(cpu_ms / events, 4),
            "of_that_per_event_alone": round(event_ms, 4),
            "and_per_request": round((few_cpu_ms - event_ms * few_events) / (count * len(sides["short"])), 2),
            "client_cpu_ms_per_event": round(1000 * sum(e.client_cpu_s for e in sides["served"]) / events, 4),
            "events": events,
        }
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    streams = [int(part) for part in options.streams.split(",")]
    found = measure(streams, options.rounds, options.max_tokens)
    sys.stdout.write(json.dumps(report(found), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The engine on a GPU: speed, and whether every way to the same words leads to the same words.

    PYTHONPATH=src python benchmarks/gpu_engine.py speed [--widen 8b] [--twin 0.1] [--streams 1,8,32] [--json OUT]
    PYTHONPATH=src python benchmarks/gpu_engine.py speed [--widen 8b] --draft FOLDER --depths 7 [--streams 1,8]
    PYTHONPATH=src python benchmarks/gpu_engine.py exact [--widen 8b] [--twin 0.1] [--json OUT]
    PYTHONPATH=src python benchmarks/gpu_engine.py cycle [--widen 8b] [--json OUT]

Several of them, with commas between, share one loading.

speed   tokens/s with so many texts at once, plain and with a draft model (the model itself with noise) or a trained
        draft, by class; all texts of a measurement begin together, and reading their prompts is in the time
exact   drafters x streams x prefix cache x temperatures against plain decoding alone: all token sequences must be equal
cycle   milliseconds of a pass against rows and streams
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from understudy.assembly import Target, build_engine, built_in_drafters, load_target, make_drafter
from understudy.bench.prompts import own_prompts
from understudy.config import EngineConfig
from understudy.core.events import Cycle, Decided, Event
from understudy.core.request import Request, SamplingParams, Speculation
from understudy.drafters.base import Drafter
from understudy.drafters.tree import Shape
from understudy.engine.engine import Engine
from understudy.models.heads.files import TrainedHead, load_head
from understudy.models.heads.widen_head import widen_head
from understudy.text.chat import render
from understudy.upkeep import calm_process


def tell(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass
class Run:
    """What answering some prompts came to."""

    tokens: list[tuple[int, ...]]
    seconds: float
    cycles: list[Cycle]

    @property
    def tokens_per_s(self) -> float:
        """Words of all texts, over the time from the first request to the last word."""
        return sum(map(len, self.tokens)) / self.seconds

    def facts(self) -> dict[str, Any]:
        """Where the time of a cycle went, in milliseconds, and what it said."""
        told = [cycle for cycle in self.cycles if not cycle.num_prompt_rows] or self.cycles
        count = len(told)
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "tokens_per_cycle": round(sum(c.num_emitted for c in told) / sum(c.num_sequences for c in told), 3),
            "rows_per_cycle": round(sum(c.num_rows for c in told) / count, 2),
            "draft_ms": round(1e3 * sum(c.draft_s for c in told) / count, 3),
            "forward_ms": round(1e3 * sum(c.forward_s for c in told) / count, 3),
            "host_ms": round(1e3 * sum(c.sample_s for c in told) / count, 3),
            "cycle_ms": round(1e3 * self.seconds / len(self.cycles), 3),
        }

    def reasons(self) -> dict[str, int]:
        """Why cycles drafted what they did, numbers left out, the commonest first."""
        return dict(Counter(re.sub(r"[\d.]+", "N", cycle.reason) for cycle in self.cycles).most_common(4))


def texts_of(name: str, file: Path | None) -> list[str]:
    """The texts of a class: our own, or those of a file, a list of {"class", "text"}."""
    if file is not None:
        return [line["text"] for line in json.loads(file.read_text()) if line["class"] == name]
    prompts = [prompt for prompt in own_prompts() if prompt.prompt_class == name]
    return [p.messages[-1]["content"] if p.messages else (p.turns or [p.text])[0] for p in prompts]


def prompts_of(target: Target, classes: Sequence[str], file: Path | None) -> list[tuple[int, ...]]:
    """The prompts of some classes, in turns, as token ids."""
    lists = []
    for name in classes:
        lines = []
        for content in texts_of(name, file):
            text = render(
                target.tokenizer.chat_template,
                [{"role": "user", "content": content}],
                bos_token=target.tokenizer.bos_token,
                eos_token=target.tokenizer.eos_token,
            )
            lines.append(tuple(target.tokenizer.encode(text, add_special=False)))
        lists.append(lines)
    return [line for group in itertools.zip_longest(*lists) for line in group if line is not None]


_DRAFT_BLOCKS = 2048


class Engines:
    """Engines over one target, built once for each setting; a cycle's figures are kept."""

    def __init__(
        self, target: Target, trained: TrainedHead | None = None, *, rivals: bool = True, **settings: Any
    ) -> None:
        self._target = target
        self._trained = trained
        self._shape = Shape(num_children=2 if rivals else 1)
        self._settings = settings
        self.ignore_eos = True
        self._built: dict[Any, Engine] = {}
        self._cycles: list[Cycle] = []

    def _hear(self, event: Event) -> None:
        if isinstance(event, Cycle):
            self._cycles.append(event)
        elif isinstance(event, Decided):
            tell(f"{event.what}: {event.subject} {event.outcome}: {event.reason}")

    def engine(self, drafters: tuple[str, ...], *, prefix_cache: bool = False, user: str = "") -> Engine:
        """The engine with these drafters; each user has one of its own."""
        key = drafters, prefix_cache, user
        if key not in self._built:
            config = EngineConfig(prefix_cache=prefix_cache, **self._settings)
            named = [self._drafter(name) for name in drafters]
            drafters_of = [*built_in_drafters(), *named] if named else []
            self._built[key] = build_engine(self._target, config, drafters=drafters_of, emit=self._hear)
        return self._built[key]

    def _drafter(self, name: str) -> Drafter:
        """One drafter; a draft has room for as many tokens as the largest setting measured here needs."""
        if self._trained is None or name != self._trained.spec.kind:
            return make_drafter(name, self._target, num_blocks=_DRAFT_BLOCKS)
        from understudy.drafters.trained_cuda import make_trained_drafter_on_device

        room = SimpleNamespace(num_blocks=_DRAFT_BLOCKS)
        drafter = make_trained_drafter_on_device(self._trained, room, self._target.decoder, shape=self._shape)
        guess_ms = {texts: round(1e3 * seconds, 4) for texts, seconds in drafter.cost.rows_s.items()}
        tell(f"{name}: milliseconds of a guess by texts: {guess_ms}")
        return drafter

    def answer(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, ...]],
        *,
        streams: int,
        max_tokens: int,
        temperature: float = 0.0,
        speculation: Speculation | None = None,
    ) -> Run:
        """Answer all prompts, so many at once; the next begins when one has ended."""
        self._cycles = []
        calm_process()
        said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        waiting = list(enumerate(prompts))[::-1]
        torch.cuda.synchronize()
        started = time.perf_counter()
        while waiting or engine.has_work:
            while waiting and engine.num_live_requests < streams:
                number, ids = waiting.pop()
                sampling = SamplingParams(
                    temperature=temperature, max_tokens=max_tokens, seed=number, ignore_eos=self.ignore_eos
                )
                engine.submit(
                    Request(
                        request_id=str(number),
                        prompt_ids=ids,
                        sampling=sampling,
                        speculation=speculation or Speculation(),
                    )
                )
            for output in engine.step():
                said[output.request_id].extend(output.token_ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return Run([tuple(tokens) for tokens in said.values()], seconds, self._cycles)


def make_ready(engine: Engine) -> None:
    """Do what a server does before anybody asks."""
    started, free_bytes = time.perf_counter(), torch.cuda.mem_get_info()[0]
    num_passes = sum(1 for _ in iter(engine.prepare, False))
    torch.cuda.synchronize()
    took_s, taken = time.perf_counter() - started, free_bytes - torch.cuda.mem_get_info()[0]
    tell(f"{num_passes} passes made ready in {took_s:.1f} s, {taken / 2**20:.0f} MiB")


def speed(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second, plain and drafted, by class and streams."""
    streams = [int(part) for part in options.streams.split(",")]
    engines = Engines(
        target,
        options.trained,
        rivals=not options.no_rivals,
        kv_tokens=options.kv_tokens,
        max_sequences=max(64, *streams),
        max_rows_per_step=options.rows_per_step or (2 * max(streams) if max(streams) > 256 else None),
    )
    engines.ignore_eos = not options.until_end
    arms: dict[str, tuple[Engine, Speculation]] = {
        "plain": (engines.engine(()), Speculation()),
    }
    names = ("model",) if options.twin is not None else (options.trained.spec.kind,) if options.trained else ()
    if names:
        drafted = (*options.beside.split(","), *names) if options.beside else names
        asked = {"off": Speculation(max_depth=0)}
        asked |= {
            f"depth {depth}": Speculation(forced=True, max_depth=int(depth), max_rows=options.rows)
            for depth in options.depths.split(",")
        }
        if not options.no_default:
            asked["default"] = Speculation()
        # what learns from answers must not have heard them in another arm
        arms |= {
            arm: (engines.engine(drafted, user=arm if options.beside else ""), wanted) for arm, wanted in asked.items()
        }
    for engine in {id(engine): engine for engine, _ in arms.values()}.values():
        make_ready(engine)
    rows = []
    for name, count in itertools.product(options.classes.split(","), streams):
        prompts = prompts_of(target, name.split("+"), options.prompts)
        size = max(count, options.num_prompts)
        if options.beside:  # nothing is asked twice, nor is what the graphs are captured with asked later
            groups = [prompts[size * i : size * (i + 1)] for i in range(options.repeats)]
            first, max_first_tokens = prompts[size * options.repeats :], options.max_tokens
            if len(first) < count:
                sys.exit(f"{len(prompts)} prompts of {name} are too few to ask none of them twice")
        else:
            groups = [[prompts[i % len(prompts)] for i in range(size)]] * options.repeats
            first, max_first_tokens = groups[0][:count], 24
        words: list[list[tuple[int, ...]]] = []
        for arm, (engine, speculation) in arms.items():
            if count > 64 and arm != "plain":
                continue
            engines.answer(engine, first, streams=count, max_tokens=max_first_tokens, speculation=speculation)
            runs = [
                engines.answer(engine, group, streams=count, max_tokens=options.max_tokens, speculation=speculation)
                for group in groups
            ]
            run = max(runs, key=lambda run: run.tokens_per_s)
            words = words or [one.tokens for one in runs]
            is_same = [one.tokens for one in runs] == words
            row = {"class": name, "streams": count, "arm": arm, **run.facts(), "identical": is_same}
            row["all_tokens_per_s"] = [round(one.tokens_per_s, 1) for one in runs]
            row["all_reasons"] = [one.reasons() for one in runs] if arm == "default" else []
            rows.append(row)
            tell(json.dumps(row))
    return rows


def exact(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way to the same words."""
    engines = Engines(
        target, options.trained, rivals=not options.no_rivals, kv_tokens=options.kv_tokens, max_sequences=64
    )
    prompts = prompts_of(target, options.classes.replace("+", ",").split(","), options.prompts)
    most = {1: 4, 8: 8} | {32: 32}  # prompts by streams
    streams = [int(part) for part in options.exact_streams.split(",")]
    prompts = [prompts[i % len(prompts)] for i in range(max(most[count] for count in streams))]
    rows = []
    drafters = [tuple(name for name in part.split("+") if name != "none") for part in options.drafters.split(",")]
    temperatures = [float(part) for part in options.temperatures.split(",")]
    known = {
        temperature: engines.answer(
            engines.engine(()), prompts, streams=1, max_tokens=options.max_tokens, temperature=temperature
        ).tokens
        for temperature in temperatures
    }
    for temperature, names, prefix, count in itertools.product(temperatures, drafters, (False, True), streams):
        engine = engines.engine(names, prefix_cache=prefix)
        speculation = Speculation(forced=bool(names), max_depth=4)
        run = engines.answer(
            engine,
            prompts[: most[count]],
            streams=count,
            max_tokens=options.max_tokens,
            temperature=temperature,
            speculation=speculation,
        )
        num_equal = sum(a == b for a, b in zip(run.tokens, known[temperature], strict=False))
        row = {
            "temperature": temperature,
            "drafters": "+".join(names) or "none",
            "prefix_cache": prefix,
            "streams": count,
            "equal": num_equal,
            "of": len(run.tokens),
            "tokens_per_cycle": run.facts()["tokens_per_cycle"],
        }
        rows.append(row)
        tell(json.dumps(row))
    tell(f"{sum(row['equal'] for row in rows)} of {sum(row['of'] for row in rows)} sequences are equal")
    return rows


def cycle(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a pass takes, by rows and streams."""
    from understudy.core.draft import EMPTY
    from understudy.kv.pool import BlockPool
    from understudy.kv.sequence import SequenceCache
    from understudy.runtime.inputs import Work
    from understudy.runtime.runner import Runner

    context = 256
    page = target.page_tokens
    num_blocks = 70 * (-(-(context + 256) // page))
    runner = Runner(target.decoder, num_blocks=num_blocks, page_tokens=page)
    rows = []
    for streams, each in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 5, 8, 16, 32, 64, 128, 256)):
        if streams * each > 256:
            continue
        pool = BlockPool(num_blocks)
        works = []
        for _ in range(streams):
            cache = SequenceCache(pool, page, None, "")
            cache.reserve(context + each)
            cache.length = context
            works.append(Work(cache, [7] * each, EMPTY, wants_logits=True, scored=range(each - 1)))
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            started = time.perf_counter()
            runner.launch(works)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        row = {"streams": streams, "rows_each": each, "rows": streams * each, "ms": round(1e3 * sorted(times)[2], 3)}
        rows.append(row)
        tell(json.dumps(row))
    return rows


def main() -> None:
    """Measure, print, and exit with 1 if any words differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="speed, exact, cycle, or several with commas between")
    parser.add_argument("--model")
    parser.add_argument("--widen")
    parser.add_argument("--twin", type=float)
    parser.add_argument("--draft", type=Path, help="the folder of a trained draft; it is widened with its target")
    parser.add_argument("--no-rivals", action="store_true", help="chains alone, of a trained draft")
    parser.add_argument(
        "--beside", default="", help="drafters beside the draft, of speed; nothing is asked twice then, they learn"
    )
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--classes", default="code,chat")
    parser.add_argument("--depths", default="4")
    parser.add_argument("--rows", type=int, default=32, help="drafted rows at most, where drafts are forced")
    parser.add_argument("--drafters", default="none,suffix,ngram,lookahead,model,suffix+model", help="of exact")
    parser.add_argument("--exact-streams", default="1,8,32")
    parser.add_argument("--temperatures", default="0,1", help="of exact")
    parser.add_argument("--prompts", type=Path, help="a JSON list of {class, text}; our own if none is given")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--rows-per-step", type=int, help="of prompts and answers computed at once, of speed")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument(
        "--until-end", action="store_true", help="answers end where the model ends them; else all have --max-tokens"
    )
    parser.add_argument("--no-default", action="store_true", help="leave the arm with the control plane out")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draft = None if options.twin is None else f"twin:{options.twin:g}"
    started = time.perf_counter()
    target = load_target(options.model, widen=options.widen, draft=draft)
    options.trained = None if options.draft is None else load_head(options.draft)
    if options.trained and options.widen:
        options.trained = widen_head(options.trained, target.decoder.config, device="cuda")
    took_s = time.perf_counter() - started
    tell(f"{target.name}, {target.weights}, self-test {target.is_row_invariant}, loaded in {took_s:.1f} s")
    measured = {"speed": speed, "exact": exact, "cycle": cycle}
    rows = [row for what in options.what.split(",") for row in measured[what](target, options)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row.get("identical") is False or row.get("equal", 0) != row.get("of", 0) for row in rows))


if __name__ == "__main__":
    main()

"""How fast, side by side: every ratio comes from runs that alternate on the same machine in the same minutes.

    python benchmarks/speed.py                                  our own prompts, all four parts
    python benchmarks/speed.py --data DIR --per-class 4         a folder of <class>/<file>.jsonl
    python benchmarks/speed.py --only classes --json out.json   one part, and the numbers for a machine to read

    transformers   the engine without any drafter against `transformers` generate: greedy, same prompts, same threads
    classes        the default settings against the engine without any drafter, by class of prompt
    off            drafters configured but switched off, against the engine without any drafter
    sampling       share of a step that goes into drawing the word, at temperature 1 with top-p 0.95

The embedded model on the CPU, in int8 unless --weights says otherwise (`transformers` in fp32), one request at a time,
each prompt with a tenant of its own, so that no history helps. By class, answers end where the model ends them: what
it would ramble behind its end repeats itself and would flatter speculation. The other parts compare a fixed number of
words. Ctrl-C ends the run and shows what was measured so far.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from collection import read_collection
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from understudy.assembly import Target, load_target
from understudy.bench.prompts import Prompt, load_prompts, own_prompts, prompt_ids
from understudy.cache import cache_folder
from understudy.core.events import Cycle, Event
from understudy.core.request import SamplingParams, Speculation, SpeculationCounts
from understudy.core.weights import WEIGHTS_ON
from understudy.errors import UnderstudyError
from understudy.llm import LLM
from understudy.models.embedded import FORMAT, GGUF_SHA256, NAME

PARTS = ("transformers", "classes", "off", "sampling")
INTERRUPTED = 130
console = Console()
problems = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, ready to be asked."""

    prompt_class: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """What one answer took."""

    words: tuple[int, ...]
    seconds: float
    """Of the whole request, the prompt's pass included."""
    steps: tuple[Cycle, ...] = ()
    """The steps after the prompt's; none for an engine that does not tell."""
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def step_s(self) -> float:
        """Seconds of all steps after the prompt's."""
        return sum(step.total_s for step in self.steps)


class Contender(Protocol):
    """Anything that answers."""

    name: str

    def answer(self, question: Question, num_tokens: int) -> Timing:
        """Answer with exactly this many words."""


class Ours:
    """An engine of ours with one way of asking it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        speculation: Speculation | None = None,
        ignore_eos: bool = True,
        **sampling: float,
    ) -> None:
        self.name = name
        self._engine = engine
        self._speculation = speculation
        self._ignore_eos = ignore_eos
        self._sampling = {"temperature": 0.0, "seed": 0, **sampling}

    def answer(self, question: Question, num_tokens: int) -> Timing:
        """Answer as a tenant that was never seen before."""
        llm, cycles = self._engine.llm, self._engine.cycles
        request = llm.request(
            question.ids,
            SamplingParams(max_tokens=num_tokens, ignore_eos=self._ignore_eos, **self._sampling),
            speculation=self._speculation,
            tenant=f"tenant-{next(self._engine.tenants)}",
            workload_class=question.prompt_class,
        )
        cycles.clear()
        started = time.perf_counter()
        (result,) = llm.run([request])
        seconds = time.perf_counter() - started
        steps = tuple(cycle for cycle in cycles if not cycle.num_prompt_rows)
        return Timing(tuple(result.token_ids), seconds, steps, result.completions[0].speculation)


class Engine:
    """A model with its engine, and the cycles of its latest answer."""

    def __init__(self, target: Target, *, kv_tokens: int, **settings: Any) -> None:
        self.cycles: list[Cycle] = []
        self.tenants = itertools.count()
        self.llm = LLM(target=target, emit=self._listen, kv_tokens=kv_tokens, **settings)

    def _listen(self, event: Event) -> None:
        if isinstance(event, Cycle):
            self.cycles.append(event)


class Transformers:
    """`transformers` on the files that our engine reads, fp32, with its key-value cache."""

    name = "transformers"

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = cache_folder() / "models" / f"{NAME}-{GGUF_SHA256[:12]}-{FORMAT}"
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, question: Question, num_tokens: int) -> Timing:
        """Answer greedily."""
        torch = self._torch
        prompt = torch.tensor([question.ids])
        started = time.perf_counter()
        with torch.inference_mode():
            text = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                use_cache=True,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        return Timing(tuple(text[0, len(question.ids) :].tolist()), seconds)


def warm_up(contenders: Iterable[Contender], question: Question) -> None:
    """Let each pay once for what only a first answer costs."""
    for contender in contenders:
        contender.answer(question, 4)


Rounds = list[tuple[Question, dict[str, Timing]]]
"""For each question, the timing of every contender by its name."""


def alternate(
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    num_tokens: int,
    *,
    into: Rounds,
    tick: Callable[[], None],
) -> None:
    """Ask every contender every question; who goes first rotates."""
    warm_up(contenders, questions[0])
    for number, question in enumerate(questions):
        turn = number % len(contenders)
        timings: dict[str, Timing] = {}
        for contender in (*contenders[turn:], *contenders[:turn]):
            timings[contender.name] = contender.answer(question, num_tokens)
            tick()
        into.append((question, timings))


def compare(rounds: Rounds, base: str, other: str) -> dict[str, Any]:
    """Speeds of two contenders over the same questions, and how often they said the same words."""
    pairs = [(timings[base], timings[other]) for _, timings in rounds]
    ratios = [a.seconds / b.seconds for a, b in pairs]
    counts = SpeculationCounts()
    for _, timing in pairs:
        counts.add(timing.counts)
    base_step_s, other_step_s = sum(a.step_s for a, _ in pairs), sum(b.step_s for _, b in pairs)
    return {
        "prompts": len(pairs),
        "same_words": sum(a.words == b.words for a, b in pairs),
        "base_tokens_per_s": sum(len(a.words) for a, _ in pairs) / sum(a.seconds for a, _ in pairs),
        "other_tokens_per_s": sum(len(b.words) for _, b in pairs) / sum(b.seconds for _, b in pairs),
        "ratio": sum(a.seconds for a, _ in pairs) / sum(b.seconds for _, b in pairs),
        "ratio_after_the_prompt": base_step_s / other_step_s if base_step_s and other_step_s else None,
        "base_median_step_s": median_step_s(a for a, _ in pairs),
        "other_median_step_s": median_step_s(b for _, b in pairs),
        "median_ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "tokens_per_cycle": 1 + counts.accepted / counts.cycles if counts.cycles else None,
        "acceptance": counts.accepted / counts.drafted if counts.drafted else None,
        "drafted": counts.drafted,
        "rows": counts.rows,
    }


def by_class(rounds: Rounds, base: str, other: str) -> dict[str, dict[str, Any]]:
    """Compare within each class, then over all."""
    classes = dict.fromkeys(question.prompt_class for question, _ in rounds)
    found = {name: compare([r for r in rounds if r[0].prompt_class == name], base, other) for name in classes}
    return found | {"all": compare(rounds, base, other)}


def median_step_s(timings: Iterable[Timing]) -> float | None:
    """The median step after the prompt's: the steadiest number on a busy machine."""
    steps = [step.total_s for timing in timings for step in timing.steps]
    return statistics.median(steps) if steps else None


class Bench:
    """The four parts, and what they found so far."""

    def __init__(
        self, target: Target, questions: Sequence[Question], options: argparse.Namespace, bar: Progress
    ) -> None:
        longest = max(len(question.ids) for question in questions)
        room = {"kv_tokens": 2 * (longest + options.max_tokens + target.page_tokens)}
        self.found: dict[str, Any] = {}
        self._target, self._options, self._bar = target, options, bar
        self._questions = questions
        self._few = one_of_each(questions, max(4, options.per_class))
        self._plain = Engine(target, drafters=(), **room)
        self._default = Engine(target, **room)

    def run(self) -> None:
        """Run the chosen parts; what an interrupted one measured is kept."""
        for part in self._options.only:
            getattr(self, part)()

    def transformers(self) -> None:
        """Part one."""
        contenders = [Transformers(), Ours("plain", self._plain)]
        self._measure("transformers", contenders, self._few, lambda r: {"all": compare(r, "transformers", "plain")})

    def classes(self) -> None:
        """Part two."""
        contenders = [
            Ours("plain", self._plain, ignore_eos=False),
            Ours("speculative", self._default, ignore_eos=False),
        ]
        self._measure("classes", contenders, self._questions, lambda r: by_class(r, "plain", "speculative"))

    def off(self) -> None:
        """Part three."""
        contenders = [
            Ours("no drafter", self._plain),
            Ours("enabled=False", self._default, speculation=Speculation(enabled=False)),
            Ours("max_depth=0", self._default, speculation=Speculation(max_depth=0)),
        ]
        names = [contender.name for contender in contenders]
        self._measure("off", contenders, self._few, lambda r: {name: compare(r, names[0], name) for name in names[1:]})

    def sampling(self) -> None:
        """Part four."""
        contenders = [
            Ours("temperature 0", self._plain),
            Ours("temperature 1", self._plain, temperature=1.0),
            Ours("temperature 1, top-p 0.95", self._plain, temperature=1.0, top_p=0.95),
        ]
        names = [contender.name for contender in contenders]
        self._measure("sampling", contenders, self._few, lambda r: {name: sampling_share(r, name) for name in names})

    def _measure(
        self,
        part: str,
        contenders: Sequence[Contender],
        questions: Sequence[Question],
        evaluate: Callable[[Rounds], dict[str, Any]],
    ) -> None:
        """Measure a part, and evaluate the questions that everybody answered, also after a Ctrl-C."""
        rounds: Rounds = []
        task = self._bar.add_task(part, total=len(contenders) * len(questions))
        try:
            alternate(
                contenders, questions, self._options.max_tokens, into=rounds, tick=lambda: self._bar.advance(task)
            )
        finally:
            if rounds:
                self.found[part] = evaluate(rounds)


def sampling_share(rounds: Rounds, name: str) -> dict[str, float]:
    """How much of a step goes into drawing the word and what belongs to it."""
    steps = [step for _, timings in rounds for step in timings[name].steps]
    return {
        "share": sum(step.sample_s for step in steps) / sum(step.total_s for step in steps),
        "median_sample_s": statistics.median(step.sample_s for step in steps),
        "median_step_s": statistics.median(step.total_s for step in steps),
    }


# What to ask


def gather(options: argparse.Namespace, target: Target) -> list[Question]:
    """Read the prompts, leave out those that are too long, and draw as many of each class as were asked for."""
    prompts = [prompt for file in options.prompts for prompt in load_prompts(file)]
    if options.data is not None:
        prompts.extend(read_collection(options.data))
    classes: dict[str, list[Prompt]] = {}
    for prompt in prompts or own_prompts():
        classes.setdefault(prompt.prompt_class, []).append(prompt)
    choose = random.Random(options.seed)
    questions: list[Question] = []
    for name, found in sorted(classes.items()):
        choose.shuffle(found)
        asked = (Question(name, prompt_ids(prompt, target)) for prompt in found)
        questions.extend(itertools.islice((q for q in asked if len(q.ids) <= options.max_prompt), options.per_class))
    if not questions:
        raise SystemExit("no prompt is left: see --prompts, --data and --max-prompt")
    return questions


def one_of_each(questions: Sequence[Question], count: int) -> list[Question]:
    """Choose a few questions, from every class in turn."""
    classes: dict[str, list[Question]] = {}
    for question in questions:
        classes.setdefault(question.prompt_class, []).append(question)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*classes.values()))
    return [question for question in in_turn if question is not None][:count]


# What to show

TITLES = {
    "transformers": "tokens per second: transformers, and ours without any drafter",
    "classes": "tokens per second: no drafter, and the default settings",
    "off": "tokens per second: no drafter, and drafters that are switched off",
}


def show(found: Mapping[str, Any]) -> None:
    """Print the tables of the parts that were measured."""
    for part, title in TITLES.items():
        if part in found:
            show_pairs(title, found[part])
    if "sampling" in found:
        table = Table("", "share of a step", "drawing, ms", "step, ms", title="drawing the word", box=SIMPLE)
        for name, row in found["sampling"].items():
            times = (f"{1e3 * row[key]:.2f}" for key in ("median_sample_s", "median_step_s"))
            table.add_row(name, f"{row['share']:.1%}", *times)
        console.print(table)


# heading -> what it shows, and how; `decode` is the ratio without the prompts' passes, `tau` is tokens per cycle
COLUMNS = {
    "n": ("prompts", "{}"),
    "before": ("base_tokens_per_s", "{:.1f}"),
    "after": ("other_tokens_per_s", "{:.1f}"),
    "ratio": ("ratio", "{:.3f}"),
    "lowest": ("lowest_ratio", "{:.2f}"),
    "decode": ("ratio_after_the_prompt", "{:.3f}"),
    "tau": ("tokens_per_cycle", "{:.2f}"),
    "accept": ("acceptance", "{:.0%}"),
    "same": ("same_words", "{}"),
}


def show_pairs(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line per comparison."""
    table = Table("", title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows.items():
        cells = ("" if row[key] is None else form.format(row[key]) for key, form in COLUMNS.values())
        table.add_row(name, *cells)
    console.print(table)


def machine(target: Target) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    return {
        "model": target.name,
        "source_hash": target.source_hash,
        "weights": target.weights,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        **{name: version(name) for name in ("torch", "numba", "transformers")},
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=Path, default=[], metavar="FILE", help="JSON lines with prompts")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of <class>/<file> (jsonl, json, csv, tsv)")
    parser.add_argument("--per-class", type=int, default=8, metavar="N", help="prompts of each class (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="words of each answer (default 128)")
    parser.add_argument(
        "--max-prompt", type=int, default=1024, metavar="N", help="longest prompt (default 1024 tokens)"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default all)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of both sides (default torch's choice)")
    parser.add_argument("--weights", choices=WEIGHTS_ON["cpu"], default="int8", help="ours (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which prompts are drawn from a larger set")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all numbers to this file")
    options = parser.parse_args(arguments)
    if options.data is not None and not options.data.is_dir():
        parser.error(f"{options.data} is not a folder")
    for name in ("per_class", "max_tokens", "max_prompt"):
        if getattr(options, name) < 2 - (name == "per_class"):
            parser.error(f"--{name.replace('_', '-')} is too small")
    return options


def main() -> int:
    """Measure, show, write."""
    options = parse()
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bench: Bench | None = None
    interrupted = False
    try:
        with Progress(*columns, console=console) as bar:
            target = load_target(weights=options.weights, num_threads=options.threads, device="cpu")
            bench = Bench(target, gather(options, target), options, bar)
            bench.run()
    except KeyboardInterrupt:
        interrupted = True
        problems.print("interrupted: what follows was measured before")
    except UnderstudyError as error:
        problems.print(f"error: {error}", style="red", markup=False)
        return 1
    if bench is not None:
        show(bench.found)
        if options.json is not None:
            settings = {key: str(value) for key, value in vars(options).items()}
            report = {"machine": machine(target), "settings": settings, "interrupted": interrupted, **bench.found}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return INTERRUPTED if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())

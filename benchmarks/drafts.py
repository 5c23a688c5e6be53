"""How good trained drafts are: tokens per cycle and acceptance by position, by class, temperature and shape.

    python benchmarks/drafts.py --prompts FILE ... [--drafts block] [--classes qa,rag] [--num-prompts 10]
        [--temperatures 0,1] [--shapes chain,tree,uncoupled] [--max-tokens 128] [--depth 7] [--rows 24] [--json OUT]

Every arm writes the answers to the same prompts with the engine that serves, forced to draft at each step as deep as
the draft goes: what would pay does not matter here. Whatever is drafted, the words must be those of an engine without
drafts, and are compared.

    chain       one guess after the other
    tree        best first, of several children at each place, within the rows
    uncoupled   the same tree, its children chosen without the noise that the target draws its words with

Prompts come from files that `understudy train` would take. The eight kinds of question of MT-bench count as one class,
`conversation`. A draft is a folder, or the kind of one that comes with the package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console
from rich.table import Table

from understudy import LLM, SamplingParams
from understudy.assembly import build_engine, load_target
from understudy.config import EngineConfig
from understudy.core.request import Request, Result, Speculation
from understudy.drafters.trained import make_trained_drafter
from understudy.drafters.tree import Shape
from understudy.models.heads.files import load_head
from understudy.models.heads.shipped import shipped_draft
from understudy.train.prompts import read_prompts

_CONVERSATION = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)  # fmt: skip
_SHAPES = {
    "chain": Shape(1),
    "tree": Shape(4),
    "uncoupled": Shape(4, is_coupled=False),
}


@dataclass
class Tally:
    """What one arm did with the prompts of one class."""

    num_words: int = 0
    num_cycles: int = 0
    num_rows: int = 0
    num_same: int = 0
    num_answers: int = 0
    reached: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)

    def add(self, result: Result, plain: Result) -> None:
        """Count an answer. Its first word comes from reading the prompt, and is no cycle's."""
        answer = result.completions[0]
        counts = answer.speculation
        self.num_words += len(answer.token_ids) - 1
        self.num_cycles += counts.cycles
        self.num_rows += counts.rows
        self.num_answers += 1
        self.num_same += answer.token_ids == plain.completions[0].token_ids
        self.reached = _added(self.reached, counts.reached_by_position)
        self.matched = _added(self.matched, counts.matched_by_position)

    @property
    def tokens_per_cycle(self) -> float:
        """Words that a pass of the target brings."""
        return self.num_words / max(self.num_cycles, 1)

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        return {
            "tokens_per_cycle": self.tokens_per_cycle,
            "rows_per_cycle": self.num_rows / max(self.num_cycles, 1),
            "cycles": self.num_cycles,
            "acceptance_by_position": [
                matched / reached for matched, reached in zip(self.matched, self.reached, strict=True) if reached
            ],
            "same_words": f"{self.num_same} of {self.num_answers}",
        }


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in itertools.zip_longest(left, right, fillvalue=0)]


def prompts_by_class(places: Sequence[str], classes: Sequence[str], count: int) -> dict[str, list[str]]:
    """The first prompts of every class."""
    found: dict[str, list[str]] = {}
    for prompt in read_prompts(places):
        name = "conversation" if prompt.prompt_class in _CONVERSATION else prompt.prompt_class
        found.setdefault(name, []).append(str(prompt.messages[0]["content"]))
    chosen = {name: texts for name, texts in found.items() if not classes or name in classes}
    # spread over each class, whose kinds of question may follow one another
    return {name: texts[:: max(1, len(texts) // count)][:count] for name, texts in chosen.items()}


def answers(
    llm: LLM, prompts: Sequence[str], *, temperature: float, max_tokens: int, speculation: Speculation
) -> list[Result]:
    """Answer prompts, eight at once."""
    requests = [
        Request(
            request_id=f"{number}",
            prompt_ids=tuple(llm.chat_ids([{"role": "user", "content": prompt}])),
            sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number),
            speculation=speculation,
            tenant=f"{number}",
        )
        for number, prompt in enumerate(prompts)
    ]
    return llm.run(requests, concurrency=8)


def main() -> int:
    """Run every arm, and print its table."""
    options = _options()
    console = Console(width=200)
    groups = prompts_by_class(
        options.prompts, [name for name in options.classes.split(",") if name], options.num_prompts
    )
    target = load_target(draft="none", device="cpu", weights=options.weights)
    config = EngineConfig(drafters=(), max_sequences=8, prefix_cache=False)
    plain = LLM(target=target, config=config)
    temperatures = [float(part) for part in options.temperatures.split(",")]
    written = {
        (name, temperature): answers(
            plain, prompts, temperature=temperature, max_tokens=options.max_tokens, speculation=Speculation()
        )
        for name, prompts in groups.items()
        for temperature in temperatures
    }
    rows: list[dict[str, Any]] = []
    forced = Speculation(forced=True, max_depth=options.depth, max_rows=options.rows)
    for draft, shape in itertools.product(options.drafts.split(","), options.shapes.split(",")):
        folder = shipped_draft(draft) or Path(draft)
        drafter = make_trained_drafter(load_head(folder), target.decoder, shape=_SHAPES[shape])
        speculating = LLM(target=target, config=config)
        speculating.engine = build_engine(target, config, drafters=[drafter])
        for temperature in temperatures:
            found: list[dict[str, Any]] = []
            for name, prompts in groups.items():
                tally = Tally()
                said = answers(
                    speculating, prompts, temperature=temperature, max_tokens=options.max_tokens, speculation=forced
                )
                for result, other in zip(said, written[name, temperature], strict=True):
                    tally.add(result, other)
                found.append(
                    {"draft": draft, "shape": shape, "temperature": temperature, "class": name, **tally.describe()}
                )
            _show(console, found)
            rows += found
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(row["same_words"].split(" of ")[0] == row["same_words"].split(" of ")[1] for row in rows) else 1


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    mean = sum(row["tokens_per_cycle"] for row in rows) / len(rows)
    table = Table(
        "class", "tokens per cycle", "rows per cycle", "same words", "acceptance by position",
        title=f"{first['draft']}, {first['shape']}, temperature {first['temperature']:g}: mean {mean:.2f}",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["class"],
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['rows_per_cycle']:.1f}",
            row["same_words"],
            " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"]),
        )
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--drafts", default="block")
    parser.add_argument("--classes", default="")
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--shapes", default="chain,tree")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--weights", default=None)
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""How good trained drafts are on prompts from files: what `understudy train` measures (train/evaluate.py) on its own.

    python benchmarks/drafts.py --prompts FILE ... [--drafts block] [--classes qa,rag] [--num-prompts 10]
        [--temperatures 0,1] [--shapes chain,tree,uncoupled] [--max-tokens 128] [--depth 7] [--rows 24]
        [--beside suffix] [--json OUT]

Prompts come from files that `understudy train` would take. The eight kinds of question of MT-bench count as one class,
`conversation`. A draft is a folder, or the kind of one that comes with the package. A model is measured as a chain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from rich.console import Console

from understudy import LLM
from understudy.assembly import load_target, with_draft
from understudy.config import MODEL, EngineConfig
from understudy.core.weights import DEVICE_CHOICES
from understudy.train.evaluate import Arm, Evaluation, Ids, describe, spread
from understudy.train.prompts import read_prompts
from understudy.train.report import show_arm

_CONVERSATION = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)  # fmt: skip


def prompts_by_class(llm: LLM, places: Sequence[str], classes: Sequence[str], count: int) -> dict[str, list[Ids]]:
    """Some prompts of every class, as the model reads them."""
    found: dict[str, list[str]] = {}
    for prompt in read_prompts(places):
        name = "conversation" if prompt.prompt_class in _CONVERSATION else prompt.prompt_class
        found.setdefault(name, []).append(str(prompt.messages[0]["content"]))
    return {
        name: [tuple(llm.chat_ids([{"role": "user", "content": text}])) for text in spread(texts, count)]
        for name, texts in found.items()
        if not classes or name in classes
    }


def main() -> int:
    """Run every arm, and print its table."""
    options = _options()
    console = Console(width=200)
    target = load_target(device=options.device, weights=options.weights)
    classes = [name for name in options.classes.split(",") if name]
    llm = LLM(target=target, config=EngineConfig(drafters=(), max_sequences=1))
    prompts = prompts_by_class(llm, options.prompts, classes, options.num_prompts)
    evaluation = Evaluation(target, prompts, max_tokens=options.max_tokens)
    temperatures = [float(part) for part in options.temperatures.split(",")]
    beside = tuple(name for name in options.beside.split(",") if name)
    arms: list[dict[str, Any]] = []
    for draft in options.drafts.split(","):
        drafted = with_draft(target, draft)
        shapes = ["chain"] if drafted.draft_kind == MODEL else options.shapes.split(",")
        for shape, temperature in itertools.product(shapes, temperatures):
            arm = Arm(
                shape=shape, temperature=temperature, max_depth=options.depth, max_rows=options.rows, beside=beside
            )
            arms.append({"draft": draft, **describe(arm, evaluation.measure(drafted, arm))})
            show_arm(arms[-1], console, name=f"{draft}, ")
            if options.json:
                Path(options.json).write_text(json.dumps(arms, indent=1), encoding="utf-8")
    told = [told for arm in arms for told in arm["classes"].values()]
    return 0 if all(one["num_same"] == one["num_answers"] for one in told) else 1


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
    parser.add_argument("--beside", default="", help="drafters whose branches are merged in")
    parser.add_argument("--device", default="cpu", choices=DEVICE_CHOICES)
    parser.add_argument("--weights", default=None)
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

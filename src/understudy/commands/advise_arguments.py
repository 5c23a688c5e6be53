"""The arguments of `understudy advise`, and what they mean once they are checked."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

from understudy.advise.arithmetic import MOST_DEPTH, CycleCost
from understudy.advise.estimate import Draft, Question
from understudy.commands.lists import read_concurrencies, read_numbers, read_words
from understudy.commands.model_arguments import add_model_arguments, check_models
from understudy.commands.result import check_writable
from understudy.config import AUTO_DRAFT, EngineConfig
from understudy.core.request import SamplingParams
from understudy.core.weights import DeviceChoice, WeightType
from understudy.errors import ConfigError

DEFAULT_BUDGET_S = 300.0
_EXAMPLES = """examples:
  understudy advise --policy policy.json
  understudy advise path/to/model --draft path/to/smaller --prompts prompts.jsonl --concurrency 1,4,16
  understudy advise --acceptance 0.6 --cost-ratio 0.1
  understudy advise --acceptance 0.8,0.7,0.6 --draft-bytes 1e9 --target-bytes 14e9 --row-cost 0.02 --batch 1,8,32
"""
_NUMBERS_ALONE = (
    *("cost_ratio", "row_cost", "block_cost", "depth", "batch"),
    *("draft_bytes", "target_bytes", "kv_bytes_per_token", "context"),
)
_WITH_A_MODEL = (
    *("model", "draft", "cross_tokenizer", "weights", "device", "threads", "prompts", "classes", "num_prompts"),
    *("max_tokens", "temperature", "concurrency", "seed", "budget", "policy"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be found out, checked."""

    model: str | None
    draft: str | None
    cross_tokenizer: bool
    device: DeviceChoice
    weights: WeightType | None
    threads: int | None
    prompts: str | None
    classes: tuple[str, ...]
    num_prompts: int | None
    max_tokens: int
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    seed: int
    budget_s: float
    json: str | None
    policy: str | None

    @property
    def models(self) -> EngineConfig:
        """The models, for loading them."""
        return EngineConfig(
            draft=self.draft or AUTO_DRAFT,
            cross_tokenizer=self.cross_tokenizer,
            device=self.device,
            weights=self.weights,
            num_threads=self.threads,
        )

    def describe(self) -> dict[str, Any]:
        """Put it into plain values; where results go is nobody's business."""
        return {name: value for name, value in asdict(self).items() if name not in ("json", "policy")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes. Nothing has a default here, so that it can be told what was written."""
    parser.epilog = _EXAMPLES
    add_model_arguments(parser, positional=True)
    add = parser.add_argument_group("what is asked of it").add_argument
    add("--prompts", metavar="FILE", help="JSON lines with prompt, messages or turns (default: our own)")
    add("--classes", "--class", metavar="LIST", help="only these classes, with commas between")
    add("--num-prompts", type=int, metavar="N", help="prompts of each class (default: all)")
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: 96)")
    add("--temperature", metavar="LIST", help="one or several, with commas between (default: 0)")
    add("--concurrency", metavar="LIST", help="requests at once, one or several numbers (default: 1,4,8)")
    add("--seed", type=int, metavar="N", help="of the words (default: 0)")
    add("--budget", type=float, metavar="S", help="seconds to spend on answers (default: 300)")
    add = parser.add_argument_group("without a model: your own numbers").add_argument
    add("--acceptance", metavar="A", help="chance that a drafted word is right; or one for each place, with commas")
    add("--cost-ratio", type=float, metavar="C", help="a pass of the draft by a pass of the target (default: 0)")
    add("--row-cost", type=float, metavar="V", help="what one more row adds to a pass of one row (default: 0)")
    add("--block-cost", type=float, metavar="C", help="a draft that is said in one pass, whatever its depth")
    add("--depth", type=int, metavar="N", help="a depth that is set already")
    add("--batch", metavar="LIST", help="sequences that share a pass, one or several numbers (default: 1)")
    add("--draft-bytes", type=float, metavar="N", help="memory of the draft; with --target-bytes also the cost ratio")
    add("--target-bytes", type=float, metavar="N", help="memory of the target")
    add("--kv-bytes-per-token", type=float, metavar="N", help="memory of one token's keys and values")
    add("--context", type=int, metavar="N", help="tokens of a sequence (default: 4096)")
    add = parser.add_argument_group("results").add_argument
    add("--json", metavar="OUT", help="write everything to this file; - for the standard output")
    add("--policy", metavar="OUT", help="write a policy that `serve --policy` begins with")


def is_arithmetic(arguments: argparse.Namespace) -> bool:
    """Whether only numbers were given. Numbers and a model contradict each other."""
    alone = arguments.acceptance is not None
    for name in _WITH_A_MODEL if alone else _NUMBERS_ALONE:
        if getattr(arguments, name) not in (None, False):
            option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            other = "without --acceptance" if alone else "with --acceptance"
            raise ConfigError(f"{option} has a meaning only {other}.", "Leave one of the two out.")
    return alone


def read_question(arguments: argparse.Namespace) -> Question:
    """Check somebody's numbers."""
    acceptance = tuple(_rates(arguments.acceptance))
    for name in ("cost_ratio", "row_cost", "block_cost"):
        _check(arguments, name, low=0.0, high=1000.0)
    for name in ("draft_bytes", "target_bytes", "kv_bytes_per_token", "context"):
        _check(arguments, name, low=1.0, high=1e18)
    _check(arguments, "depth", low=0, high=MOST_DEPTH)
    batches = tuple(read_numbers(arguments.batch or "1", int, "batch"))
    if not all(1 <= batch <= 1_000_000 for batch in batches):
        raise ConfigError(f"--batch is {arguments.batch!r}.", "Give whole numbers of at least 1.")
    draft = _draft(arguments)
    ratio = arguments.cost_ratio
    if ratio is None and draft is not None and draft.target_bytes is not None and arguments.block_cost is None:
        ratio = draft.num_bytes / draft.target_bytes  # a pass of few rows takes as long as reading the weights does
    cost = CycleCost(
        cost_ratio=ratio or 0.0, row_cost=arguments.row_cost or 0.0, block_cost=arguments.block_cost or 0.0
    )
    return Question(acceptance=acceptance, cost=cost, depth=arguments.depth, batches=batches, draft=draft)


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Check everything that can be checked before a model is loaded."""
    check_models(arguments)
    for name in ("num_prompts", "max_tokens", "threads"):
        _check(arguments, name, low=1, high=2**31 - 1)
    _check(arguments, "seed", low=0, high=2**63)
    _check(arguments, "budget", low=0.001, high=1e9)
    max_tokens = 96 if arguments.max_tokens is None else arguments.max_tokens
    temperatures = tuple(read_numbers(arguments.temperature or "0", float, "temperature"))
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=max_tokens)
    check_writable(arguments.json)
    if arguments.policy == "-":
        raise ConfigError("--policy needs the name of a file.", "Give one.")
    check_writable(arguments.policy)
    if arguments.policy is not None and arguments.policy == arguments.json:
        raise ConfigError("--json and --policy name the same file.", "Give each its own.")
    return Settings(
        model=arguments.model,
        draft=arguments.draft,
        cross_tokenizer=arguments.cross_tokenizer,
        device=arguments.device or "auto",
        weights=arguments.weights,
        threads=arguments.threads,
        prompts=arguments.prompts,
        classes=tuple(read_words(arguments.classes)),
        num_prompts=arguments.num_prompts,
        max_tokens=max_tokens,
        temperatures=temperatures,
        concurrencies=read_concurrencies(arguments.concurrency or "1,4,8"),
        seed=arguments.seed or 0,
        budget_s=DEFAULT_BUDGET_S if arguments.budget is None else arguments.budget,
        json=arguments.json,
        policy=arguments.policy,
    )


def _draft(arguments: argparse.Namespace) -> Draft | None:
    if arguments.draft_bytes is None:
        for name in ("target_bytes", "kv_bytes_per_token", "context"):
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} has a meaning only with --draft-bytes.", "Give both or none.")
        return None
    per_token = arguments.kv_bytes_per_token
    return Draft(
        num_bytes=int(arguments.draft_bytes),
        target_bytes=None if arguments.target_bytes is None else int(arguments.target_bytes),
        kv_bytes_per_token=None if per_token is None else int(per_token),
        context=arguments.context or 4096,
    )


def _rates(written: str) -> list[float]:
    try:
        rates = [float(word) for word in written.split(",")]
    except ValueError:
        rates = []
    if not rates or len(rates) > MOST_DEPTH or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(
            f"--acceptance is {written!r}.", "Give a number from 0 to 1, or one for each place of a draft, with commas."
        )
    return rates


def _check(arguments: argparse.Namespace, name: str, *, low: float, high: float) -> None:
    value = getattr(arguments, name)
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"--{name.replace('_', '-')} is {value}.", f"Give a number from {low:g} to {high:g}.")

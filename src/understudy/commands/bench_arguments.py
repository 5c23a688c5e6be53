"""The arguments of `understudy bench`, and what they mean once they are checked."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from understudy.commands.api_key import key_from
from understudy.commands.lists import read_concurrencies, read_numbers, read_words
from understudy.commands.model_arguments import (
    add_draft_tree,
    add_model_arguments,
    check_drafted,
    check_models,
    read_draft_tree,
    uses_draft,
)
from understudy.commands.result import check_writable
from understudy.config import AUTO_DRAFT, DEFAULT, DRAFTERS, NO_DRAFT, EngineConfig, names_a_draft
from understudy.core.request import SamplingParams
from understudy.core.shapes import SHAPES
from understudy.core.weights import DeviceChoice, WeightType
from understudy.errors import ConfigError

DEFAULT_BUDGET_S = 600.0
DEFAULT_NUM_REQUESTS = 16
MAX_SEED = 2**63
"""Questions count on from it, and must stay below the engine's own limit."""

_EXAMPLES = """examples:
  understudy bench
  understudy bench --budget 300 --json bench.json --html bench.html
  understudy bench path/to/model --draft path/to/smaller --drafter default --drafter model --concurrency 1,4,8
  understudy bench --widen 8b --draft twin:0.1
  understudy bench --arrivals poisson --rate 0.5 --classes chat,code
  understudy bench --url http://localhost:8000/v1 --baseline-url http://localhost:8001/v1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run as it was asked for, checked."""

    model: str | None
    url: str | None
    baseline_url: str | None
    plain_by_field: bool
    api_key_env: str | None
    drafters: tuple[str, ...]
    """Names of the arms beside the baseline."""
    widen: str | None
    """The name of a shape."""
    draft: str | None
    draft_tree: int
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
    """Not used in an open loop."""
    arrivals: Literal["closed", "poisson", "trace"]
    rate: float | None
    trace: str | None
    trace_unit: Literal["ms", "s"]
    num_requests: int
    """Of one sequence of arrivals."""
    seed: int
    budget_s: float
    json: str | None
    html: str | None
    command: tuple[str, ...]
    """As it was written."""

    @property
    def models(self) -> EngineConfig:
        """The models of our own engine, for loading them; which of the arms uses the draft is theirs to say.

        What comes with the package is loaded unasked where an arm is `default`; other arms load what they name.
        """
        has_default = any(DEFAULT in name.split("+") for name in self.drafters)
        unasked = AUTO_DRAFT if has_default else NO_DRAFT
        return EngineConfig(
            draft=self.draft or unasked,
            cross_tokenizer=self.cross_tokenizer,
            device=self.device,
            weights=self.weights,
            num_threads=self.threads,
        )

    def describe(self) -> dict[str, Any]:
        """Put it into plain values; where results go is nobody's business."""
        return {name: value for name, value in asdict(self).items() if name not in ("json", "html")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.epilog = _EXAMPLES
    _add_work(parser.add_argument_group("what is asked").add_argument)
    _add_arms(parser)
    add = parser.add_argument_group("results").add_argument
    add(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="S",
        help="seconds to spend; one round always runs (default: 600)",
    )
    add("--json", metavar="OUT", help="write the record to this file; - for the standard output")
    add("--html", metavar="OUT", help="write the record as a page: one file that loads nothing")


def _add_work(add: Callable[..., Any]) -> None:
    add("--prompts", metavar="FILE", help="JSON lines with prompt, messages or turns (default: our own)")
    add("--classes", metavar="LIST", help="only these classes, with commas between")
    add("--num-prompts", type=int, metavar="N", help="prompts of each class (default: all)")
    add("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    add("--temperature", default="0", metavar="LIST", help="one or several, with commas between (default: 0)")
    add("--concurrency", metavar="LIST", help="requests at once, one or several numbers (default: 1)")
    add(
        "--arrivals",
        choices=("closed", "poisson", "trace"),
        default="closed",
        help="closed: --concurrency requests at once; else at times that are drawn or recorded (default: closed)",
    )
    add("--rate", type=float, metavar="R", help="requests per second on average, for --arrivals poisson")
    add("--trace", metavar="FILE", help="JSON lines with a timestamp, for --arrivals trace")
    add("--trace-unit", choices=("ms", "s"), help="unit of the timestamps (default: ms)")
    add("--num-requests", type=int, metavar="N", help="requests of an open loop's sequence (default: 16)")
    add("--seed", type=int, default=0, metavar="N", help="of words and arrivals (default: 0)")


def _add_arms(parser: argparse.ArgumentParser) -> None:
    models = add_model_arguments(parser, positional=True)
    add_draft_tree(models)
    add = models.add_argument
    add("--model", dest="model_name", metavar="M", help="the same as MODEL; with --url the name of the model there")
    add(
        "--widen",
        choices=tuple(SHAPES),
        metavar="SHAPE",
        help=f"measure at a larger model's price: MODEL in its shape says the same as before ({', '.join(SHAPES)})",
    )
    names = ", ".join(("default", *DRAFTERS, "none (plain again, to see what chance does)"))
    add(
        "--drafter",
        action="append",
        metavar="NAME",
        help=f"{names}, or several with + between; may be repeated (default: default)",
    )
    add = parser.add_argument_group("a server with OpenAI's interface").add_argument
    add("--url", metavar="URL", help="measure this server, as in http://localhost:8000/v1")
    add("--baseline-url", metavar="URL", help="the same model without speculation, to compare with")
    add("--plain-by-field", action="store_true", help='baseline: the same URL with "speculation": {"enabled": false}')
    add("--api-key-env", metavar="VAR", help="environment variable that holds the key")


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Check everything that can be checked before a model is loaded."""
    _check_numbers(arguments)
    _check_combinations(arguments)
    _check_arrivals(arguments)
    temperatures = tuple(read_numbers(arguments.temperature, float, "temperature"))
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens)
    check_writable(arguments.json)
    if arguments.html == "-":
        raise ConfigError("--html needs the name of a file.", "Give one.")
    check_writable(arguments.html)
    if arguments.html is not None and arguments.json is not None and Path(arguments.html) == Path(arguments.json):
        raise ConfigError("--json and --html name the same file.", "Give each its own.")
    return Settings(
        model=arguments.model if arguments.model is not None else arguments.model_name,
        url=arguments.url,
        baseline_url=arguments.baseline_url,
        plain_by_field=arguments.plain_by_field,
        api_key_env=arguments.api_key_env,
        drafters=_drafters(arguments.drafter or ["default"], arguments.draft),
        widen=arguments.widen,
        draft=arguments.draft,
        draft_tree=read_draft_tree(arguments),
        cross_tokenizer=arguments.cross_tokenizer,
        device=arguments.device or "auto",
        weights=arguments.weights,
        threads=arguments.threads,
        prompts=arguments.prompts,
        classes=tuple(read_words(arguments.classes)),
        num_prompts=arguments.num_prompts,
        max_tokens=arguments.max_tokens,
        temperatures=temperatures,
        concurrencies=read_concurrencies(arguments.concurrency or "1"),
        arrivals=arguments.arrivals,
        rate=arguments.rate,
        trace=arguments.trace,
        trace_unit=arguments.trace_unit or "ms",
        num_requests=arguments.num_requests or DEFAULT_NUM_REQUESTS,
        seed=arguments.seed,
        budget_s=arguments.budget,
        json=arguments.json,
        html=arguments.html,
        command=("understudy", *arguments.written),
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("num_prompts", "max_tokens", "threads", "num_requests"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least 1.")
    for name in ("budget", "rate"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value}.", "Give a number above 0.")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise ConfigError(f"--seed is {arguments.seed}.", f"Give a whole number from 0 to {MAX_SEED}.")


def _check_combinations(arguments: argparse.Namespace) -> None:
    if arguments.model is not None and (arguments.model_name is not None or arguments.url is not None):
        other = "--model" if arguments.model_name is not None else "--url"
        raise ConfigError(f"MODEL and {other} contradict each other.", "Give one of the two.")
    with_url = ("baseline_url", "plain_by_field", "api_key_env")
    without_url = ("drafter", "threads", "weights", "device", "widen", "draft", "draft_tree", "cross_tokenizer")
    for name in without_url if arguments.url is not None else with_url:
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            where = "on our own engine" if arguments.url is not None else "with --url"
            raise ConfigError(f"{option} has a meaning only {where}.", "Leave it out.")
    check_models(arguments)
    if arguments.baseline_url is not None and arguments.plain_by_field:
        raise ConfigError("--baseline-url and --plain-by-field contradict each other.", "Give one of the two.")
    key_from(arguments.api_key_env)


def _check_arrivals(arguments: argparse.Namespace) -> None:
    kind = arguments.arrivals
    for name, wanted in (("rate", "poisson"), ("trace", "trace")):
        given = getattr(arguments, name) is not None
        if given != (kind == wanted):
            raise ConfigError(f"--{name} and --arrivals {wanted} belong together.", "Give both or none.")
    if kind != "trace" and arguments.trace_unit is not None:
        raise ConfigError("--trace-unit has a meaning only with --arrivals trace.", "Leave it out.")
    if kind == "closed" and arguments.num_requests is not None:
        raise ConfigError("--num-requests has a meaning only in an open loop.", "Leave it out.")
    if kind != "closed" and arguments.concurrency is not None:
        raise ConfigError("--concurrency has a meaning only with closed arrivals.", "Leave it out.")


def _drafters(names: list[str], draft: str | None) -> tuple[str, ...]:
    for name in names:
        if name not in ("default", "none"):
            check_drafted(EngineConfig(drafters=tuple(name.split("+"))).drafters, draft, option=f"--drafter {name}")
    if names_a_draft(draft) and not any(uses_draft(tuple(name.split("+"))) for name in names):
        raise ConfigError(
            "--draft names a draft, but no --drafter uses it.", "Name 'model' in one of them, or its kind."
        )
    return tuple(dict.fromkeys(names))

"""`understudy race`: plain against speculative on the same prompts, live."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy import __version__
from understudy.commands.model_arguments import add_drafters, add_model_arguments, engine_config, load
from understudy.commands.result import DIFFERENT, FAILED, INTERRUPTED, check_writable, make_console, write_json
from understudy.commands.teller import Teller
from understudy.config import EngineConfig
from understudy.core.events import Event, Fallback
from understudy.core.request import SamplingParams
from understudy.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from understudy.assembly import Target
    from understudy.bench.prompts import Prompt
    from understudy.race.lanes import Heat, Question

_EXAMPLES = """examples:
  understudy race
  understudy race --classes code,rag --num-prompts 2 --drafters suffix,ngram
  understudy race path/to/model --draft path/to/smaller --temperature 0.7 --json race.json
"""


def add_race(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "race",
        help="plain against speculative on the same prompts, live; exit code 1 if a text differs",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=race)
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="JSON lines with prompt, messages or turns (default: our own)")
    add("--classes", metavar="LIST", help="workload classes, with commas between (default: all that the prompts have)")
    add("--num-prompts", type=int, default=1, metavar="N", help="prompts of each class (default: 1)")
    add("--max-tokens", type=int, default=96, metavar="N", help="longest answer (default: 96)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest word (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of every answer (default: 0)")
    add("--json", metavar="OUT", help="write the table to this file; - for the standard output")
    add_drafters(add_model_arguments(parser, positional=True), may_be_none=False)


@dataclass(slots=True)
class Outcome:
    """What came out of a race."""

    target: Target
    config: EngineConfig
    sampling: SamplingParams
    num_left_out: int
    """Prompts that are longer than the model's context."""
    heats: list[Heat] = field(default_factory=list)
    """The prompts that both lanes have finished."""
    fallbacks: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """What was told while the models were loaded."""
    interrupted: bool = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Who drafts in the second lane."""
        return self.config.drafters_with(self.target.draft_kind)

    @property
    def is_same(self) -> bool:
        """Whether every text was the same in both lanes."""
        return all(heat.is_same for heat in self.heats)

    @property
    def errors(self) -> list[str]:
        """What ended an answer early."""
        return [lane.error for heat in self.heats for lane in heat.lanes if lane.error is not None]

    def listen(self, event: Event) -> None:
        """Note what did not go the first way."""
        if isinstance(event, Fallback):
            self.fallbacks.append(f"{event.what}: {event.reason}")

    def describe(self) -> dict[str, Any]:
        """Put it into plain values."""
        from understudy.race.tally import Tally, by_class

        return {
            "classes": {name: tally.describe() for name, tally in by_class(self.heats).items()},
            "overall": Tally.of(self.heats).describe(),
            "model": self.target.name,
            "draft": None if self.target.draft is None else self.target.draft.name,
            "weights": self.target.weights,
            "system_fingerprint": self.target.system_fingerprint,
            "drafters": list(self.drafters),
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "max_tokens": self.sampling.max_tokens,
            "prompts_left_out": self.num_left_out,
            "fallbacks": self.fallbacks,
            "notices": self.notices,
            "errors": self.errors,
            "interrupted": self.interrupted,
            "version": __version__,
        }


def race(arguments: argparse.Namespace) -> int:
    """Run the race, and say by the exit code how it ended."""
    config = engine_config(arguments)
    check_writable(arguments.json)
    outcome = _race(
        arguments, config, screen=make_console(stderr=arguments.json == "-"), errors=make_console(stderr=True)
    )
    if outcome.interrupted:
        return INTERRUPTED
    if not outcome.is_same:
        return DIFFERENT
    return FAILED if outcome.errors else 0


def _race(arguments: argparse.Namespace, config: EngineConfig, *, screen: Console, errors: Console) -> Outcome:
    """Check all that can be checked before a model is loaded, let the lanes run, and write and show what came out."""
    sampling = SamplingParams(
        temperature=arguments.temperature, seed=arguments.seed, max_tokens=arguments.max_tokens, n=1
    )
    if not config.drafters:
        raise ConfigError("A race needs somebody who drafts.", "Name a drafter, or leave --drafters out.")
    if arguments.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {arguments.num_prompts}.", "Give a whole number of at least 1.")

    from understudy.bench.prompts import load_prompts, own_prompts

    prompts = load_prompts(arguments.prompts) if arguments.prompts is not None else own_prompts()
    chosen = choose_prompts(prompts, classes=_classes(arguments.classes), per_class=arguments.num_prompts)
    teller = Teller(errors)
    target = load(arguments.model, config, console=errors, emit=teller)
    questions = make_questions(chosen, target)
    outcome = Outcome(target, config, sampling, len(chosen) - len(questions), notices=teller.notes)
    run(outcome, questions, screen=screen, errors=errors)
    try:  # whatever becomes of the file or of the table, the other is not lost
        write_json(outcome.describe(), arguments.json)
    finally:
        show(outcome, len(questions), screen)
    return outcome


def run(outcome: Outcome, questions: Sequence[Question], *, screen: Console, errors: Console) -> None:
    """Let the lanes run over all questions, or until somebody interrupts; what is finished counts."""
    from understudy.parity.side_by_side import engine_pair
    from understudy.race.lanes import run_race
    from understudy.race.screen import Scoreboard
    from understudy.terminal import Waiting
    from understudy.upkeep import calm_process

    with Waiting(errors, "measuring what a row costs"):
        engines = engine_pair(
            outcome.target,
            [question.prompt_ids for question in questions],
            max_tokens=outcome.sampling.max_tokens,
            drafters=outcome.config.drafters,
            draft_tree=outcome.config.draft_tree,
            emit=outcome.listen,
        )
    calm_process()
    try:
        with Scoreboard(screen, drafters=outcome.drafters, num_heats=len(questions)) as board:
            for heat in run_race(engines, outcome.target.tokenizer, questions, outcome.sampling, on_frame=board.at):
                outcome.heats.append(heat)
                board.finished(heat)
    except KeyboardInterrupt:
        outcome.interrupted = True


def show(outcome: Outcome, num_questions: int, console: Console) -> None:
    """Print the table, and whatever else has to be said."""
    from understudy.race.screen import show_table
    from understudy.terminal import sanitised

    def say(text: str) -> None:
        console.print(sanitised(text, console.encoding), markup=False, soft_wrap=True)

    if outcome.num_left_out:
        say(f"{outcome.num_left_out} prompts are longer than the model's context and were left out.")
    for fallback in dict.fromkeys(outcome.fallbacks):
        say(f"fallback  {fallback}")
    for error in dict.fromkeys(outcome.errors):
        say(f"error  {error}")
    if outcome.interrupted:
        say(f"Interrupted: {len(outcome.heats)} of {num_questions} prompts were finished.")
    if outcome.heats:
        show_table(outcome.heats, console)


def choose_prompts(prompts: Sequence[Prompt], *, classes: Sequence[str] | None, per_class: int) -> list[Prompt]:
    """Take the first prompts of each wanted class, one of each class in turn."""
    from understudy.bench.prompts import spread

    known = list(dict.fromkeys(prompt.prompt_class for prompt in prompts))
    wanted = known if classes is None else classes
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"No prompt is of the class {unknown[0]!r}.", f"Choose from {', '.join(known)}.")
    chosen: list[Prompt] = []
    for name in wanted:
        chosen += [prompt for prompt in prompts if prompt.prompt_class == name][:per_class]
    return spread(chosen, len(chosen))


def make_questions(prompts: Sequence[Prompt], target: Target) -> list[Question]:
    """Turn prompts into token ids, without those that are too long for the model."""
    from understudy.parity.cases import excerpt, fitting
    from understudy.race.lanes import Question

    questions = [Question(prompt.prompt_class, excerpt(prompt), ids) for prompt, ids in fitting(prompts, target)]
    if not questions:
        raise InvalidRequest(
            f"None of the {len(prompts)} prompts fits in the model's context.",
            "Give shorter ones.",
            parameter="prompts",
        )
    return questions


def _classes(wanted: str | None) -> list[str] | None:
    return None if wanted is None else list(dict.fromkeys(name.strip() for name in wanted.split(",")))

"""The commands. The only place that composes: what a command needs is imported when it runs, so `--help` is fast.

Exit codes: 0 done; 1 the words differ, or nothing was proven; 2 the request cannot be served; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from understudy import __version__
from understudy.commands.bench import add_bench
from understudy.commands.result import (
    BROKEN_PIPE,
    DIFFERENT,
    FAILED,
    INTERRUPTED,
    check_writable,
    make_console,
    write_json,
)
from understudy.config import EngineConfig
from understudy.core.request import Output, SamplingParams
from understudy.errors import ConfigError, InvalidRequest, UnderstudyError
from understudy.race import command as race_command

if TYPE_CHECKING:
    from understudy.bench.prompts import Prompt

DEFAULT_BUDGET_S = 600.0
COMPARED_CLASSES = ("code", "summarization", "rag")

_EXAMPLES = """examples:
  understudy generate "What is a lighthouse for?"
  echo "List three rivers." | understudy generate --temperature 0.7 --seed 7
  understudy generate --compare
  understudy verify --budget 300 --json proof.json
  understudy race --classes code,rag
  understudy bench --json bench.json
"""
_GENERATE_EXAMPLES = """examples:
  understudy generate "What is a lighthouse for?"
  understudy generate --raw --max-tokens 40 "Once upon a time"
  understudy generate --json --n 2 --temperature 1 "Name a colour."
  understudy generate --compare --max-tokens 64
"""
_VERIFY_EXAMPLES = """examples:
  understudy verify
  understudy verify --budget 300 --json proof.json
  understudy verify path/to/model --prompts prompts.jsonl --full
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no text may fail for the terminal's alphabet
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        code = BROKEN_PIPE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (UnderstudyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = FAILED
    except MemoryError:
        print("error: There is not enough memory. Choose a smaller model or a shorter prompt.", file=sys.stderr)
        code = FAILED
    return code


def _dispatch(argv: list[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as leaving:  # argparse has said all there is to say
        return leaving.code if isinstance(leaving.code, int) else 0
    code: int = arguments.command(arguments)
    return code


def _drop_output() -> None:
    """Let the interpreter's last flush go nowhere: the reader has left."""
    with suppress(OSError, ValueError):
        descriptor = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="understudy",
        description="Language models served faster by speculative decoding, with the same words.",
        epilog=_EXAMPLES,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate", help="continue a prompt", epilog=_GENERATE_EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    _add_generate(generate)
    verify = commands.add_parser(
        "verify",
        help="prove that speculation changes no word; exit code 1 on any difference",
        epilog=_VERIFY_EXAMPLES,
        formatter_class=raw,
        allow_abbrev=False,
    )
    _add_verify(verify)
    race = commands.add_parser("race", help=race_command.HELP, epilog=race_command.EXAMPLES, formatter_class=raw)
    race_command.add_options(race, command=_race)
    add_bench(commands)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_generate)
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; - reads the standard input, and so does nothing, but for --compare",
    )
    add("--model", metavar="M", help="a folder or a GGUF file (default: the embedded model)")
    add("--no-speculation", action="store_true", help="use no drafter at all")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest word (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest words up to this probability")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest words (default: 0, all)")
    add("--seed", type=int, metavar="N", help="repeats an answer at any temperature (default: drawn, and told)")
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: 256, with --compare 128)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--n", type=int, default=1, metavar="N", help="number of answers (default: 1)")
    add("--drafters", metavar="LIST", help="suffix, ngram, both with a comma between, or none (default: suffix)")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object")
    add("--compare", action="store_true", help="speculation off and on side by side; exit code 1 if a text differs")
    add("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_verify)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder or a GGUF file (default: the embedded model)")
    add("--prompts", metavar="FILE", help="JSON lines with prompt, messages or turns (default: our own)")
    add("--json", metavar="OUT", help="write the whole report to this file; - for the standard output")
    add("--budget", type=float, metavar="S", help=f"seconds to spend (default: {DEFAULT_BUDGET_S:g}; with --full none)")
    add("--full", action="store_true", help="every combination of settings, not only every pair")
    add("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    add("--num-prompts", type=int, default=8, metavar="N", help="prompts, of each class in turn (default and least: 8)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


# ---------------------------------------------------------------------------------------------------- generate


def _generate(arguments: argparse.Namespace) -> int:
    """Check everything that can be checked before a model is loaded, then answer."""
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens if arguments.max_tokens is not None else 128 if arguments.compare else 256,
        stop=tuple(_utf8(text, "stop") for text in arguments.stop),
        n=arguments.n,
    )
    config = EngineConfig(drafters=_drafters(arguments), num_threads=arguments.threads)
    if arguments.compare:
        return _compare(arguments, sampling, config)
    prompt = _prompt(_read_prompt(arguments), raw=arguments.raw)
    return _answer(arguments, prompt, sampling, config)


def _answer(arguments: argparse.Namespace, prompt: Prompt, sampling: SamplingParams, config: EngineConfig) -> int:
    from understudy.bench.prompts import prompt_ids
    from understudy.llm import LLM
    from understudy.terminal import Waiting, loading, result_json, summary

    console = make_console(stderr=True)
    with loading(console) as progress:
        llm = LLM(arguments.model, config=config, progress=progress)
    streams = not arguments.json and sampling.n == 1
    with Waiting(console, "reading the prompt") as waiting:

        def on_output(output: Output) -> None:
            if streams:
                waiting.stop()
                print(output.text, end="", flush=True)

        started = time.perf_counter()
        request = llm.request(prompt_ids(prompt, llm.target), sampling)
        (result,) = llm.run([request], on_output=on_output)
        seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(result_json(result, llm.target.name, seconds), indent=2))
    elif streams:
        print()
    else:
        for completion in result.completions:
            print(f"[{completion.index}] {completion.text}")
    print(summary(result, seconds, tell_seed=sampling.temperature > 0), file=sys.stderr)
    failed = [completion.error for completion in result.completions if completion.error]
    if failed:
        print(f"error: {failed[0]}", file=sys.stderr)
    return FAILED if failed else 0


def _read_prompt(arguments: argparse.Namespace) -> str:
    """Take the prompt from the command line, or from the standard input if that is no terminal."""
    prompt: str | None = arguments.prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        raise InvalidRequest("There is no prompt.", 'Give one, as in: understudy generate "Hello", or pipe a text in.')
    text = _read_input(keep_end=arguments.raw) if prompt in (None, "-") else _utf8(prompt or "", "prompt")
    if not text:
        raise InvalidRequest("The prompt is empty.", "Give at least one character.", parameter="prompt")
    return text


def _read_input(*, keep_end: bool) -> str:
    """Read the standard input, at most what a prompt may have. The line end that `echo` adds is not the question's."""
    from understudy.text.tokenizer import MAX_PROMPT_BYTES

    if sys.stdin is None:
        return ""
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"The prompt has more than {MAX_PROMPT_BYTES} bytes.", "Shorten it.", parameter="prompt")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"Byte {error.start} of the prompt is not UTF-8.", "Send text as UTF-8.", parameter="prompt"
        ) from None
    return text if keep_end else text.removesuffix("\n").removesuffix("\r")


def _utf8(text: str, parameter: str) -> str:
    """Refuse an argument that is no text: bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"Character {error.start} of the {parameter} is not UTF-8.", "Send text as UTF-8.", parameter=parameter
        ) from None
    return text


def _prompt(text: str, *, raw: bool) -> Prompt:
    from understudy.bench.prompts import Prompt

    return Prompt(text=text) if raw else Prompt(messages=({"role": "user", "content": text},))


def _drafters(arguments: argparse.Namespace) -> tuple[str, ...]:
    wanted: str | None = arguments.drafters
    if arguments.no_speculation:
        if wanted not in (None, "none"):
            raise ConfigError("--no-speculation and --drafters contradict each other.", "Give one of the two.")
        return ()
    if wanted is None:
        return EngineConfig().drafters
    return () if wanted == "none" else tuple(dict.fromkeys(name.strip() for name in wanted.split(",")))


# ---------------------------------------------------------------------------------------------------- compare


def _compare(arguments: argparse.Namespace, sampling: SamplingParams, config: EngineConfig) -> int:
    """Speculation off and on, in turn, on the given prompt or on three of our own."""
    if not config.drafters or sampling.n != 1:
        raise ConfigError("--compare needs speculation and one answer per prompt.", "Leave out what forbids them.")
    from dataclasses import replace

    from understudy.assembly import load_target
    from understudy.bench.prompts import own_prompts, prompt_ids
    from understudy.parity.side_by_side import Question, side_by_side
    from understudy.terminal import Waiting, loading, show_comparisons

    if arguments.prompt is not None:
        named = {"prompt": _prompt(_read_prompt(arguments), raw=arguments.raw)}
    else:
        own = own_prompts()
        named = {name: next(prompt for prompt in own if prompt.prompt_class == name) for name in COMPARED_CLASSES}
    console, out = make_console(stderr=True), make_console(stderr=False)
    with loading(console) as progress:
        target = load_target(arguments.model, num_threads=config.num_threads, progress=progress)
    questions = [Question(name, prompt_ids(prompt, target)) for name, prompt in named.items()]
    if sampling.seed is None:
        sampling = replace(sampling, seed=time.time_ns() % 2**32)
    comparisons = []
    with Waiting(console, "starting") as waiting:
        for comparison in side_by_side(target, questions, sampling, drafters=config.drafters, watch=waiting.say):
            comparisons.append(comparison)
            if not arguments.json:
                out.print(f"── {comparison.question.name}", style="bold")
                out.print(comparison.off.answers[0].text, markup=False, soft_wrap=True)
    if arguments.json:
        print(json.dumps([comparison.describe() for comparison in comparisons], indent=2))
    else:
        show_comparisons(comparisons, out)
    return 0 if all(comparison.same for comparison in comparisons) else DIFFERENT


# ---------------------------------------------------------------------------------------------------- verify


def _verify(arguments: argparse.Namespace) -> int:
    """Prove it, print the proof, and write it where it is wanted."""
    budget_s = _budget(arguments)
    for name in ("num_prompts", "max_tokens", "threads"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}.", "Give a whole number of at least 1.")
    check_writable(arguments.json)

    from understudy.assembly import load_target
    from understudy.bench.prompts import load_prompts, own_prompts
    from understudy.parity.cases import make_cases
    from understudy.parity.report import progress_bar, show, to_json
    from understudy.parity.settings import every_setting, pairwise
    from understudy.parity.verify import verify
    from understudy.terminal import loading

    prompts = load_prompts(arguments.prompts) if arguments.prompts is not None else own_prompts()
    console = make_console(stderr=True)
    with loading(console) as progress:
        target = load_target(arguments.model, num_threads=arguments.threads, progress=progress)
    case_set = make_cases(prompts, target, count=arguments.num_prompts, max_tokens=arguments.max_tokens)
    settings = every_setting() if arguments.full else pairwise(every_setting())
    with progress_bar(console) as watcher:
        report = verify(target, case_set, settings, budget_s=budget_s, watcher=watcher)
    show(report, case_set, make_console(stderr=arguments.json == "-"))
    write_json(to_json(report, case_set, target), arguments.json)
    if report.interrupted:
        return INTERRUPTED
    return 0 if report.proven else DIFFERENT


def _budget(arguments: argparse.Namespace) -> float | None:
    budget_s: float | None = arguments.budget
    if budget_s is None:
        return None if arguments.full else DEFAULT_BUDGET_S
    if not (math.isfinite(budget_s) and budget_s > 0):
        raise ConfigError(f"--budget is {budget_s}.", "Give a number of seconds above 0.")
    return budget_s


# ---------------------------------------------------------------------------------------------------- race


def _race(arguments: argparse.Namespace) -> int:
    """Run the race, and write its table where it is wanted."""
    config = EngineConfig(drafters=_drafters(arguments), num_threads=arguments.threads)
    check_writable(arguments.json)
    screen = make_console(stderr=arguments.json == "-")
    outcome = race_command.race(arguments, config, screen=screen, errors=make_console(stderr=True))
    write_json(outcome.describe(), arguments.json)
    if outcome.interrupted:
        return INTERRUPTED
    if not outcome.is_same:
        return DIFFERENT
    return FAILED if outcome.errors else 0


if __name__ == "__main__":
    sys.exit(main())

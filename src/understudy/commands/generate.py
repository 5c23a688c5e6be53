"""`understudy generate`: continue a prompt, or show speculation off and on side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy.commands.model_arguments import add_drafters, add_model_arguments, engine_config, load
from understudy.commands.result import DIFFERENT, FAILED, make_console
from understudy.commands.teller import Teller
from understudy.config import EngineConfig
from understudy.core.request import Output, SamplingParams
from understudy.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from understudy.bench.prompts import Prompt

COMPARED_CLASSES = ("code", "summarization", "rag")

_EXAMPLES = """examples:
  understudy generate "What is a lighthouse for?"
  understudy generate --raw --max-tokens 40 "Once upon a time"
  understudy generate --json --n 2 --temperature 1 "Name a colour."
  understudy generate --model path/to/model --draft path/to/smaller --weights int8 "Name three rivers."
  understudy generate --compare --max-tokens 64
"""


def add_generate(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=generate)
    add = parser.add_argument
    add(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; - reads the standard input, and so does nothing, but for --compare",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest word (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest words up to this probability")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest words (default: 0, all)")
    add("--seed", type=int, metavar="N", help="repeats an answer at any temperature (default: drawn, and told)")
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: 256, with --compare 128)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--n", type=int, default=1, metavar="N", help="number of answers (default: 1)")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object")
    add("--compare", action="store_true", help="speculation off and on side by side; exit code 1 if a text differs")
    models = add_model_arguments(parser, positional=False)
    add_drafters(models)
    models.add_argument("--no-speculation", action="store_true", help="use no drafter at all")


def generate(arguments: argparse.Namespace) -> int:
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
    if arguments.no_speculation:
        if arguments.drafters not in (None, "none"):
            raise ConfigError("--no-speculation and --drafters contradict each other.", "Give one of the two.")
        arguments.drafters = "none"
    config = engine_config(arguments)
    if arguments.compare:
        return _compare(arguments, sampling, config)
    prompt = _prompt(_read_prompt(arguments), raw=arguments.raw)
    return _answer(arguments, prompt, sampling, config)


def _answer(arguments: argparse.Namespace, prompt: Prompt, sampling: SamplingParams, config: EngineConfig) -> int:
    from understudy.bench.prompts import prompt_ids
    from understudy.llm import LLM
    from understudy.terminal import Waiting, result_json, summary

    console = make_console(stderr=True)
    teller = Teller(console)
    target = load(arguments.model, config, console=console, emit=teller)
    with Waiting(console, "measuring what a row costs"):
        llm = LLM(target=target, config=config, emit=teller)
    streams = not arguments.json and sampling.n == 1
    with Waiting(console, "reading the prompt") as waiting:

        def on_output(output: Output) -> None:
            if streams:
                waiting.stop()
                print(output.text, end="", flush=True)

        started = time.perf_counter()
        request = llm.request(prompt_ids(prompt, target), sampling)
        (result,) = llm.run([request], on_output=on_output)
        seconds = time.perf_counter() - started
    if arguments.json:
        print(json.dumps(result_json(result, target.name, seconds), indent=2))
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


def _compare(arguments: argparse.Namespace, sampling: SamplingParams, config: EngineConfig) -> int:
    """Speculation off and on, in turn, on the given prompt or on three of our own."""
    if not config.drafters or sampling.n != 1:
        raise ConfigError("--compare needs speculation and one answer per prompt.", "Leave out what forbids them.")
    from understudy.bench.prompts import own_prompts, prompt_ids
    from understudy.parity.side_by_side import Question, side_by_side
    from understudy.terminal import Waiting, show_comparisons

    if arguments.prompt is not None:
        named = {"prompt": _prompt(_read_prompt(arguments), raw=arguments.raw)}
    else:
        own = own_prompts()
        named = {name: next(prompt for prompt in own if prompt.prompt_class == name) for name in COMPARED_CLASSES}
    console, out = make_console(stderr=True), make_console(stderr=False)
    teller = Teller(console)
    target = load(arguments.model, config, console=console, emit=teller)
    questions = [Question(name, prompt_ids(prompt, target)) for name, prompt in named.items()]
    if sampling.seed is None:
        sampling = replace(sampling, seed=time.time_ns() % 2**32)
    comparisons = []
    with Waiting(console, "starting") as waiting:
        for comparison in side_by_side(
            target,
            questions,
            sampling,
            drafters=config.drafters,
            draft_tree=config.draft_tree,
            emit=teller,
            watch=waiting.say,
        ):
            comparisons.append(comparison)
            if not arguments.json:
                out.print(f"── {comparison.question.name}", style="bold")
                out.print(comparison.off.answers[0].text, markup=False, soft_wrap=True)
    if arguments.json:
        print(json.dumps([comparison.describe() for comparison in comparisons], indent=2))
    else:
        show_comparisons(comparisons, out)
    return 0 if all(comparison.same for comparison in comparisons) else DIFFERENT

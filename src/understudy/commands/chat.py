"""`understudy chat`: talk to a running server from a terminal, or through a pipe, one question per line."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from understudy.commands.api_key import key_from
from understudy.commands.result import FAILED, make_console
from understudy.core.request import SamplingParams
from understudy.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from understudy.client import Endpoint, Said

DEFAULT_URL = "http://127.0.0.1:8000/v1"
DEFAULT_KEY_VARIABLE = "UNDERSTUDY_API_KEY"

_EXAMPLES = """examples:
  understudy chat
  understudy chat --system "Answer in one sentence." --temperature 0.7 --seed 7
  understudy chat --url https://example.org/v1 --api-key-env MY_KEY --model some-model
  printf 'Name a colour.\\nAnd another.\\n' | understudy chat

while chatting:
  /reset  /seed N  /temperature T  /speculation on|off  /help  /exit
  Ctrl-C stops an answer, Ctrl-D leaves
"""
_HELP = (
    "/reset forgets the conversation; /seed N and /temperature T draw differently; "
    "/speculation on|off asks with or without drafts; /exit leaves. "
    "A line that begins with a space is sent as it is."
)


def add_chat(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running server",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=chat)
    add = parser.add_argument
    add("--url", metavar="URL", help=f"where the server is (default: {DEFAULT_URL})")
    add(
        "--api-key-env",
        metavar="VAR",
        help=f"environment variable that holds the key (default: {DEFAULT_KEY_VARIABLE}, if it is set and no --url is)",
    )
    add("--model", metavar="NAME", help="the model to ask (default: the only one there)")
    add("--system", metavar="TEXT", help="what the model is told before the conversation")
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest word (default: the server's)")
    add("--seed", type=int, metavar="N", help="repeats an answer at any temperature")
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    add("--no-speculation", action="store_true", help="ask for answers without drafts: the words are the same")


def chat(arguments: argparse.Namespace) -> int:
    """Check what was asked for, find the server, and talk until the input ends."""
    from understudy.client import Endpoint

    settings = Settings(
        temperature=arguments.temperature,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        speculation=not arguments.no_speculation,
    )
    variable = arguments.api_key_env
    if variable is None and arguments.url is None and os.environ.get(DEFAULT_KEY_VARIABLE):
        variable = DEFAULT_KEY_VARIABLE
    endpoint = Endpoint(arguments.url or DEFAULT_URL, key_from(variable))
    model = _find_model(endpoint, arguments.model, is_default=arguments.url is None)
    talk = Talk(endpoint, model, settings, arguments.system)
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(make_console(stderr=True), is_terminal=is_terminal)
    if is_terminal:
        screen.tell(f"{model} at {endpoint.url}. /help says what can be done; Ctrl-D leaves.")
    return _converse(talk, screen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How answers are drawn; None leaves it to the server."""

    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        SamplingParams(**self._given())  # refuses what no server would take

    def fields(self) -> dict[str, Any]:
        """The fields of a request that say so."""
        return self._given() | ({} if self.speculation else {"speculation": {"enabled": False}})

    def _given(self) -> dict[str, Any]:
        named = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(slots=True)
class Talk:
    """A conversation with a server. A question that got no answer at all is forgotten."""

    endpoint: Endpoint
    model: str
    settings: Settings
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str, on_text: Callable[[str], None], now: Callable[[], float]) -> Said:
        """Ask, with all that was said before. If it is interrupted, what was said until then is kept."""
        from understudy.client import listen

        asked = {"role": "user", "content": question}
        pieces: list[str] = []

        def hear(text: str) -> None:
            pieces.append(text)
            on_text(text)

        connection = self.endpoint.connect()
        try:
            response = self.endpoint.send(connection, "/chat/completions", self._body(asked))
            return listen(response, now, hear)
        finally:
            connection.close()  # a server aborts an answer that nobody reads
            if pieces:
                self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def _body(self, asked: dict[str, str]) -> dict[str, Any]:
        before = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*before, *self.messages, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            "include_metrics": True,
            **self.settings.fields(),
        }


@dataclass(slots=True)
class Screen:
    """Where answers and remarks are written. Through a pipe the answers stand alone on the standard output."""

    remarks: Console
    is_terminal: bool

    def lines(self) -> Iterator[str]:
        """Yield what the user types, until the end. Ctrl-C throws a half-typed line away."""
        if not self.is_terminal:
            yield from (line.rstrip("\r\n") for line in sys.stdin or ())
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # editing and history
        while True:
            try:
                yield input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()

    def write(self, text: str) -> None:
        """Write a piece of an answer: as text, never as something that a terminal obeys."""
        from understudy.terminal import sanitised

        print(sanitised(text, sys.stdout.encoding), end="", flush=True)

    def tell(self, text: str, style: str = "dim") -> None:
        """Say something about the conversation."""
        from understudy.terminal import sanitised

        self.remarks.print(sanitised(text, self.remarks.encoding), style=style, markup=False, soft_wrap=True)


def _find_model(endpoint: Endpoint, wanted: str | None, *, is_default: bool) -> str:
    from understudy.client import RequestFailed, find_model

    if is_default:
        try:
            endpoint.connect().close()
        except RequestFailed:
            raise ConfigError(
                f"No server answers at {endpoint.url}.",
                "Start one with `understudy serve`, or say where one is with --url.",
            ) from None
    return find_model(endpoint, wanted)


def _converse(talk: Talk, screen: Screen) -> int:
    code = 0
    for line in screen.lines():
        if line.startswith("/"):
            if not _obey(line, talk, screen):
                break
        elif line.strip():
            code = max(code, _answer(line.strip(), talk, screen))
    return 0 if screen.is_terminal else code


def _answer(question: str, talk: Talk, screen: Screen) -> int:
    """Ask, and write the answer as it comes."""
    from understudy.client import RequestFailed
    from understudy.terminal import Waiting

    started = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - started

    with Waiting(screen.remarks, "reading the question") as waiting:

        def on_text(text: str) -> None:
            waiting.stop()
            screen.write(text)

        try:
            said = talk.ask(question, on_text, now)
        except KeyboardInterrupt:
            if not screen.is_terminal:
                raise
            waiting.stop()
            print()
            screen.tell("stopped")
            return 0
        except (RequestFailed, OSError, http.client.HTTPException, ValueError) as error:
            waiting.stop()
            screen.tell(f"error: {talk.endpoint.without_key(str(error) or type(error).__name__)}", "red")
            return FAILED
    print()
    screen.tell(summary(said, now()))
    return 0


def summary(said: Said, seconds: float) -> str:
    """Say in one line how fast an answer came, and what speculation did for it if the server tells."""
    num_tokens = len(said.pieces) if said.num_tokens is None else said.num_tokens
    parts = [f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"]
    if said.first_s is not None:
        parts.append(f"first after {said.first_s * 1000:.0f} ms")
    if said.counts is not None:
        # each cycle says one word beyond the accepted ones
        num_cycles = max(1, num_tokens - said.counts.accepted)
        parts.append(f"{num_tokens / num_cycles:.2f} tokens per cycle")
        parts.append(f"{said.counts.accepted} of {said.counts.drafted} drafted tokens accepted")
    return "; ".join(parts)


def _obey(line: str, talk: Talk, screen: Screen) -> bool:
    """Do what a command says; return whether the conversation goes on."""
    name, _, value = line.strip().partition(" ")
    value = value.strip()
    try:
        match name:
            case "/exit":
                return False
            case "/reset":
                talk.messages.clear()
                screen.tell("The conversation is forgotten.")
            case "/seed":
                talk.settings = replace(talk.settings, seed=int(value))
            case "/temperature":
                talk.settings = replace(talk.settings, temperature=float(value))
            case "/speculation" if value in ("on", "off"):
                talk.settings = replace(talk.settings, speculation=value == "on")
            case "/help":
                screen.tell(_HELP)
            case _:
                screen.tell(f"{line.strip()[:40]!r} is no command. {_HELP}", "red")
    except InvalidRequest as error:
        screen.tell(str(error), "red")
    except ValueError:
        screen.tell(f"{name} takes a number, not {value[:40]!r}.", "red")
    return True

"""Prompts to measure and to prove with: our own, or a user's file of JSON lines.

A line holds one of three things, and may name its workload class as `class` or `category`:

    {"prompt": "…"}                                          a plain text to continue
    {"messages": [{"role": "user", "content": "…"}, …]}      a conversation to answer
    {"turns": ["…", …]}                                      a user's turns; only the first is asked

Of `turns` only the first is taken: the later ones answer a reply that is not in the file, so every model would be
asked something else. Other keys (`question_id`, `reference`, …) are let through, as the published sets carry them.

No torch in here: a prompt is plain data until somebody's tokenizer makes token ids of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, Protocol

from understudy.errors import ConfigError, InvalidRequest
from understudy.text.chat import check_messages, render
from understudy.text.tokenizer import Tokenizer

OWN_PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
CLASSES = ("code", "structured", "chat", "summarization", "rag", "math", "multilingual", "creative")
"""The workload classes of our own prompts, nine of each: an odd number, so that a median is one prompt's."""
KINDS = ("prompt", "messages", "turns")
FORM = 'Write one object per line: {"prompt": "…"}, {"messages": […]} or {"turns": […]}.'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to ask: a conversation (`messages`) or a plain `text`, never both."""

    prompt_class: str = "other"
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    turns: tuple[str, ...] = ()
    """All the turns of the line, where it had some; `messages` holds the first of them."""


class HasTokenizer(Protocol):
    """Anything with a tokenizer, such as a loaded target."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into token ids, and knows the model's chat template."""


def own_prompts() -> list[Prompt]:
    """Give the project's own prompts, nine of each class."""
    return load_prompts(OWN_PROMPTS)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a file of JSON lines; whatever is wrong with it is an error that names the file and the line."""
    file = Path(path)
    prompts = [_parse(line, f"{file}, line {number}") for number, line in _lines(file)]
    if not prompts:
        raise ConfigError(f"{file} holds no prompts.", FORM)
    return prompts


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Choose `count` prompts, one of each class in turn, so that a few stand for all."""
    by_class: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_class.setdefault(prompt.prompt_class, []).append(prompt)
    in_turn = (prompt for row in zip_longest(*by_class.values()) for prompt in row if prompt is not None)
    return list(in_turn)[:count]


def prompt_ids(prompt: Prompt, target: HasTokenizer) -> tuple[int, ...]:
    """Turn a prompt into token ids: a conversation by the model's chat template, or as plain text if it has none."""
    tokenizer = target.tokenizer
    if prompt.messages and tokenizer.chat_template is not None:
        text = render(
            tokenizer.chat_template, prompt.messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
        )
        return tuple(tokenizer.encode(text, add_special=False))
    return tuple(tokenizer.encode(_plain_text(prompt)))


def _plain_text(prompt: Prompt) -> str:
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(str(message["content"]) for message in check_messages(prompt.messages))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers. Only a line feed ends a line, as JSON lines demand."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InvalidRequest(
                        f"{file}, line {number}: byte {error.start} is not UTF-8.", "Save the file as UTF-8."
                    ) from None
                if text.strip():
                    yield number, text
    except (OSError, ValueError) as error:  # a ValueError is a path that no system could have
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}.", "Give a file of JSON lines.") from None


def _parse(line: str, where: str) -> Prompt:
    value = _object(line, where)
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "has neither prompt nor messages nor turns"
        _refuse(where, f"{found}.", FORM)
    prompt_class = value.get("class", value.get("category", "other"))
    if not isinstance(prompt_class, str) or not prompt_class.strip():
        _refuse(where, f"the class is {_short(prompt_class)}.", "Give a word, or leave it out.")
    content = value[kinds[0]]
    if kinds[0] == "prompt":
        return Prompt(prompt_class, text=_text(content, "prompt", where))
    if kinds[0] == "turns":
        return _from_turns(content, prompt_class, where)
    try:
        return Prompt(prompt_class, messages=tuple(check_messages(content)))
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", error.remedy, parameter=error.parameter) from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except RecursionError:
        _refuse(where, "this is nested too deeply.", FORM)
    except ValueError as error:
        _refuse(where, f"this is not JSON: {error}.", FORM)
    if not isinstance(value, dict):
        _refuse(where, f"this is {_short(value)} and no object.", FORM)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        _refuse(where, "the text has a lone surrogate.", "Write text that can be stored as UTF-8.")
    return value


def _from_turns(turns: object, prompt_class: str, where: str) -> Prompt:
    if not isinstance(turns, list) or not turns:
        _refuse(where, f"turns is {_short(turns)}.", "Give a list with at least one text.")
    texts = tuple(_text(turn, f"turns[{place}]", where) for place, turn in enumerate(turns))
    return Prompt(prompt_class, messages=({"role": "user", "content": texts[0]},), turns=texts)


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        _refuse(where, f"{name} is {_short(value)}.", "Give a text that is not empty.")
    return value


def _short(value: object) -> str:
    written = json.dumps(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _refuse(where: str, what: str, remedy: str) -> NoReturn:
    raise InvalidRequest(f"{where}: {what}", remedy, parameter="prompts")

"""Prompts to distil on, from files as they are published: JSON lines, or one JSON list of objects.

An object is understood by its keys, the first of these that it has:

    messages                 a conversation, as OpenAI's interface takes it
    turns                    a user's turns; only the first is asked
    instruction (and input)  a task and what it is about; the input may also be in the first of `instances`
    question, user_request, prompt    a text

A prompt's class is the object's `class` or `category`, or else the file's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError, InvalidRequest
from understudy.text.chat import check_messages

_KEYS = "messages, turns, instruction, question, user_request or prompt"
_FORM = f"Give JSON lines, or a JSON list, of objects with {_KEYS}."


@dataclass(frozen=True, slots=True)
class TrainPrompt:
    """One conversation to answer."""

    prompt_class: str
    messages: tuple[Mapping[str, Any], ...]


def read_prompts(places: Sequence[str | Path]) -> list[TrainPrompt]:
    """Read files, and all .json and .jsonl files of folders; the same prompt is taken once."""
    prompts: dict[str, TrainPrompt] = {}
    for file in _files(places):
        for number, value in enumerate(_objects(file), start=1):
            prompt = _prompt(value, file, number)
            prompts.setdefault(json.dumps(prompt.messages, sort_keys=True), prompt)
    if not prompts:
        raise ConfigError("There are no prompts to train on.", _FORM)
    return list(prompts.values())


def _files(places: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            files.extend(sorted(path for path in place.iterdir() if path.suffix in (".json", ".jsonl")))
        elif place.is_file():
            files.append(place)
        else:
            raise ConfigError(f"There is no file or folder {place}.", "Name files of prompts, or folders of them.")
    return files


def _objects(file: Path) -> list[Any]:
    """All objects of a file: a list if it begins like one, else one object on each line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            found = json.loads(text)
            return found if isinstance(found, list) else [found]
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", _FORM) from None


def _prompt(value: Any, file: Path, number: int) -> TrainPrompt:
    where = f"{file}, object {number}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: this is no object.", _FORM)
    prompt_class = value.get("class", value.get("category", file.stem))
    if "messages" in value:
        try:
            return TrainPrompt(str(prompt_class), tuple(check_messages(value["messages"])))
        except InvalidRequest as error:
            raise ConfigError(f"{where}: {error.message}", error.remedy) from None
    text = _text(value)
    if text is None:
        raise ConfigError(f"{where}: it has no text under {_KEYS}.", _FORM)
    return TrainPrompt(str(prompt_class), ({"role": "user", "content": text},))


def _text(value: Mapping[str, Any]) -> str | None:
    if "turns" in value:
        turns = value["turns"]
        return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) else None
    if "instruction" in value:
        given = [value["instruction"], value.get("input") or _first_input(value.get("instances"))]
        return "\n\n".join(filter(None, given)) if all(isinstance(part, str) for part in given) else None
    found = next((value[key] for key in ("question", "user_request", "prompt") if key in value), None)
    return found if isinstance(found, str) and found.strip() else None


def _first_input(instances: object) -> str:
    first = instances[0] if isinstance(instances, list) and instances else None
    found = first.get("input") if isinstance(first, Mapping) else None
    return found if isinstance(found, str) else ""

"""Prompts out of a folder of published sets: <class>/<file> of JSON lines, JSON, CSV or TSV, read loosely.

`understudy.bench.prompts` is strict about a user's own file; this takes whatever looks like a user's first words.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from understudy.bench.prompts import Prompt

CONVERSATION_KEYS = ("turns", "messages", "conversations")
TEXT_KEYS = ("prompt", "question", "text", "instruction", "content", "value")
GIVEN_KEYS = ("context", "input")


def read_collection(folder: Path) -> Iterator[Prompt]:
    """Give every prompt of every file; the class is the name of its folder."""
    for file in sorted(path for path in folder.glob("*/*") if path.suffix in READERS):
        for record in READERS[file.suffix](file):
            text = first_words(record)
            if text:
                yield Prompt(file.parent.name, messages=({"role": "user", "content": text},))


def read_json_lines(file: Path) -> Iterator[Any]:
    """One value a line."""
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def read_json(file: Path) -> Iterator[Any]:
    """One list of values; some files of this name hold JSON lines."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        yield from read_json_lines(file)
        return
    yield from value if isinstance(value, list) else [value]


def read_csv(file: Path) -> Iterator[Any]:
    """Rows by the names in the first line."""
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def read_tsv(file: Path) -> Iterator[Any]:
    """The first column of files that have no header."""
    with file.open(encoding="utf-8", newline="") as lines:
        yield from (row[0] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if row)


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
}


def first_words(value: Any) -> str:
    """Find what the user says first in a record of some published set; empty where there is nothing of the kind."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return first_words(value[0]) if value else ""
    if not isinstance(value, Mapping):
        return ""
    for key in CONVERSATION_KEYS:
        if value.get(key):
            return first_words(value[key])
    text = next((first_words(value[key]) for key in TEXT_KEYS if value.get(key)), "")
    given = next((first_words(value[key]) for key in GIVEN_KEYS if value.get(key)), "")
    return f"{given}\n\n{text}" if given and text else text

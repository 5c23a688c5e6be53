"""Files of JSON lines, and our own prompts as the plain texts that benchmarks read from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.bench.prompts import own_prompts


def texts_of(prompt_class: str) -> list[str]:
    """What users say first in the prompts of one class."""
    return [
        next(message["content"] for message in prompt.messages if message["role"] == "user")
        if prompt.messages
        else prompt.text
        for prompt in own_prompts()
        if prompt.prompt_class == prompt_class
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

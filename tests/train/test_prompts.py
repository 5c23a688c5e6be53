"""Prompts as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.train.prompts import read_prompts


def write(file: Path, *values: Any, as_list: bool = False) -> Path:
    text = json.dumps(list(values)) if as_list else "".join(json.dumps(value) + "\n" for value in values)
    file.write_text(text)
    return file


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"prompt": "Say it."}, "Say it."),
        ({"question": "How many?", "answer": "3"}, "How many?"),
        ({"user_request": "Book it.", "id": "1"}, "Book it."),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2"),
        ({"instruction": "Add.", "instances": [{"input": "1, 2"}]}, "Add.\n\n1, 2"),
        ({"turns": ["First.", "Second."]}, "First."),
        ({"messages": [{"role": "user", "content": "Hello."}]}, "Hello."),
    ],
)
def test_every_form(value: dict[str, Any], text: str, as_list: bool, tmp_path: Path) -> None:
    (prompt,) = read_prompts([write(tmp_path / "some.jsonl", value, as_list=as_list)])
    assert [dict(message) for message in prompt.messages] == [{"role": "user", "content": text}]
    assert prompt.prompt_class == "some"


def test_a_task_without_an_input_is_the_task_alone(tmp_path: Path) -> None:
    for place, value in enumerate(({"instruction": "Sing."}, {"instruction": "Sing.", "input": ""})):
        (prompt,) = read_prompts([write(tmp_path / f"{place}.jsonl", value)])
        assert prompt.messages[0]["content"] == "Sing."


def test_folders_classes_and_repetitions(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "One."}, {"prompt": "Two.", "class": "counting"})
    write(tmp_path / "b.json", {"prompt": "One."}, {"prompt": "Three."}, as_list=True)
    (tmp_path / "notes.txt").write_text("not this")
    found = [(prompt.prompt_class, prompt.messages[0]["content"]) for prompt in read_prompts([tmp_path])]
    assert found == [("a", "One."), ("counting", "Two."), ("b", "Three.")]


@pytest.mark.parametrize("content", ["nonsense", "[1]", '{"other": 1}', '{"prompt": 3}', '{"messages": []}', ""])
def test_what_cannot_be_asked_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError):
        read_prompts([tmp_path / "a.jsonl"])
    with pytest.raises(ConfigError, match="no file or folder"):
        read_prompts([tmp_path / "missing"])

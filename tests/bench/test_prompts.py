import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from understudy.bench.prompts import CLASSES, Prompt, load_prompts, own_prompts, prompt_ids, spread
from understudy.errors import ConfigError, InvalidRequest, UnderstudyError
from understudy.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    tokenizer: Tokenizer


def _write(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def _text(prompt: Prompt) -> str:
    return prompt.text or "\n".join(message["content"] for message in prompt.messages)


def test_our_own_prompts_are_nine_of_each_class_and_all_different() -> None:
    """An odd number: the median first word of a class is one prompt's, and not the gap between two of other lengths."""
    prompts = own_prompts()
    assert Counter(prompt.prompt_class for prompt in prompts) == dict.fromkeys(CLASSES, 9)
    assert len({_text(prompt) for prompt in prompts}) == 72
    assert all(bool(prompt.messages) != bool(prompt.text) for prompt in prompts)


@pytest.mark.parametrize("prompt_class", ["summarization", "rag"])
def test_passages_are_long_enough_to_copy_from(prompt_class: str) -> None:
    for prompt in own_prompts():
        if prompt.prompt_class == prompt_class:
            assert 120 <= len(_text(prompt).split()) <= 320


def test_the_three_forms_of_a_line(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    file = _write(
        tmp_path,
        {"prompt": "Once"},
        "",
        {"messages": messages, "class": "chat"},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."], "reference": []},
        "   ",
    )
    plain, conversation, turns = load_prompts(file)
    assert plain == Prompt("other", text="Once")
    assert conversation.prompt_class == "chat"
    assert list(conversation.messages) == messages
    assert turns.prompt_class == "writing"
    assert turns.turns == ("First.", "Second.")
    assert turns.messages == ({"role": "user", "content": "First."},)


def test_line_ends_byte_order_marks_and_unusual_separators_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\ufeff".encode() + b'{"prompt": "a"}\r\n' + '{"prompt": "b\u2028c\u0085"}'.encode())
    assert [prompt.text for prompt in load_prompts(file)] == ["a", "b\u2028c\u0085"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('["prompt"]', "no object"),
        ("null", "no object"),
        ({}, "neither prompt nor messages nor turns"),
        ({"text": "a"}, "neither prompt nor messages nor turns"),
        ({"prompt": "a", "messages": []}, "prompt and messages"),
        ({"prompt": ""}, "prompt is"),
        ({"prompt": 7}, "prompt is 7"),
        ({"prompt": None}, "prompt is null"),
        ({"prompt": ["a"]}, "prompt is"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "no text content"),
        ({"messages": [{"content": "a"}]}, "no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"turns": []}, "turns is"),
        ({"turns": "a"}, "turns is"),
        ({"turns": ["a", 3]}, "turns[1]"),
        ({"prompt": "a", "class": 3}, "class is 3"),
        ({"prompt": "a", "category": ""}, "class is"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "lone surrogate"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, what: str) -> None:
    file = _write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(InvalidRequest) as raised:
        load_prompts(file)
    assert what in str(raised.value)
    assert f"{file}, line 2" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(InvalidRequest, match=r"line 2: byte 12 is not UTF-8"):
        load_prompts(file)


def test_an_empty_file_a_missing_one_and_a_folder(tmp_path: Path) -> None:
    empty = _write(tmp_path, "", "  ")
    for path, what in (
        (empty, "holds no prompts"),
        (tmp_path / "gone.jsonl", "cannot be read"),
        (tmp_path, "cannot be read"),
        (tmp_path / ("x" * 5000), "cannot be read"),
        (tmp_path / "a\0b", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_prompts(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_whatever_a_file_holds_the_error_is_ours(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_bytes(content)
        with contextlib.suppress(UnderstudyError):
            assert load_prompts(file)


def test_a_few_prompts_stand_for_all_classes() -> None:
    prompts = own_prompts()
    assert [prompt.prompt_class for prompt in spread(prompts, 8)] == list(CLASSES)
    assert [prompt.prompt_class for prompt in spread(prompts, 10)] == [*CLASSES, *CLASSES[:2]]
    assert sorted(map(_text, spread(prompts, 100))) == sorted(map(_text, prompts))
    uneven = [Prompt("a", text="1"), Prompt("a", text="2"), Prompt("b", text="3")]
    assert [prompt.text for prompt in spread(uneven, 3)] == ["1", "3", "2"]


def test_a_conversation_goes_through_the_template_and_a_text_does_not() -> None:
    model = Model(Tokenizer(tiny_tokenizer(), bos_id=1, eos_ids=(2,), chat_template=CHAT_TEMPLATE))
    conversation = Prompt(messages=({"role": "user", "content": "hello"},))
    ids = prompt_ids(conversation, model)
    assert model.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.tokenizer.decode(prompt_ids(Prompt(text="hello"), model), skip_special=False) == "hello"


def test_without_a_template_a_conversation_is_plain_text() -> None:
    model = Model(Tokenizer(tiny_tokenizer()))
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    assert model.tokenizer.decode(prompt_ids(Prompt(messages=messages), model)) == "Be brief.\n\nWhy?"


def test_prompts_need_no_torch() -> None:
    code = "import sys, understudy.bench.prompts as p; p.own_prompts(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

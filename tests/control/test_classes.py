"""Which class a request is, and how many classes there can be."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.bench.prompts import own_prompts
from understudy.control.classes import (
    INFERRED,
    MOST_CLASSES,
    OTHER,
    BoundedNames,
    ClassNames,
    class_of,
    inferred_class,
    label_of,
)
from understudy.control.planning import AnswerLengths

PARAGRAPH = "The harbour was built of grey stone and takes forty boats, most of which leave before the sun is up. " * 8

FOREIGN_TO_THE_RULE = [
    # written beside the project's own prompts, to see that the rule is no list of those
    ("code", "Why does this throw a NullPointerException?\n\n```java\nString s = null;\ns.length();\n```"),
    ("code", "import os\nimport sys\n\nprint(os.getcwd())"),
    ("code", "Write a recursive function that reverses a linked list, and a unit test for it."),
    ("code", "How do I read a file line by line in Rust?"),
    ("rag", f"Use only the context to answer.\n\nContext: {PARAGRAPH}\n\nQuestion: How many boats are there?"),
    ("rag", f"Documents:\n{PARAGRAPH}\nBased on the documents above, what is the harbour made of?"),
    ("summarization", f"TL;DR please:\n\n{PARAGRAPH}"),
    ("summarization", f"{PARAGRAPH}\n\nGive me the main points of the text above."),
    ("structured", "Give me the five largest cities of Brazil as a JSON array of objects with name and population."),
    ("structured", "Convert to XML: name is Ann, age is 30."),
    ("structured", "Compare tea and coffee in a markdown table with three rows."),
    ("multilingual", "Translate into French: the train is late again."),
    ("multilingual", "¿Cuál es la mejor época para visitar los museos de la ciudad y por qué?"),
    ("multilingual", "请用三句话解释为什么天空是蓝色的。"),
    ("math", "Calculate the area of a circle with radius 7."),
    ("math", "If 5 workers need 12 days, how long do 8 workers need?"),
    ("math", "Find x: 2x^2 - 8 = 0"),
    ("creative", "Write a haiku about rust."),
    ("creative", "Imagine a city that moves every night. Tell me a story that happens there."),
    ("chat", "What should I wear to a wedding in October?"),
    ("chat", "Is it rude to leave a party without saying goodbye?"),
    ("chat", "Summarize Hamlet."),
    ("chat", "I got a letter\nfrom the bank about a loan that I never\nimport, so to say. What now?"),
]


def test_rule_agrees_with_the_projects_own_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    confusion: Counter[tuple[str, str]] = Counter()
    for prompt in own_prompts():
        text = prompt.text or "\n".join(message["content"] for message in prompt.messages)
        confusion[prompt.prompt_class, inferred_class(text)] += 1
    print("\nclass          taken for")
    for (said, inferred), count in sorted(confusion.items()):
        print(f"{said:14} {inferred:14} {count}")
    num_right = sum(count for (said, inferred), count in confusion.items() if said == inferred)
    assert num_right >= 0.7 * confusion.total(), capsys.readouterr().out


def test_rule_agrees_with_prompts_it_was_not_made_from() -> None:
    wrong = [(said, text[:40]) for said, text in FOREIGN_TO_THE_RULE if inferred_class(text) != said]
    assert len(wrong) <= 0.3 * len(FOREIGN_TO_THE_RULE), wrong


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog, as they say. " * 70,
        "日本の春 and some words " * 220,
        "word " * 1_000_000,
    ],
    ids=["ascii", "mixed", "megabytes"],
)
def test_rule_is_cheap(text: str) -> None:
    """However long the text, it takes less than to look at each of 4,000 characters once, measured side by side."""
    looked_at = text[:4000]

    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(20):
            work()
        return time.perf_counter() - started

    turns = [(seconds(lambda: inferred_class(text)), seconds(lambda: sum(map(ord, looked_at)))) for _ in range(30)]
    assert min(rule for rule, _ in turns) < min(look for _, look in turns)


def test_middle_of_a_long_text_is_not_looked_at() -> None:
    padding = "so they went on and on without an end in sight " * 100
    assert inferred_class(padding + "\n```python\ndef f():\n" + padding) == inferred_class(padding + padding)


@given(st.text())
def test_any_text_has_a_class(text: str) -> None:
    assert inferred_class(text) in INFERRED


def test_lone_surrogates_are_no_obstacle() -> None:
    assert inferred_class("\ud800 write a poem") == "creative"


def test_header_comes_before_metadata_and_metadata_before_the_text() -> None:
    assert class_of("Support", "billing", text="Write a poem.") == "support"
    assert class_of(None, "billing", text="Write a poem.") == "billing"
    assert class_of("  ", "!!", text="Write a poem.") == "creative", "what leaves no label names no class"


@given(st.text())
def test_labels_hold_nothing_but_letters_digits_and_lines(name: str) -> None:
    label = label_of(name)
    assert re.fullmatch(r"[a-z0-9_-]{0,32}", label)
    assert label_of(label) == label, "a label is its own label"


def test_names_beyond_the_limit_are_other() -> None:
    names = BoundedNames(4, always=("kept",))
    assert [names.known(name) for name in ("a", "b", "c", "a", "kept")] == ["a", "b", OTHER, "a", "kept"]


@given(st.lists(st.text(max_size=4), max_size=200))
def test_classes_are_limited_and_those_of_the_rule_always_have_a_place(names: list[str]) -> None:
    classes = ClassNames()
    assert len({classes.known(name) for name in names} | {OTHER, *INFERRED}) <= MOST_CLASSES
    assert all(classes.known(name) == name for name in INFERRED)


def test_lengths_of_classes_beyond_the_limit_are_learned_together() -> None:
    lengths = AnswerLengths()
    for number in range(40):
        lengths.observe(f"class {number}", 10)
    assert lengths.num_left("class 39", num_generated=0, num_allowed=1000) == pytest.approx(10)
    assert lengths.num_left("never seen", num_generated=0, num_allowed=1000) == pytest.approx(10)
    assert lengths.num_left("chat", num_generated=0, num_allowed=1000) == 1000

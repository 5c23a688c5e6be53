"""Text that comes token by token equals the text decoded at once and cut by the rule."""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.text.test_tokenizer import spm_fields
from tests.tiny_models import tiny_tokenizer
from understudy.text.detokenize import Detokenizer
from understudy.text.tokenizer import Tokenizer

TINY = Tokenizer(tiny_tokenizer(), bos_id=1, eos_ids=(2,))
SENTENCEPIECE = Tokenizer.from_gguf(spm_fields(), eos_ids=(2,))


@dataclass(frozen=True)
class Cut:
    text: str
    stopped: str | None
    num_tokens: int


def oracle(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> Cut:
    """The rule, word for word and slowly: after each token decode everything and look for every stop string."""
    texts = []
    for count in range(1, len(ids) + 2):
        joined = b"".join(map(tokenizer.token_bytes, ids[:count]))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts.append(decoder.decode(joined, final=count > len(ids)))
    for count, text in enumerate(texts, start=1):
        found = [(text.find(string), place) for place, string in enumerate(stop) if string in text]
        if found:
            start, place = min(found)
            return Cut(text[:start], stop[place], min(count, len(ids)))
    return Cut(texts[-1], None, len(ids))


def fed(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], *, at_start: bool = False
) -> tuple[Cut, list[str]]:
    detokenizer = Detokenizer(tokenizer, stop, at_start=at_start)
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.add(token_id))
        if detokenizer.stopped is not None:
            break
    num_tokens = len(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.finish() == ""
    return Cut("".join(pieces), detokenizer.stopped, num_tokens), pieces


texts = st.text(st.sampled_from("abc the\n<|é😀\ufffd"), min_size=1, max_size=5)
token_lists = st.lists(
    st.one_of(
        st.integers(0, 299),
        st.sampled_from(TINY.encode("abc the cat\n<|é😀")),  # tokens that make stop strings likely
    ),
    max_size=30,
)


@given(token_lists, st.lists(texts, max_size=4).map(tuple))
@settings(max_examples=400, deadline=None)
@example(TINY.encode("aab"), ("aab", "ab"))
@example(TINY.encode("abcabd"), ("abd", "cab"))
@example(TINY.encode("é")[:1], ("\ufffd",))
def test_equals_the_oracle(ids: list[int], stop: tuple[str, ...]) -> None:
    found, _ = fed(TINY, ids, stop)
    assert found == oracle(TINY, ids, stop)


@given(st.lists(st.integers(0, 272), max_size=20), st.lists(texts, max_size=2).map(tuple))
@settings(max_examples=100, deadline=None)
def test_sentencepiece_equals_the_oracle(ids: list[int], stop: tuple[str, ...]) -> None:
    found, _ = fed(SENTENCEPIECE, ids, stop)
    assert found == oracle(SENTENCEPIECE, ids, stop)


@given(st.lists(st.integers(0, 299), max_size=30))
@settings(max_examples=100, deadline=None)
def test_without_stops_it_is_decoding(ids: list[int]) -> None:
    assert fed(TINY, ids, ())[0].text == TINY.decode(ids)


@given(st.lists(st.lists(st.integers(0, 272), min_size=1, max_size=6), max_size=6), st.booleans())
@settings(max_examples=100, deadline=None)
def test_many_at_once_are_as_one_by_one(runs: list[list[int]], at_start: bool) -> None:
    many, single = (Detokenizer(SENTENCEPIECE, at_start=at_start) for _ in range(2))
    assert not many.may_stop
    for ids in runs:
        assert many.add_all(ids) == "".join(map(single.add, ids))
    assert many.finish() == single.finish()


@given(token_lists, st.lists(texts, max_size=4).map(tuple))
@settings(max_examples=100, deadline=None)
def test_what_was_released_stays(ids: list[int], stop: tuple[str, ...]) -> None:
    """Whatever comes next, the text so far is a beginning of the text in the end."""
    _, pieces = fed(TINY, ids, stop)
    for count in range(len(ids)):
        shorter, _ = fed(TINY, ids[:count], stop)
        assert shorter.text.startswith("".join(pieces[:count]))


def pieces_of(text: str, stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    """Feed one byte at a time, whatever tokens the text would have."""
    byte_ids = [token_id for byte in text.encode() for token_id in BYTE_IDS[byte]]
    detokenizer = Detokenizer(TINY, stop)
    pieces = [detokenizer.add(token_id) for token_id in byte_ids]
    return [*pieces, detokenizer.finish()], detokenizer.stopped


BYTE_IDS = {TINY.token_bytes(n)[0]: [n] for n in range(300) if len(TINY.token_bytes(n)) == 1}


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "stopped"),
    [
        ("ab", (), ["a", "b", ""], None),
        ("é!", (), ["", "é", "!", ""], None),
        ("abc", ("bc",), ["a", "", "", ""], "bc"),
        ("abd", ("bc",), ["a", "", "bd", ""], None),
        ("ab", ("bc",), ["a", "", "b"], None),
        ("aaab", ("aab",), ["", "", "a", "", ""], "aab"),
        ("abcd", ("bcd", "c"), ["a", "", "b", "", ""], "c"),  # c is complete before bcd
        ("ab", ("b", "ab"), ["", "", ""], "ab"),  # complete together: the earlier start wins
        ("abb", ("ab", "abb"), ["", "", "", ""], "ab"),
    ],
)
def test_held_back_and_cut(text: str, stop: tuple[str, ...], pieces: list[str], stopped: str | None) -> None:
    assert pieces_of(text, stop) == (pieces, stopped)


def test_on_one_start_the_string_listed_first_is_named() -> None:
    (the,) = TINY.encode("the")
    for stop in (("th", "the"), ("the", "th")):
        detokenizer = Detokenizer(TINY, stop)
        assert detokenizer.add(the) == ""
        assert detokenizer.stopped == stop[0]


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = Detokenizer(TINY, ("the",))
    for token_id in TINY.encode("a the cat"):
        detokenizer.add(token_id)
    assert (detokenizer.add(BYTE_IDS[ord("x")][0]), detokenizer.finish(), detokenizer.stopped) == ("", "", "the")


def test_unfinished_characters_are_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(TINY)
    assert "".join(detokenizer.add(BYTE_IDS[byte][0]) for byte in "😀".encode()[:3]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_add_nothing_and_part_no_stop_string() -> None:
    detokenizer = Detokenizer(TINY, ("ab",))
    assert [detokenizer.add(token_id) for token_id in (*BYTE_IDS[ord("a")], 1, *BYTE_IDS[ord("b")])] == [""] * 3
    assert detokenizer.stopped == "ab"


def test_leading_space_of_sentencepiece() -> None:
    ids = SENTENCEPIECE.encode("the cat")
    assert fed(SENTENCEPIECE, ids, (), at_start=True)[0].text == SENTENCEPIECE.decode(ids) == "the cat"
    assert fed(SENTENCEPIECE, ids, ())[0].text == " the cat"


def test_cost_does_not_grow_with_the_text() -> None:
    """Near misses all along, and the last tokens cost what the first ones did."""
    detokenizer = Detokenizer(TINY, ("a" * 50 + "b", "ab", "x" * 1000))
    token_id = BYTE_IDS[ord("a")][0]

    def time_of(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            detokenizer.add(token_id)
        return time.perf_counter() - start_s

    first_s = time_of(5000)
    for _ in range(20):
        last_s = time_of(5000)
    assert last_s < 5 * first_s + 0.05

"""The automaton against a scan of its texts, on small alphabets where everything repeats."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.drafters.automaton import (
    COUNT,
    LAST_END,
    LENGTH,
    LINK,
    MAX_HOPS,
    NONE,
    NUM_EDGES,
    NUM_STATES,
    OWNER,
    ROOT,
    TARGET,
    TOKEN,
    Automaton,
    Ints,
)

Text = list[int]
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_HOPS - 4)


def array(tokens: Text) -> Ints:
    return np.array(tokens, np.int32)


def automaton_of(texts: list[Text]) -> Automaton:
    automaton = Automaton(capacity_tokens=1)  # so that it doubles on the way
    for text in texts:
        automaton.learn(array(text))
    return automaton


def transitions(automaton: Automaton) -> dict[tuple[int, int], int]:
    """(state, token) -> state, from the edges themselves and not from the table."""
    edges = automaton.edges[: automaton.header[NUM_EDGES]]
    return {(int(e[OWNER]), int(e[TOKEN])): int(e[TARGET]) for e in edges}


def state_of(automaton: Automaton, string: Text) -> int | None:
    moves = transitions(automaton)
    state: int | None = ROOT
    for token in string:
        state = None if state is None else moves.get((state, token))
    return state


def ends(texts: list[Text], string: Text) -> list[int]:
    """Where the string ends, with positions counted through all texts."""
    found: list[int] = []
    offset = 0
    for text in texts:
        places = range(len(string), len(text) + 1)
        found += [offset + end - 1 for end in places if text[end - len(string) : end] == string]
        offset += len(text)
    return found


def substrings(texts: list[Text]) -> set[tuple[int, ...]]:
    return {
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, len(text) + 1)
    }


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3))
def test_knows_every_substring_its_count_and_its_last_place_and_no_other(texts: list[Text]) -> None:
    automaton = automaton_of(texts)
    moves = transitions(automaton)
    known = substrings(texts)
    reached: dict[tuple[int, ...], int] = {(): ROOT}
    for string in sorted(known, key=len):
        state = reached[string] = moves[reached[string[:-1]], string[-1]]
        where = ends(texts, list(string))
        assert automaton.states[state, COUNT] == len(where)
        assert automaton.states[state, LAST_END] == where[-1]
        shortest = automaton.states[automaton.states[state, LINK], LENGTH] + 1
        assert shortest <= len(string) <= automaton.states[state, LENGTH]
    # No path beyond the substrings: in particular none from one text into the next.
    for string, state in reached.items():
        assert {token for owner, token in moves if owner == state} == {t for t in range(3) if (*string, t) in known}
    num_tokens = sum(map(len, texts))
    assert automaton.num_tokens == num_tokens
    assert automaton.header[NUM_STATES] <= 2 * num_tokens + 1
    assert automaton.header[NUM_EDGES] <= 3 * num_tokens


@settings(deadline=None, max_examples=60)
@given(text=TEXT, step=st.integers(1, 9), max_match=st.integers(1, 8))
def test_read_finds_the_longest_suffix_that_occurs_earlier(text: Text, step: int, max_match: int) -> None:
    automaton = Automaton(capacity_tokens=1)
    for begin in range(0, len(text), step):
        state, length = automaton.read(array(text[begin : begin + step]), max_match)
        so_far = text[: begin + step]
        assert length == max(
            n for n in range(min(max_match, len(so_far) - 1) + 1) if n == 0 or ends([so_far[:-1]], so_far[-n:])
        )
        assert state == state_of(automaton, so_far[len(so_far) - length :])


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), outside=TEXT, step=st.integers(1, 9), max_match=st.integers(1, 8))
def test_follow_finds_the_longest_suffix_that_something_followed(
    texts: list[Text], outside: Text, step: int, max_match: int
) -> None:
    automaton = automaton_of(texts)
    followed = [text[:-1] for text in texts]
    state, length = ROOT, 0
    for begin in range(0, len(outside), step):
        state, length = automaton.follow(state, length, array(outside[begin : begin + step]), max_match)
        so_far = outside[: begin + step]
        assert length == max(n for n in range(min(max_match, len(so_far)) + 1) if n == 0 or ends(followed, so_far[-n:]))
        assert state == state_of(automaton, so_far[len(so_far) - length :])


def test_token_ids_may_use_all_31_bits() -> None:
    text = [2**31 - 1, 0, 2**31 - 2, 2**31 - 1, 0]
    automaton = Automaton()
    assert automaton.read(array(text), 64) == (state_of(automaton, [2**31 - 1, 0]), 2)


def test_hostile_text_is_read_fast_and_never_counted_too_high() -> None:
    automaton_of([[0, 1]]).follow(ROOT, 0, array([0]), 64)  # compiled
    for text in ([5] * 8192, [1, 2] * 4096, [1, 2, 3, 4] * 1024 + [1, 2] * 2048):
        automaton = Automaton()
        begin = time.perf_counter()
        state, length = automaton.read(array(text), 64)
        assert time.perf_counter() - begin < 0.5
        assert length == 64
        assert state == state_of(automaton, text[-64:])
        for n in (1, 2, 64):
            count = automaton.states[state_of(automaton, text[-n:]), COUNT]
            assert MAX_HOPS <= count <= len(ends([text], text[-n:]))
    assert automaton.states[ROOT, LINK] == NONE


def test_many_followers_of_one_token_are_read_fast() -> None:
    text = [token for i in range(4096) for token in (0, i + 1)]
    begin = time.perf_counter()
    automaton = automaton_of([text])
    assert time.perf_counter() - begin < 0.5
    assert automaton.states[state_of(automaton, [0]), COUNT] == 4096

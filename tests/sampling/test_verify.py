"""The walk against an obvious oracle: plain sampling, one word after the other, with the same function of the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.sampling.verify import Verdict, Word, walk, words_along

Text = tuple[int, ...]
Target = Callable[[Text], int]
"""What is said after a text: the target's processed logits and the noise at that position, in one."""

VOCAB_SIZE = 3  # small, so that drafts are often right
many = settings(max_examples=300, deadline=None)


def target_of(seed: int) -> Target:
    """A function of the whole text before a word, as the target is."""
    return lambda text: random.Random(f"{seed} {text}").randrange(VOCAB_SIZE)


def plain(target: Target, prompt: Text, count: int) -> list[int]:
    """The oracle: one word at a time, with no draft anywhere."""
    text = prompt
    for _ in range(count):
        text = (*text, target(text))
    return list(text[len(prompt) :])


def tokens_to(draft: Draft, node: int) -> Text:
    """The drafted tokens from the root's child down to a node, by the parents alone."""
    return () if node == ROOT else (*tokens_to(draft, draft.parents[node]), draft.tokens[node])


def row_sampler(target: Target, prompt: Text, draft: Draft, called: list[int] | None = None) -> Callable[[int], int]:
    """What the forward pass gives: each row's word, as if the node's ancestors were the text."""

    def sample(row: int) -> int:
        if called is not None:
            called.append(row)
        return target(prompt + tokens_to(draft, row - 1))

    return sample


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 20) -> Draft:
    """Any tree with one child per token under a parent, in any topological order."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(ROOT, node - 1)), draw(st.integers(0, VOCAB_SIZE - 1))
        if parent < len(tokens) and (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(tuple(tokens), tuple(parents), (0.5,) * len(tokens), ("test",) * len(tokens))


def chain(tokens: list[int]) -> Draft:
    return Draft.chain(tokens, confidence=[0.5] * len(tokens), source="test")


def said_by(draft: Draft, words: list[int]) -> Iterator[Word]:
    """Walk where the target says `words` one after the other, whatever the row."""
    rest = iter(words)
    return walk(draft, lambda row: next(rest))


class TestWords:
    @many
    @given(st.integers(0, 10**6), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), trees())
    def test_they_are_the_plain_ones(self, seed: int, prompt: list[int], draft: Draft) -> None:
        target, text = target_of(seed), tuple(prompt)
        words = [word.token for word in walk(draft, row_sampler(target, text, draft))]
        assert words == plain(target, text, len(words))

    @many
    @given(st.integers(0, 10**6), st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5), max_size=8))
    def test_cycle_after_cycle_with_chains(self, seed: int, guesses: list[list[int]]) -> None:
        target, text = target_of(seed), ()
        for guess in guesses:
            draft = chain(guess)
            text += tuple(word.token for word in walk(draft, row_sampler(target, text, draft)))
        assert list(text) == plain(target, (), len(text))
        assert len(text) >= len(guesses)

    @many
    @given(st.integers(0, 10**6), trees())
    def test_as_many_as_the_draft_foresaw_and_one_more(self, seed: int, draft: Draft) -> None:
        """The longest beginning of the plain text that is a path of the draft is accepted, and the bonus follows."""
        paths = {tokens_to(draft, node) for node in range(len(draft))}
        text = tuple(plain(target_of(seed), (), draft.depth + 1))
        foreseen = max((end for end in range(draft.depth + 1) if text[:end] in paths), default=0)
        words = list(walk(draft, row_sampler(target_of(seed), (), draft)))
        assert len(words) == foreseen + 1
        assert [word.node is not None for word in words] == [True] * foreseen + [False]

    @many
    @given(st.integers(0, 10**6), trees())
    def test_rows_and_nodes_belong_together(self, seed: int, draft: Draft) -> None:
        words = list(walk(draft, row_sampler(target_of(seed), (), draft)))
        at = ROOT
        for word in words:
            assert word.row == at + 1
            if word.node is not None:
                assert draft.parents[word.node] == at
                assert draft.tokens[word.node] == word.token
                at = word.node

    def test_the_empty_draft_is_plain_decoding(self) -> None:
        assert list(walk(EMPTY, lambda row: 7 + row)) == [Word(7, 0, None)]

    def test_a_chain_that_is_right_to_the_end_still_gets_its_bonus(self) -> None:
        assert list(said_by(chain([4, 5]), [4, 5, 6])) == [Word(4, 0, 0), Word(5, 1, 1), Word(6, 2, None)]

    def test_a_sibling_is_taken_where_the_first_child_is_wrong(self) -> None:
        draft = Draft((4, 5, 9, 6), (ROOT, ROOT, 0, 1), (0.5,) * 4, ("test",) * 4)
        assert list(said_by(draft, [5, 6, 1])) == [Word(5, 0, 1), Word(6, 2, 3), Word(1, 4, None)]

    def test_a_cousin_with_the_right_token_is_no_child(self) -> None:
        """Token 9 hangs under token 4; after token 5 it was never computed."""
        draft = Draft((4, 5, 9), (ROOT, ROOT, 0), (0.5,) * 3, ("test",) * 3)
        assert list(said_by(draft, [5, 9])) == [Word(5, 0, 1), Word(9, 2, None)]


class TestLaziness:
    @many
    @given(st.integers(0, 10**6), trees(), st.integers(0, 6))
    def test_nothing_is_drawn_after_the_consumer_stops(self, seed: int, draft: Draft, wanted: int) -> None:
        called: list[int] = []
        words = list(islice(walk(draft, row_sampler(target_of(seed), (), draft, called)), wanted))
        assert called == [word.row for word in words]
        assert len(called) <= wanted

    def test_nothing_is_drawn_before_the_first_word_is_asked_for(self) -> None:
        called: list[int] = []
        words = walk(chain([1]), lambda row: called.append(row) or 1)  # type: ignore[func-returns-value]
        assert called == []
        next(words)
        assert called == [0]

    def test_the_consumer_sees_a_word_before_the_next_is_drawn(self) -> None:
        """So penalties and grammars know it: here each word is the number of words committed so far."""
        committed: list[int] = []
        for word in walk(chain([0, 1, 2, 9]), lambda row: len(committed)):
            committed.append(word.token)  # noqa: PERF401 (the target reads it meanwhile)
        assert committed == [0, 1, 2, 3]

    def test_an_error_in_the_target_reaches_the_consumer(self) -> None:
        def broken(row: int) -> int:
            raise FloatingPointError("no logits")

        with pytest.raises(FloatingPointError, match="no logits"):
            next(walk(chain([1]), broken))


def verdict_on(draft: Draft, words: list[int], *, cut_after: int | None = None) -> Verdict:
    """Count as the engine does: take words until the draft ends or a stop condition holds."""
    verdict = Verdict(draft)
    for word in said_by(draft, words):
        verdict.words.append(word)
        if len(verdict.words) == cut_after:
            verdict.cut = True
            break
    return verdict


class TestVerdict:
    @pytest.mark.parametrize(
        ("words", "accepted", "rejected"),
        [([9], 0, 3), ([1, 9], 1, 2), ([1, 2, 9], 2, 1), ([1, 2, 3, 9], 3, 0)],
    )
    def test_counts_of_a_chain(self, words: list[int], accepted: int, rejected: int) -> None:
        verdict = verdict_on(chain([1, 2, 3]), words)
        assert (verdict.num_accepted, verdict.num_rejected) == (accepted, rejected)
        assert len(verdict.words) == accepted + 1
        assert verdict.path == list(range(accepted))

    @pytest.mark.parametrize("cut_after", [1, 2, 3])
    def test_what_a_stop_cut_off_is_neither(self, cut_after: int) -> None:
        verdict = verdict_on(chain([1, 2, 3]), [1, 2, 3, 9], cut_after=cut_after)
        assert (verdict.num_accepted, verdict.num_rejected) == (cut_after, 0)

    def test_the_path_of_a_tree_names_its_nodes(self) -> None:
        draft = Draft((4, 5, 9, 6), (ROOT, ROOT, 0, 1), (0.5,) * 4, ("test",) * 4)
        verdict = verdict_on(draft, [5, 6, 1])
        assert verdict.path == [1, 3]
        assert (verdict.num_accepted, verdict.num_rejected) == (2, 0)

    def test_nothing_said_is_nothing_accepted(self) -> None:
        """A walk that broke before its first word: the engine cuts it."""
        verdict = Verdict(chain([1, 2]), cut=True)
        assert (verdict.path, verdict.num_accepted, verdict.num_rejected) == ([], 0, 0)

    @many
    @given(st.integers(0, 10**6), trees())
    def test_accepted_and_rejected_make_the_depth(self, seed: int, draft: Draft) -> None:
        verdict = Verdict(draft, list(walk(draft, row_sampler(target_of(seed), (), draft))))
        assert verdict.num_accepted + verdict.num_rejected == draft.depth
        assert len(verdict.words) == verdict.num_accepted + 1
        assert verdict.path == list(draft.path(verdict.path[-1]) if verdict.path else ())


def test_the_short_way_without_a_draft_says_the_word_of_the_walk() -> None:
    called: list[int] = []

    def sample(row: int) -> int:
        called.append(row)
        return 5

    assert list(words_along(EMPTY, sample)) == list(walk(EMPTY, lambda row: 5))
    assert called == [0]
    draft = Draft.chain([5, 6], confidence=[1.0, 1.0], source="test")
    assert list(words_along(draft, sample)) == list(walk(draft, lambda row: 5))

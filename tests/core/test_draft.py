"""Draft trees: what a node's ancestors are, what may be kept, and what is left of a draft that nobody can trust."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.core.draft import EMPTY, ROOT, Draft, merge

Path = tuple[int, ...]

VOCAB_SIZE = 5
many = settings(max_examples=300, deadline=None)
WIDE = {"vocab_size": VOCAB_SIZE, "max_depth": 100, "max_rows": 100}


def draft_of(tokens: list[int], parents: list[int], *, source: str = "test") -> Draft:
    """A draft whose confidence tells its nodes apart."""
    confidence = tuple(1 / (node + 2) for node in range(len(tokens)))
    return Draft(tuple(tokens), tuple(parents), confidence, (source,) * len(tokens))


@st.composite
def trees(draw: st.DrawFn, source: str = "test", max_nodes: int = 15) -> Draft:
    """A good draft: topological, one child per token, every token known."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(ROOT, len(tokens) - 1)), draw(st.integers(0, VOCAB_SIZE - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return draft_of(tokens, parents, source=source)


@st.composite
def careless_trees(draw: st.DrawFn) -> Draft:
    """Topological, but with twins and with tokens that do not exist."""
    size = draw(st.integers(0, 15))
    tokens = [draw(st.integers(-2, VOCAB_SIZE + 2)) for _ in range(size)]
    return draft_of(tokens, [draw(st.integers(ROOT, node - 1)) for node in range(size)])


@st.composite
def nonsense(draw: st.DrawFn) -> Draft:
    """Parents that lie ahead, are oneself, or do not exist."""
    size = draw(st.integers(1, 8))
    parents = [draw(st.integers(-3, size + 1)) for _ in range(size)]
    parents[draw(st.integers(0, size - 1))] = draw(st.sampled_from([-2, size - 1, size]))
    return draft_of([draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(size)], parents)


def path_tokens(draft: Draft, node: int) -> Path:
    """The tokens on the way to a node, found by climbing."""
    return () if node == ROOT else (*path_tokens(draft, draft.parents[node]), draft.tokens[node])


def paths_of(draft: Draft) -> set[Path]:
    """A draft as the set of texts that it proposes: what it means, whatever the order of its nodes."""
    return {path_tokens(draft, node) for node in range(len(draft))}


def assert_sound(draft: Draft) -> None:
    """Topological, one child per token under a parent, and as long in every column."""
    assert all(ROOT <= parent < node for node, parent in enumerate(draft.parents))
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    assert len(draft.tokens) == len(draft.parents) == len(draft.confidence) == len(draft.sources)


class TestReading:
    def test_a_chain(self) -> None:
        draft = Draft.chain([7, 8, 9], confidence=[0.9, 0.8, 0.7], source="s")
        assert draft == Draft((7, 8, 9), (ROOT, 0, 1), (0.9, 0.8, 0.7), ("s", "s", "s"))
        assert (len(draft), draft.depth, draft.depths(), draft.path(2)) == (3, 3, (1, 2, 3), (0, 1, 2))

    def test_the_empty_draft(self) -> None:
        assert (len(EMPTY), EMPTY.depth, EMPTY.depths(), EMPTY.path(ROOT)) == (0, 0, (), ())
        assert EMPTY.child(ROOT, 0) is None
        assert Draft.chain([], confidence=[], source="s") == EMPTY

    @many
    @given(trees(), st.data())
    def test_child_is_the_one_that_carries_the_token(self, draft: Draft, data: st.DataObject) -> None:
        node = data.draw(st.integers(ROOT, len(draft) - 1))
        for token in range(VOCAB_SIZE):
            found = [n for n in range(len(draft)) if (draft.parents[n], draft.tokens[n]) == (node, token)]
            assert draft.child(node, token) == (found[0] if found else None)

    @many
    @given(trees())
    def test_depth_is_the_length_of_the_path(self, draft: Draft) -> None:
        lengths = [len(path_tokens(draft, node)) for node in range(len(draft))]
        assert list(draft.depths()) == lengths
        assert [len(draft.path(node)) for node in range(len(draft))] == lengths
        assert draft.depth == max(lengths, default=0)

    @many
    @given(trees())
    def test_a_path_steps_from_parent_to_child(self, draft: Draft) -> None:
        for node in range(len(draft)):
            path = draft.path(node)
            assert path[-1] == node
            assert [draft.parents[n] for n in path] == [ROOT, *path[:-1]]


class TestKeep:
    @many
    @given(trees(), st.data())
    def test_what_is_kept_means_the_same(self, draft: Draft, data: st.DataObject) -> None:
        tips = data.draw(st.lists(st.integers(0, len(draft) - 1), max_size=4)) if len(draft) else []
        nodes = {node for tip in tips for node in draft.path(tip)}
        kept = draft.keep(nodes)
        assert_sound(kept)
        assert paths_of(kept) == {path_tokens(draft, node) for node in nodes}
        assert list(kept.confidence) == [draft.confidence[node] for node in sorted(nodes)]

    @many
    @given(trees(), st.randoms(use_true_random=False))
    def test_order_and_repetition_do_not_matter(self, draft: Draft, shuffler: object) -> None:
        nodes = [*range(len(draft)), *range(len(draft))]
        shuffler.shuffle(nodes)  # type: ignore[attr-defined]
        assert draft.keep(nodes) == draft

    def test_an_orphan_is_refused(self) -> None:
        with pytest.raises(KeyError):
            Draft.chain([1, 2], confidence=[1, 1], source="s").keep([1])


class TestClipped:
    @many
    @given(careless_trees(), st.integers(0, 5), st.integers(0, 16))
    def test_what_is_left_can_be_verified(self, draft: Draft, max_depth: int, max_rows: int) -> None:
        clipped = draft.clipped(vocab_size=VOCAB_SIZE, max_depth=max_depth, max_rows=max_rows)
        assert_sound(clipped)
        assert clipped.depth <= max_depth
        assert len(clipped) <= max_rows
        assert all(0 <= token < VOCAB_SIZE for token in clipped.tokens)
        assert paths_of(clipped) <= paths_of(draft)

    @many
    @given(careless_trees(), st.integers(0, 5), st.integers(0, 16))
    def test_twice_is_once(self, draft: Draft, max_depth: int, max_rows: int) -> None:
        limits = {"vocab_size": VOCAB_SIZE, "max_depth": max_depth, "max_rows": max_rows}
        once = draft.clipped(**limits)
        assert once.clipped(**limits) is once

    @many
    @given(careless_trees())
    def test_nothing_good_is_lost(self, draft: Draft) -> None:
        """Bad nodes take their subtree along; of twins the first stays, and the second goes with all below it."""
        good: dict[Path, int] = {(): ROOT}
        for node in range(len(draft)):
            path = path_tokens(draft, node)
            if good.get(path[:-1]) == draft.parents[node] and 0 <= draft.tokens[node] < VOCAB_SIZE:
                good.setdefault(path, node)
        kept = sorted(node for node in good.values() if node != ROOT)
        assert draft.clipped(**WIDE) == draft.keep(kept)

    @many
    @given(trees())
    def test_a_good_draft_is_returned_itself(self, draft: Draft) -> None:
        assert draft.clipped(**WIDE) is draft

    @pytest.mark.parametrize(
        ("limits", "left"),
        [
            ({"max_depth": 0}, ()),
            ({"max_depth": 1}, (1, 2)),
            ({"max_rows": 0}, ()),
            ({"max_rows": 3}, (1, 3, 2)),
            ({"vocab_size": 3}, (1, 2, 0)),
            ({"vocab_size": 1}, ()),
        ],
        ids=str,
    )
    def test_each_limit(self, limits: dict[str, int], left: tuple[int, ...]) -> None:
        """root -> 1 -> 3 -> 2, root -> 2 -> 0, in the order 1 3 2 2' 0."""
        draft = draft_of([1, 3, 2, 2, 0], [ROOT, 0, ROOT, 1, 2])
        assert draft.clipped(**{**WIDE, **limits}).tokens == left

    @many
    @given(nonsense())
    def test_of_a_draft_that_is_no_tree_nothing_is_left(self, draft: Draft) -> None:
        assert draft.clipped(**WIDE) == EMPTY

    @pytest.mark.parametrize(
        "draft",
        [
            Draft((1, 2), (ROOT,), (0.5, 0.5), ("s", "s")),
            Draft((1,), (ROOT, 0), (0.5,), ("s",)),
            Draft((1, 2), (ROOT, 0), (0.5,), ("s", "s")),
            Draft((1, 2), (ROOT, 0), (0.5, 0.5), ("s",)),
        ],
        ids=["parents", "tokens", "confidence", "sources"],
    )
    def test_of_columns_of_unequal_length_nothing_is_left(self, draft: Draft) -> None:
        assert draft.clipped(**WIDE) == EMPTY
        assert merge([draft, draft_of([3], [ROOT])]).tokens == (3,)


class TestMerge:
    @many
    @given(st.lists(trees(), max_size=4))
    def test_it_means_all_of_them(self, drafts: list[Draft]) -> None:
        merged = merge(drafts)
        assert_sound(merged)
        assert paths_of(merged) == set().union(*(paths_of(draft) for draft in drafts))

    @many
    @given(trees("first"), trees("second"))
    def test_the_first_to_name_a_token_is_its_source(self, first: Draft, second: Draft) -> None:
        merged = merge([first, second])
        known = paths_of(first)
        for node, source in enumerate(merged.sources):
            assert source == ("first" if path_tokens(merged, node) in known else "second")

    @many
    @given(trees(), trees())
    def test_confidence_is_the_highest_stated(self, first: Draft, second: Draft) -> None:
        stated: dict[Path, float] = {}
        for draft in (first, second):
            for node, confidence in enumerate(draft.confidence):
                path = path_tokens(draft, node)
                stated[path] = max(confidence, stated.get(path, 0.0))
        merged = merge([first, second])
        assert {path_tokens(merged, node): value for node, value in enumerate(merged.confidence)} == stated

    @many
    @given(trees())
    def test_with_nothing_or_with_itself_it_stays(self, draft: Draft) -> None:
        assert merge([]) == EMPTY
        assert merge([draft]) == merge([EMPTY, draft, EMPTY]) == merge([draft, draft]) == draft

    @many
    @given(trees(), nonsense())
    def test_a_draft_that_is_no_tree_spoils_no_other(self, good: Draft, bad: Draft) -> None:
        for drafts in ([good, bad], [bad, good], [bad, good, bad]):
            assert merge(drafts).clipped(**WIDE) == good

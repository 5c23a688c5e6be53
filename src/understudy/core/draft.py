"""A draft: tokens proposed ahead, as a tree whose root is the last committed token.

Nodes stand in topological order (a parent before its children), one child per token under a parent. The empty
draft is plain decoding, and nothing downstream has a special case for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

ROOT = -1
"""The parent of a first drafted token: the last committed token, whose row every pass computes anyway."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of drafted tokens. All four tuples have one entry per node."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of the parent node, or ROOT."""
    confidence: tuple[float, ...] = ()
    """The drafter's estimate that the target says this token, given that it said the parent."""
    sources: tuple[str, ...] = ()
    """The drafter that proposed each node."""

    def __len__(self) -> int:
        """The number of rows that verifying this draft costs."""
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Sequence[int], *, confidence: Sequence[float], source: str) -> Draft:
        """Each token follows the one before it."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count - 1)), tuple(confidence), (source,) * count)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` that carries `token`, if there is one."""
        for index in range(node + 1, len(self.tokens)):
            if self.parents[index] == node and self.tokens[index] == token:
                return index
        return None

    def depths(self) -> tuple[int, ...]:
        """The number of drafted tokens on the path to each node, itself included."""
        return _depths(tuple(self.parents))

    def leaves(self) -> list[int]:
        """The nodes without children."""
        if not self.tokens:
            return []
        inner = set(self.parents)
        return [node for node in range(len(self.tokens)) if node not in inner]

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path."""
        return _depth(tuple(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def keep(self, nodes: Iterable[int]) -> Draft:
        """Return the draft of these nodes alone; with a node its parent must be kept."""
        kept = sorted(set(nodes))
        if len(kept) in (0, len(self.tokens)):
            return self if kept else EMPTY
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
            tuple(self.confidence[node] for node in kept),
            tuple(self.sources[node] for node in kept),
        )

    def with_words(self, words: Mapping[int, tuple[int, float]]) -> Draft:
        """Return the draft with true tokens, and confidence, in place of tokens that stand for them."""
        tokens, confidence = list(self.tokens), list(self.confidence)
        for place, token in enumerate(self.tokens):
            if token in words:
                tokens[place], confidence[place] = words[token]
        return Draft(tuple(tokens), self.parents, tuple(confidence), self.sources)

    def clipped(
        self, *, vocab_size: int, max_depth: int, max_rows: int, unseen: Collection[int] = frozenset()
    ) -> Draft:
        """Return what can be verified: known tokens within the limits. A bad node takes its subtree along.

        `unseen` are numbers that stand for tokens which nobody has seen yet.
        """
        depths = self.depths() if is_tree(self) else ()
        fits = len(depths) == len(self.tokens) <= max_rows and max(depths, default=0) <= max_depth
        if fits and self._is_plain(vocab_size, unseen):
            return self
        kept: list[int] = []
        alive: set[int] = {ROOT}
        seen: set[tuple[int, int]] = set()
        for node in range(len(depths)):
            parent, token = self.parents[node], self.tokens[node]
            is_known = 0 <= token < vocab_size or token in unseen
            has_room = len(kept) < max_rows and depths[node] <= max_depth
            if is_known and has_room and parent in alive and (parent, token) not in seen:
                kept.append(node)
                alive.add(node)
                seen.add((parent, token))
        return self if len(kept) == len(self.tokens) else self.keep(kept)

    def _is_plain(self, vocab_size: int, unseen: Collection[int]) -> bool:
        """Whether all tokens are known, one child per token under a parent, as in nearly all drafts."""
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            return False
        seen = [token for token in self.tokens if token not in unseen]
        return not seen or (min(seen) >= 0 and max(seen) < vocab_size)


EMPTY = Draft()


@lru_cache(maxsize=1024)  # most trees of a drafter are alike
def _depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return tuple(depths)


@lru_cache(maxsize=1024)
def _depth(parents: tuple[int, ...]) -> int:
    return max(_depths(parents), default=0)


@lru_cache(maxsize=1024)
def _stand_before(parents: tuple[int, ...]) -> bool:
    return all(ROOT <= parent < node for node, parent in enumerate(parents))


def is_tree(draft: Draft) -> bool:
    """Whether every node has its four entries and a parent that stands before it."""
    count = len(draft.tokens)
    same_length = len(draft.parents) == len(draft.confidence) == len(draft.sources) == count
    return same_length and _stand_before(tuple(draft.parents))


def is_well_typed(draft: Draft) -> bool:
    """Whether every entry is of its kind: what is computed with later must not raise there."""
    whole = _are(draft.tokens, int) and _are(draft.parents, int)
    return whole and _are(draft.sources, str) and _are(draft.confidence, int, float)


def _are(entries: Iterable[object], *kinds: type) -> bool:
    return all(issubclass(found, kinds) for found in set(map(type, entries)))


def merge(drafts: Sequence[Draft]) -> Draft:
    """Several drafts in one tree, one child per token; the first drafter to name a token is its source.

    A draft that is no tree is left out: it must not spoil the others.
    """
    filled = [draft for draft in drafts if len(draft) and is_tree(draft)]
    if len(filled) <= 1:
        return filled[0] if filled else EMPTY
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    sources: list[str] = []
    place: dict[tuple[int, int], int] = {}
    for draft in filled:
        at: list[int] = []  # node of this draft -> node of the merged one
        for node, token in enumerate(draft.tokens):
            parent = ROOT if draft.parents[node] == ROOT else at[draft.parents[node]]
            index = place.setdefault((parent, token), len(tokens))
            if index == len(tokens):
                tokens.append(token)
                parents.append(parent)
                confidence.append(draft.confidence[node])
                sources.append(draft.sources[node])
            else:
                confidence[index] = max(confidence[index], draft.confidence[node])
            at.append(index)
    return Draft(tuple(tokens), tuple(parents), tuple(confidence), tuple(sources))

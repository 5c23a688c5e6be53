"""From guesses to a tree: which children a node has, and which nodes are worth a row.

    guesses     the likeliest tokens at a place with their log probabilities, from whoever drafts
    children    at temperature 0 the likeliest; above it the best of log q / temperature + the target's own noise at
                that position, since the target will say the best of log p / temperature + the same noise
    survival    how likely it is that the target's words lead to a node: confidences multiplied along its path
    growth      depth by depth, the best nodes of each expanded together; of all nodes those are kept that most likely
                survive, until the rows are spent

No place is guessed at that no row leads to.

Without the shared noise (`is_coupled=False`) children are the likeliest at any temperature: for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.base import Budget, Context
from understudy.sampling.noise import gumbel
from understudy.sampling.processors import filtered_weights

_LEAST_TEMPERATURE = 1e-4
LEAST_WEIGHT = 1e-4
"""Tokens this much less likely than the best do not enter the race: they would hardly ever win it."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """The likeliest tokens at one place, in any order."""

    ids: NDArray[np.int64]
    """[count] in the target's vocabulary, each named once"""
    log_q: NDArray[np.float32]
    """[count] log probabilities at temperature 1, among all tokens; what is not named is left to the target"""


@dataclass(frozen=True, slots=True)
class Shape:
    """How wide a tree grows."""

    num_children: int = 1
    """At most, under each node; with one the tree is a chain."""
    is_coupled: bool = True
    """Whether children are chosen with the target's noise."""


class Child(NamedTuple):
    """A token that may follow, and how likely the target is to say it."""

    token: int
    confidence: float


class Growth:
    """A tree that grows depth by depth. Several can be grown side by side, one pass for the levels of all of them."""

    def __init__(self, context: Context, budget: Budget, *, shape: Shape, width: int, source: str) -> None:
        self.context = context
        self.budget = budget
        self.shape = shape
        self.level: list[int] = [ROOT] if budget.max_rows > 0 and budget.max_depth > 0 else []
        """The nodes whose children are wanted next, all of one depth; none when the tree is grown."""
        self.depth = 0
        """Theirs: the root's is 0."""
        self._width = width
        self._tree = _Growing(source)
        self._survival: list[float] = []  # of each node

    @property
    def position(self) -> int:
        """Where in the text the children of the level stand."""
        return len(self.context.tokens) + self.depth

    def token(self, node: int) -> int:
        """The token of a node; the root's is the last of the text."""
        return self.context.tokens[-1] if node == ROOT else self._tree.tokens[node]

    def parent(self, node: int) -> int:
        """The node above."""
        return self._tree.parents[node]

    def best_chain(self) -> Draft:
        """The path to the best node of the level, as a draft of its own."""
        line = self._line(self.level[0])
        confidence = [self._tree.confidence[node] for node in line]
        return Draft.chain([self._tree.tokens[node] for node in line], confidence=confidence, source=self._tree.source)

    def add(self, found: Sequence[Sequence[Child]]) -> None:
        """Put the children below the nodes of the level, for each of them some, and go down to the best of these."""
        following: list[int] = []
        for parent, offered in zip(self.level, found, strict=True):
            reached = 1.0 if parent == ROOT else self._survival[parent]
            for child in offered:
                following.append(self._tree.add(parent, child))
                self._survival.append(reached * child.confidence)
        self.depth += 1
        self.level = []
        if self.depth < self.budget.max_depth:
            # behind what is beyond the rows nothing is kept, nor behind the last that is within them
            going = set(self._best(self.budget.max_rows - 1)).intersection(following)
            self.level = sorted(going, key=self._rank)[: self._width]

    def draft(self) -> Draft:
        """The nodes that most likely survive, within the rows."""
        # a child survives no more often than its parent, who stands before it: with a node its parent is kept
        return self._tree.draft().keep(self._best(self.budget.max_rows))

    def _best(self, count: int) -> Sequence[int]:
        nodes = range(len(self._survival))
        return nodes if len(nodes) <= count else sorted(nodes, key=self._rank)[:count]

    def _rank(self, node: int) -> tuple[float, int]:
        return -self._survival[node], node

    def _line(self, node: int) -> list[int]:
        line: list[int] = []
        while node != ROOT:
            line.append(node)
            node = self._tree.parents[node]
        return line[::-1]


def children(guesses: Guesses | None, context: Context, *, position: int, shape: Shape) -> list[Child]:
    """The children of a node whose next token stands at `position`, the best first, each token once.

    Confidence: at temperature 0 and without noise the probability. With noise the race is run already, and what is
    unknown is how far the target's scores differ: each child's share of exp(score + noise), near 1 for one that is far
    ahead.
    """
    if guesses is None:
        return []
    is_known = np.isfinite(guesses.log_q)
    ids, log_q = guesses.ids[is_known], guesses.log_q[is_known]
    if not len(ids):
        return []
    if context.temperature == 0.0:
        return _best(ids, log_q, np.exp(log_q.astype(np.float64)), shape.num_children)
    with np.errstate(under="ignore"):
        scaled = (log_q - log_q.max()) / np.float32(max(context.temperature, _LEAST_TEMPERATURE))
        weights = filtered_weights(scaled, context.sampling)
        is_racing = weights >= LEAST_WEIGHT
        ids, totals = ids[is_racing], scaled[is_racing].astype(np.float64)
        if shape.is_coupled:
            totals += gumbel(context.noise, position, ids)
        shares = np.exp(totals - totals.max())
    return _best(ids, totals, shares / shares.sum(), shape.num_children)


def _best(
    ids: NDArray[np.int64], scores: NDArray[np.floating], confidence: NDArray[np.float64], count: int
) -> list[Child]:
    """The tokens with the largest scores; of equal ones the lowest id, as the target chooses."""
    if count < len(ids):
        is_near = scores >= np.partition(scores, -count)[-count]
        ids, scores, confidence = ids[is_near], scores[is_near], confidence[is_near]
    best: dict[int, float] = {}
    for place in np.lexsort((ids, -scores)):
        best.setdefault(int(ids[place]), min(1.0, float(confidence[place])))
    return [Child(token, sure) for token, sure in best.items()][:count]


@dataclass(slots=True)
class _Growing:
    source: str
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def add(self, parent: int, child: Child) -> int:
        """Add a node below another that is there already; return its number."""
        self.tokens.append(child.token)
        self.parents.append(parent)
        self.confidence.append(child.confidence)
        return len(self.tokens) - 1

    def draft(self) -> Draft:
        """The tree so far."""
        if not self.tokens:
            return EMPTY
        sources = (self.source,) * len(self.tokens)
        return Draft(tuple(self.tokens), tuple(self.parents), tuple(self.confidence), sources)

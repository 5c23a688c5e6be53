"""Trees as they are meant to be: grown best first, node by node, and depth by depth from a function of paths."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.base import Budget, Context
from understudy.drafters.tree import Child, Growth, Guesses, Shape, children

Path = tuple[int, ...]
"""The drafted tokens that lead to a place, from the first one on; the root's is empty."""
Expand = Callable[[Path], Guesses | None]
"""The guesses after a path; None where there is nothing to say."""


def by_depth(guesses: Sequence[Guesses]) -> Expand:
    """Guesses that depend on the depth alone: those at depth d + 1 follow every node of depth d."""
    return lambda path: guesses[len(path)] if len(path) < len(guesses) else None


def grow(expand: Expand, context: Context, budget: Budget, *, shape: Shape, source: str) -> Draft:
    """The tree of the nodes that most likely survive, best first, within the budget.

    A node is expanded when it was added and may have children.
    """
    added: list[tuple[int, Child]] = []  # of each node its parent
    waiting: list[tuple[float, int, int, Child, Path]] = []  # -survival, order of arrival, parent, child, path
    arrivals = itertools.count()

    def push(node: int, path: Path, survival: float) -> None:
        if len(path) >= budget.max_depth:
            return
        for child in children(expand(path), context, position=len(context.tokens) + len(path), shape=shape):
            entry = -survival * child.confidence, next(arrivals), node, child, (*path, child.token)
            heapq.heappush(waiting, entry)

    if budget.max_rows > 0:
        push(ROOT, (), 1.0)
    while waiting:
        survival, _, parent, child, path = heapq.heappop(waiting)
        added.append((parent, child))
        if len(added) >= budget.max_rows:
            break
        push(len(added) - 1, path, -survival)
    if not added:
        return EMPTY
    return Draft(
        tokens=tuple(child.token for _, child in added),
        parents=tuple(parent for parent, _ in added),
        confidence=tuple(child.confidence for _, child in added),
        sources=(source,) * len(added),
    )


def grow_by_levels(
    expand: Callable[[list[Path]], Sequence[Guesses | None]],
    context: Context,
    budget: Budget,
    *,
    shape: Shape,
    width: int,
    source: str,
) -> Draft:
    """What `Growth` makes of it, with one call of `expand` for each depth, over the `width` best nodes before."""
    growing = Growth(context, budget, shape=shape, width=width, source=source)
    while growing.level:
        found = expand([_path(growing, node) for node in growing.level])
        position = growing.position
        growing.add([children(guesses, context, position=position, shape=shape) for guesses in found])
    return growing.draft()


def _path(growing: Growth, node: int) -> Path:
    if node == ROOT:
        return ()
    return (*_path(growing, growing.parent(node)), growing.token(node))

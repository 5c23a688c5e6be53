"""A tree whose shape is fixed before anybody has seen a word of it: only its words are data.

Where a pass of the target is launched before the host has seen the guesses, the host must know which guess follows
which. So the draft draws, for each of some *expanded* nodes, the word that follows it and that word's rival, and which
of these are expanded in turn is decided once:

    expanded   0 is the end of the text; each other one is the word, or the rival, of one that stands a level above
    guesses    the words, and the rivals, of all expanded nodes: the rows of a draft

The shape is the best under an assumed acceptance. With one child for each node it is a chain.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from understudy.core.draft import Draft

_WORD_SHARE = 0.65
"""How often a word is right if all above it were, as far as shapes go"""
_RIVAL_SHARE = (1.0 - _WORD_SHARE) / 2
"""How often its rival is"""
_LEAST_EXPANDED = 16


class Guess(NamedTuple):
    """The word that was drawn behind an expanded node, or its rival."""

    behind: int
    is_rival: bool


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Which guesses are expanded; level by level."""

    expanded: tuple[Guess | None, ...]
    """Who each expanded node is; None is the end of the text, the first one."""
    depths: tuple[int, ...]
    """Of each expanded node; 0 is the end of the text. They never fall."""
    guesses: tuple[Guess, ...]
    """All that can be rows of a draft, the likeliest first, so that each stands behind the one that it follows"""
    line: frozenset[Guess]
    """The words that follow each other from the end of the text on, one for each depth"""

    @property
    def levels(self) -> list[range]:
        """The expanded nodes of each depth."""
        starts = [self.depths.index(depth) for depth in range(self.depths[-1] + 1)]
        return [range(*pair) for pair in zip(starts, [*starts[1:], len(self.depths)], strict=True)]

    @property
    def width(self) -> int:
        """The most nodes that are expanded at one depth."""
        return max(len(level) for level in self.levels)

    def within(self, max_depth: int, max_rows: int) -> tuple[Guess, ...]:
        """The likeliest guesses that a budget has room for, each behind the one that it follows.

        Those in line stand in front: where they are accepted their rows are in place already.
        """
        fitting = [guess for guess in self.guesses if self.depths[guess.behind] < max_depth]
        return tuple(sorted(fitting[: max(0, max_rows)], key=lambda guess: guess not in self.line))

    def parents(self, guesses: tuple[Guess, ...]) -> tuple[int, ...]:
        """Where the guess that each of some guesses follows stands among them; -1 is the end of the text."""
        places: dict[Guess | None, int] = {guess: place for place, guess in enumerate(guesses)}
        places[None] = -1
        return tuple(places[self.expanded[guess.behind]] for guess in guesses)


@dataclass(frozen=True, slots=True)
class Form:
    """A draft but for its words."""

    guesses: tuple[Guess, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...]
    sources: tuple[str, ...]

    def draft(self, names: list[list[int]]) -> Draft:
        """That of one text, by what stands in place of its words."""
        tokens = tuple([names[is_rival][behind] for behind, is_rival in self.guesses])
        return Draft(tokens=tokens, parents=self.parents, confidence=self.confidence, sources=self.sources)


def static_tree(num_steps: int, *, num_children: int, is_wide: bool = True) -> StaticTree:
    """The shape for guesses up to this depth.

    The words in line are always expanded, all the way down. Beside them, best first, others are, until two are for each
    step, and `_LEAST_EXPANDED` at least; unless the tree is not to be wide, or is a chain: then one is at each depth.
    """
    line = [(False,) * depth for depth in range(num_steps)]  # a node's path: at each step, whether the rival is taken
    room = max(_LEAST_EXPANDED, 2 * num_steps) - num_steps if is_wide and num_children > 1 else 0
    paths = sorted([*line, *_beside_line(num_steps, room)], key=lambda path: (len(path), -_survival(path), path))
    places = {path: place for place, path in enumerate(paths)}
    kinds = (False, True) if num_children > 1 else (False,)
    rows = [(*path, is_rival) for path in paths for is_rival in kinds]
    rows.sort(key=lambda path: (-_survival(path), len(path), path))
    return StaticTree(
        expanded=(None, *(Guess(places[path[:-1]], path[-1]) for path in paths[1:])),
        depths=tuple(len(path) for path in paths),
        guesses=tuple(Guess(places[path[:-1]], path[-1]) for path in rows),
        line=frozenset(Guess(places[path], is_rival=False) for path in line),
    )


def _beside_line(num_steps: int, count: int) -> list[tuple[bool, ...]]:
    """The likeliest paths that have a rival on them, so many if there are."""
    found: list[tuple[bool, ...]] = []
    waiting: list[tuple[float, tuple[bool, ...]]] = [(-1.0, ())]
    while waiting and len(found) < count:
        _, path = heapq.heappop(waiting)
        if any(path):
            found.append(path)
        if len(path) + 1 < num_steps:
            for longer in ((*path, False), (*path, True)):
                heapq.heappush(waiting, (-_survival(longer), longer))
    return found


def _survival(path: tuple[bool, ...]) -> float:
    """How likely the target's words lead along a path; the same number for the same steps in any order."""
    num_rivals = sum(path)
    return float(_WORD_SHARE ** (len(path) - num_rivals) * _RIVAL_SHARE**num_rivals)

"""Lookahead decoding: let the target itself run ahead of the text, in rows that ride in its verify pass.

The target guesses at many later positions at once. The guesses start as nonsense, but a guess that is fed back gives
a better one (Jacobi iteration), and words that were guessed in a row tend to be said in a row sooner or later.

    column        0     1     2     3     4           level j of column i stands at depth 1 + i + j: its ancestors
    level 0       a0 -> a1 -> a2 -> a3 -> a4          are level 0 up to its column, then its own column
    level 1       b0    b1    b2    b3    b4
    level 2       c0    c1    c2    c3    c4          the target's words after level 2 are the next level

Each pass turns a column into an n-gram (a2 b2 c2 and the word after c2), which goes into a pool under its first token;
then level 0 is dropped and the new words become the last level. A proposal is what the pool holds for the last token.
Words are drawn with the noise of their position, so that at any temperature the pool fills with what the dice will say.

The window's rows are never committed. Whether they are worth their time is decided by the engine (engine/scouting.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from understudy.core.draft import EMPTY, ROOT, Draft, merge
from understudy.drafters.base import Budget, Context
from understudy.errors import ConfigError

_MOST_GRAMS = 7
"""n-grams kept per first token, the latest ones."""
_MOST_FIRST_TOKENS = 4096
_CONFIDENCE = 0.35
"""Stated for every token: what it is worth is learned."""


@dataclass(slots=True)
class _Window:
    """The guesses of one sequence, [levels][columns], and its pool."""

    levels: list[list[int]]
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)

    def remember(self, gram: tuple[int, ...]) -> None:
        """Put an n-gram into the pool; the oldest go."""
        grams = self.pool.setdefault(gram[0], OrderedDict())
        self.pool.move_to_end(gram[0])
        grams[gram[1:]] = None
        grams.move_to_end(gram[1:])
        if len(grams) > _MOST_GRAMS:
            grams.popitem(last=False)
        if len(self.pool) > _MOST_FIRST_TOKENS:
            self.pool.popitem(last=False)


class LookaheadDrafter:
    """A window of `num_columns` columns whose n-grams have `num_levels` + 1 tokens."""

    name: ClassVar[str] = "lookahead"

    def __init__(self, *, num_columns: int = 5, num_levels: int = 3) -> None:
        if num_columns < 1 or num_levels < 1:
            raise ConfigError(
                f"lookahead: {num_columns} columns of {num_levels} levels make no window.", "Give at least 1 of each."
            )
        self._num_columns = num_columns
        self._num_levels = num_levels
        self._parents = tuple(self._parent(node) for node in range(num_columns * num_levels))
        self._windows: dict[int, _Window] = {}  # by sequence id

    @property
    def num_scouts(self) -> int:
        """Rows of the window."""
        return self._num_columns * self._num_levels

    def start(self, context: Context) -> None:
        """Open a window of guesses out of the prompt: tokens of the text are better guesses than any others."""
        count = len(context.tokens)
        self._windows[context.sequence_id] = _Window(
            [
                [context.tokens[(level + 7 * column) % count] for column in range(self._num_columns)]
                for level in range(self._num_levels)
            ]
        )

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """What the pool holds for the last token of each text, the latest first."""
        return [self._propose(context) for context in contexts]

    def scout(self, context: Context) -> Draft:
        """The window as a tree; see the picture above."""
        levels = self._window(context).levels
        tokens = tuple(token for level in levels for token in level)
        count = len(tokens)
        return Draft(tokens, self._parents, (_CONFIDENCE,) * count, (self.name,) * count)

    def learn(self, context: Context, words: Sequence[int]) -> None:
        """Take the words after the last level, one for each column."""
        window = self._window(context)
        for column, word in enumerate(words):
            window.remember((*(level[column] for level in window.levels), word))
        window.levels = [*window.levels[1:], list(words)]

    def stop(self, context: Context, *, finished: bool) -> None:
        """Close the window."""
        self._windows.pop(context.sequence_id, None)

    def _window(self, context: Context) -> _Window:
        if context.sequence_id not in self._windows:
            self.start(context)
        return self._windows[context.sequence_id]

    def _propose(self, context: Context) -> Draft:
        grams = self._window(context).pool.get(context.tokens[-1])
        if not grams:
            return EMPTY
        return merge(
            [Draft.chain(gram, confidence=[_CONFIDENCE] * len(gram), source=self.name) for gram in reversed(grams)]
        )

    def _parent(self, node: int) -> int:
        """Level 0 is a chain; below it every node hangs under the one above it in its column."""
        level, column = divmod(node, self._num_columns)
        if level:
            return node - self._num_columns
        return column - 1 if column else ROOT

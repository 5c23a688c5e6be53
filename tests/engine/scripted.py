"""Drafters for tests: right, wrong, random, mixed, and hostile in every way that a drafter can be.

`Book` holds the plain answers, so that a drafter can be as right or as wrong as a test wants it to be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from understudy.core.draft import EMPTY, ROOT, Draft
from understudy.drafters.base import Budget, Context


class Book:
    """What the target will say, by (seed, choice): the whole text, prompt first."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, seed: int, choice: int, text: Sequence[int]) -> None:
        """Remember a text."""
        self._texts[seed, choice] = tuple(text)

    def next_tokens(self, context: Context, count: int) -> list[int]:
        """What follows the context; nothing where the book ends."""
        text = self._texts.get((context.noise.seed, context.noise.choice), ())
        return list(text[len(context.tokens) : len(context.tokens) + count])


class Scripted:
    """A drafter that knows no state of its own; subclasses say what `draft` returns."""

    name: ClassVar[str] = "scripted"

    def __init__(self, book: Book, rng: random.Random, vocab_size: int) -> None:
        self.book = book
        self.rng = rng
        self.vocab_size = vocab_size

    def start(self, context: Context) -> None:
        """Need nothing."""

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget nothing."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        """Draft for each context by itself."""
        return [self.draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def draft(self, context: Context, budget: Budget) -> Draft:
        """Propose for one context."""
        return EMPTY

    def tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
        """A draft of these nodes, with made-up confidence."""
        confidence = tuple(self.rng.random() for _ in tokens)
        return Draft(tuple(tokens), tuple(parents), confidence, (self.name,) * len(tokens))

    def chain(self, tokens: Sequence[int]) -> Draft:
        """A draft in which each token follows the one before it."""
        return self.tree(tokens, range(-1, len(tokens) - 1))

    def any_token(self) -> int:
        """Some token of the vocabulary."""
        return self.rng.randrange(self.vocab_size)


class Wrong(Scripted):
    """Never says what the target says."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        right = self.book.next_tokens(context, budget.max_depth)
        return self.chain([(token + 1) % self.vocab_size for token in right])


class Right(Scripted):
    """Always says what the target says, and goes on beyond where the target will stop."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        return self.chain(self.book.next_tokens(context, min(budget.max_depth, budget.max_rows)))


class RandomTrees(Scripted):
    """Trees of random shape and random tokens."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        count = self.rng.randint(0, budget.max_rows)
        return self.tree(
            [self.any_token() for _ in range(count)], [self.rng.randint(ROOT, n - 1) for n in range(count)]
        )


class Mixed(Scripted):
    """The right path with wrong siblings before and after each node, wrong tails, and ends that come too early."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        reach = self.rng.randint(0, min(budget.max_depth, 6))
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in self.book.next_tokens(context, reach):
            self._add_wrong(tokens, parents, parent, token)
            tokens.append(token)
            parents.append(parent)
            here = len(tokens) - 1
            self._add_wrong(tokens, parents, parent, token)
            parent = here
        self._add_wrong(tokens, parents, parent, None)
        return self.tree(tokens[: budget.max_rows], parents[: budget.max_rows])

    def _add_wrong(self, tokens: list[int], parents: list[int], parent: int, right: int | None) -> None:
        """Hang up to two wrong children under a node, each with a tail of up to two more."""
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            above = parent
            for depth in range(self.rng.randint(1, 3)):
                token = self.any_token()
                if depth == 0 and token == right:
                    token = (token + 1) % self.vocab_size
                tokens.append(token)
                parents.append(above)
                above = len(tokens) - 1


class OutOfVocabulary(Scripted):
    """Puts tokens that do not exist among right ones."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        tokens = self.book.next_tokens(context, budget.max_depth)
        if tokens:
            strange = (-1, -7, self.vocab_size, self.vocab_size + 5, 2**31, 2**70, -(2**63))
            tokens[self.rng.randrange(len(tokens))] = self.rng.choice(strange)
        return self.chain(tokens)


class OverLong(Scripted):
    """Goes on far beyond its budget, in depth and in rows."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        right = self.book.next_tokens(context, 1000)
        return self.chain(right + [self.any_token() for _ in range(300 - len(right))])


class Duplicates(Scripted):
    """Names each child twice, with something below both."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in self.book.next_tokens(context, 4):
            tokens += [token, token, self.any_token()]
            parents += [parent, parent, len(tokens) - 2]
            parent = len(tokens) - 3
        return self.tree(tokens, parents)


class Raising(Scripted):
    """Raises at every proposal."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        raise RuntimeError("the understudy is ill")


class SometimesRaising(Mixed):
    """Raises at one proposal in three."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        if self.rng.random() < 1 / 3:
            raise ZeroDivisionError("the understudy stumbles")
        return super().propose(contexts, budgets)


class RaisingOutside(Right):
    """Raises when a sequence starts and when it stops, and drafts well in between."""

    def start(self, context: Context) -> None:
        raise OSError("no start")

    def stop(self, context: Context, *, finished: bool) -> None:
        raise KeyError("no stop")


class Returning(Scripted):
    """Returns from `propose` whatever the function `answer` makes of the number of contexts."""

    answer: ClassVar[Any]

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> Any:
        return type(self).answer(len(contexts))


def returning(label: str, function: Any) -> type[Returning]:
    """Make a drafter class that answers with `function(number of contexts)`."""
    return type(f"Returning{label}", (Returning,), {"answer": staticmethod(function)})


def _everywhere(draft: Any) -> Any:
    return lambda count: [draft] * count


NOTHING = (
    returning("None", lambda count: None),
    returning("EmptyList", lambda count: []),
    returning("TooFew", lambda count: [EMPTY] * (count - 1)),
    returning("TooMany", lambda count: [EMPTY] * (count + 1)),
    returning("Tuple", lambda count: (EMPTY,) * count),
    returning("Integers", lambda count: [7] * count),
    returning("Nones", _everywhere(None)),
)
"""Answers that are not one draft for each sequence."""

BROKEN = (
    returning("ForwardParents", _everywhere(Draft((5, 6, 7), (1, 2, -1), (0.9,) * 3, ("x",) * 3))),
    returning("SelfParent", _everywhere(Draft((5, 6), (-1, 1), (0.9,) * 2, ("x",) * 2))),
    returning("ParentBelowRoot", _everywhere(Draft((5, 6), (-2, 0), (0.9,) * 2, ("x",) * 2))),
    returning("ParentTooLarge", _everywhere(Draft((5, 6), (-1, 99), (0.9,) * 2, ("x",) * 2))),
    returning("TooFewParents", _everywhere(Draft((5, 6, 7), (-1,), (0.9,) * 3, ("x",) * 3))),
    returning("TooManyParents", _everywhere(Draft((5,), (-1, 0, 1), (0.9,) * 3, ("x",) * 3))),
    returning("NoConfidence", _everywhere(Draft((5, 6), (-1, 0), (), ("x",) * 2))),
    returning("NoSources", _everywhere(Draft((5, 6), (-1, 0), (0.9,) * 2, ()))),
    returning("TokensOfText", _everywhere(Draft(("a", "b"), (-1, 0), (0.9,) * 2, ("x",) * 2))),
    returning("TokensOfNone", _everywhere(Draft((None,), (-1,), (0.9,), ("x",)))),
    returning("SourcesOfLists", _everywhere(Draft((5,), (-1,), (0.9,), ([],)))),
    returning("FractionalTokens", _everywhere(Draft((5.5, 6.5), (-1, 0), (0.9,) * 2, ("x",) * 2))),
    returning("ParentsOfText", _everywhere(Draft((5, 6), ("root", 0), (0.9,) * 2, ("x",) * 2))),
    returning("FractionalParents", _everywhere(Draft((5, 6), (-1, 0.0), (0.9,) * 2, ("x",) * 2))),
    returning("ConfidenceOfText", _everywhere(Draft((5, 6), (-1, 0), ("sure", "no"), ("x",) * 2))),
    returning("TokensNotATuple", _everywhere(Draft(None, (-1,), (0.9,), ("x",)))),
)
"""Drafts whose fields do not fit together, or are not what their types say."""

ODD_CONFIDENCE = (
    returning("NanConfidence", _everywhere(Draft((5, 6), (-1, 0), (float("nan"),) * 2, ("x",) * 2))),
    returning("InfiniteConfidence", _everywhere(Draft((5, 6), (-1, 0), (float("inf"),) * 2, ("x",) * 2))),
    returning("NegativeConfidence", _everywhere(Draft((5, 6), (-1, 0), (-3.0, -1e300), ("x",) * 2))),
)
"""Well-formed trees with senseless numbers: no failure, and no harm."""

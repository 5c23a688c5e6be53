"""The page to read about lossless speculation: the whole of it is `walk`.

    target    the model whose words are served
    draft     a tree of tokens that somebody proposed ahead; its root is the last committed token
    row       one token position in a forward pass; the target's pass over a draft computes the logits of the
              root and of every node, each as if the node's ancestors were the text
    sample    the target's own word after a node: its processed logits plus position-keyed noise, largest wins

The promise: every emitted token is the target's own sample. The walk asks the target for its word after the last
committed token. If a child of the draft carries that very word, the word's row was computed too, so the walk steps
there and asks again. Where no child carries it, the word is emitted all the same, as the bonus, and the walk ends.

So a draft decides how many words come out of one pass, and never which. There is no acceptance coin, no residual
distribution, no draft probability. A word is a function of the text before it, of the noise at its position and of
nothing else, and the empty draft is plain decoding.

`walk` is lazy: the caller takes the words one by one, lets penalties see each before the next is
drawn, and stops taking at a stop condition. What was not taken was never said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from understudy.core.draft import ROOT, Draft
from understudy.core.request import SpeculationCounts


class Word(NamedTuple):
    """One emitted token: the row it was drawn from, and the draft's node that had foreseen it, if any did."""

    token: int
    row: int
    node: int | None


def walk(draft: Draft, sample: Callable[[int], int]) -> Iterator[Word]:
    """Yield the target's words along the draft. `sample(row)` draws at row 0, the root, or row node + 1."""
    node: int | None = ROOT
    while node is not None:
        row = node + 1
        token = sample(row)
        node = draft.child(node, token)
        yield Word(token, row, node)


def words_along(draft: Draft, sample: Callable[[int], int]) -> Iterable[Word]:
    """`walk`, and the one word of it at once where there is no draft: hundreds of texts may have none."""
    return walk(draft, sample) if draft.tokens else [Word(sample(0), 0, None)]


@dataclass(slots=True)
class Verdict:
    """What one walk over a draft came to."""

    draft: Draft
    words: list[Word] = field(default_factory=list)
    cut: bool = False
    """A stop condition ended the walk; what lay beyond it was neither accepted nor rejected."""

    @property
    def path(self) -> list[int]:
        """The accepted nodes, from the root down, whose rows now belong to the text."""
        return [word.node for word in self.words if word.node is not None]

    @property
    def num_accepted(self) -> int:
        """Drafted positions that were what the target says."""
        return len(self.path)

    @property
    def num_rejected(self) -> int:
        """Drafted positions, on the longest path, that were not; after a cut only those that came to be decided."""
        decided = min(len(self.words), self.draft.depth) if self.cut else self.draft.depth
        return decided - self.num_accepted

    def count(self, counts: SpeculationCounts, proposed: Sequence[Draft]) -> None:
        """Count the cycle, if it said anything. `proposed` is all that was offered, bought or not."""
        if not self.words:
            return
        counts.cycles += 1
        for draft in proposed:
            if len(draft):
                counts.proposed[draft.sources[0]] = counts.proposed.get(draft.sources[0], 0) + len(draft)
        if not len(self.draft):
            return
        depth = self.draft.depth
        counts.drafted += depth
        counts.add_walk(word.node is not None for word in self.words[:depth])
        counts.rows += len(self.draft)
        counts.accepted += self.num_accepted
        counts.rejected += self.num_rejected
        counts.add_draft(self.draft.sources, self.path)

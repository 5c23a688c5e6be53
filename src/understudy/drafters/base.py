"""The seam between the engine and whatever proposes tokens ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from understudy.control.cost import CostModel
from understudy.core.draft import Draft
from understudy.core.request import SamplingParams
from understudy.sampling.noise import NoiseKey


@dataclass(slots=True)
class Context:
    """What a drafter may know of a sequence. `tokens` only grows: a drafter's state is the length it has read."""

    sequence_id: int
    tokens: list[int]
    """Every committed token, the prompt first. The next token's position is len(tokens)."""
    num_prompt_tokens: int
    tenant: str
    temperature: float
    noise: NoiseKey
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How the target's words are drawn: a drafter that draws as it does guesses along with the dice."""
    prediction_ids: tuple[int, ...] = ()
    """What the caller expects the answer to be."""
    forced_tokens: Callable[[], list[int]] | None = None
    """Asks the grammar, if there is one, which tokens must come next."""


def always(draft: Draft) -> bool:
    """A draft goes on as far as it may."""
    return True


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a draft may reach."""

    max_depth: int
    max_rows: int
    goes_on: Callable[[Draft], bool] = always
    """Asked by drafters whose tokens cost time, before each further one: is it worth that, given the chain so far?"""


class Drafter(Protocol):
    """Three calls. A drafter that raises is left out of the step, and is switched off after repeated failures."""

    name: ClassVar[str]

    def start(self, context: Context) -> None:
        """Meet a sequence; its prompt is in `context.tokens`."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Return one draft for each context, within its budget; an empty one where there is nothing to say."""

    def stop(self, context: Context, *, finished: bool) -> None:
        """Forget a sequence. `finished`: its answer is whole and may be learned from (not aborted, no error)."""


class RareDrafter(Drafter, Protocol):
    """A drafter that has something to say for few sequences. It is not asked, nor told, of the others."""

    is_certain: ClassVar[bool]
    """Whether its proposals are facts: they are believed as stated, and not by how often they came true."""

    def concerns(self, context: Context) -> bool:
        """Whether it could ever say anything; true or false for all of the sequence's life."""


class PricedDrafter(Drafter, Protocol):
    """A drafter whose guesses cost time of their own. It is asked only where that is expected to pay.

    Every depth is a pass of its own, and one row of the target's. One that guesses all depths in a single pass says so
    by `is_one_pass = True`, and one whose guesses have rivals beside them by `rows_per_guess = 2`. One whose confidence
    was trained on how often guesses are right says by `trust` how far to believe it before anything is measured.
    """

    cost: CostModel
    """What its passes cost."""

    def num_unread(self, context: Context) -> int:
        """Tokens of the text that it has to read before its first guess; at least one."""


class AheadDrafter(Drafter, Protocol):
    """A drafter whose last guesses are on a device when it answers: it names the places where they will be."""

    unseen: frozenset[int]
    """The numbers that stand for words in its last answer: -1 - place, see `kernels.interface.Passes`."""

    ready_s: float
    """When its last guesses are expected to be there, by the clock."""

    def take_words(self) -> dict[int, tuple[int, float]]:
        """The words that they stand for, and how sure each is; empty if there are none to tell."""


class EarlyDrafter(AheadDrafter, Protocol):
    """One that can begin before it is asked: its device works while the host plans the next cycle."""

    def begin(self, contexts: Sequence[Context]) -> bool:
        """Begin to draft for texts that are likely to be asked about next; return whether anything is under way.

        It comes when new words are known, and `ready_s` tells when it will be done. Not all of them need be asked
        about then, and others may be.
        """


class PreparedDrafter(Drafter, Protocol):
    """One whose first pass of each size takes longer than the others."""

    def prepare(self) -> Iterator[None]:
        """Make usual passes ready, one with each `next`; it comes while nobody is served."""


class FeatureDrafter(Drafter, Protocol):
    """A drafter that guesses from hidden states of the target. Where they cannot be shown, it is left out.

    One that reads them on a device, where they stay, says so by `reads_on_device = True`: it is given `ShownRows`
    (kernels/interface.py) instead of numbers.
    """

    feature_layers: tuple[int, ...]
    """Those that it wants to see, in this order: n is the residual stream after the first n layers (0: the embedding),
    and `kernels.interface.NORMED` what the output layer reads."""

    def see(self, context: Context, first: int, features: Any) -> None:
        """Take the hidden states [rows, layers, hidden], fp32, of the tokens at positions first, first + 1 and so on.

        It comes after the words of a pass, and before the next `propose`. The last token of the text has not been
        computed then: the last row is that of the token before it. Positions only grow, and none comes twice; some may
        never come, so `first` may lie beyond the end of what was seen. This adds to every pass: whoever has much to
        compute had better keep the rows, which may be kept but not written to, until a guess is asked for.
        """


class ScoutingDrafter(Drafter, Protocol):
    """A drafter that learns from rows of its own in the target's pass, which are never part of the text."""

    num_scouts: int
    """Rows that it asks for."""

    def scout(self, context: Context) -> Draft:
        """A tree of rows to compute; the target's words after its leaves come back through `learn`."""

    def learn(self, context: Context, words: Sequence[int]) -> None:
        """Take the target's word after each leaf of the last `scout`, in order of the nodes."""

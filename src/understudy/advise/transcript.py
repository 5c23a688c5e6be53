"""A finished text: all that is needed to draft for it again."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One choice of a request, and what the target said.

    Times order what a drafter may have learned: an answer is known to those that arrive at its end or later. Left
    out, each of several transcripts begins when the one before it has ended.
    """

    request: Request
    answer_ids: tuple[int, ...]
    """Every token that was said, the one that ended the text included."""
    seed: int
    """The one that the words were drawn with; a request need not name it."""
    choice: int = 0
    finished: bool = True
    """Whether the text came to its end. Of one that was cut off, what was said is scored, and nothing is learned."""
    run: str = ""
    """The server's life that it belongs to: a new one has learned nothing yet, and its clock begins anew."""
    arrived_s: float = 0.0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.request.prompt_ids, "an engine refuses an empty prompt"
        assert self.answer_ids, "a text without a word has nothing to score"
        assert self.ended_s >= self.arrived_s, "a text ends after it began"

    @property
    def workload_class(self) -> str:
        """The kind of traffic that it was."""
        return self.request.workload_class

    @property
    def num_tokens(self) -> int:
        """Tokens said."""
        return len(self.answer_ids)

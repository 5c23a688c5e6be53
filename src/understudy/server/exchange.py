"""One request on its way through the server: who asked, what, and what it came to. Metrics and records read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from understudy.core.request import Facts, Output, Request

Outcome = Literal["running", "finished", "cancelled", "refused", "overloaded", "lost", "error"]
"""refused: it can never be served. overloaded: not now. lost: the engine died. cancelled: the client left."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. The tenant keeps caches and learned drafts apart; it is derived from the key and does not show it."""

    tenant: str = ""
    is_admin: bool = False
    is_local: bool = True
    """The peer is this machine."""


@dataclass(slots=True)
class Exchange:
    """A request with its times, all on one monotonic clock."""

    request: Request
    caller: Caller
    endpoint: str
    """`chat` or `completions`."""
    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    outcome: Outcome = "running"
    facts: list[Facts] = field(default_factory=list)
    """Of every choice that ended while somebody was reading."""
    answers: dict[int, list[int]] | None = None
    """The token ids of every choice, where somebody keeps records; None where nobody does."""

    def saw(self, output: Output) -> None:
        """Note an output."""
        self.last_s = time.monotonic()
        if self.first_s is None and output.token_ids:
            self.first_s = self.last_s
        self.num_tokens += len(output.token_ids)
        if self.answers is not None:
            self.answers.setdefault(output.choice, []).extend(output.token_ids)
        if output.facts is not None:
            self.facts.append(output.facts)
        if output.finish_reason == "error":
            self.outcome = "error"

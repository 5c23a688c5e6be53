"""The one stream that metrics, dashboards, benchmarks and audits read. Every fallback is an event with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from understudy.core.request import Facts, FinishReason


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something did not go the first way, and what was done instead."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that works, and that a user should know: what it costs, or what would be better."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The control plane changed its mind, or saw something that it had to act on."""

    what: str
    """Which part of it: breaker, sharing, ledger, health, rule, policy, experiment, shadow, switch."""
    subject: str
    """What it is about, such as `code` or `code, suffix`."""
    outcome: str
    """What holds from now on, in a word or two."""
    reason: str
    """Why, in a sentence with its numbers."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One engine step: how many rows it computed for whom, what it emitted and how long each part took."""

    num_sequences: int
    num_prompt_rows: int
    num_draft_rows: int
    num_scout_rows: int
    """Rows that a drafter learns from; they are never part of a text."""
    num_emitted: int
    num_accepted: int
    context: int
    draft_s: float
    forward_s: float
    """The target's pass, until its words were seen; a device that draws words does so within it."""
    sample_s: float
    """What the host did then: drawing words where the device does not, telling them, learning from them. A device that
    draws may be at the next pass already."""
    total_s: float
    reason: str
    num_rows: int
    """Of all kinds: those named above, and one for the last word of each sequence that spoke."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running sequence gave its blocks back and will be computed again."""

    request_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice of a request ended, whether anybody was still reading it or not."""

    request_id: str
    choice: int
    finish_reason: FinishReason
    facts: Facts


Event = Fallback | Notice | Decided | Cycle | Preempted | Ended
EventSink = Callable[[Event], None]


def log_fallbacks(event: Event) -> None:
    """Write fallbacks, notices and decisions to the log `understudy`: the sink of those who do not ask for another."""
    if isinstance(event, Fallback):
        logging.getLogger("understudy").warning("%s: %s", event.what, event.reason)
    elif isinstance(event, Notice):
        logging.getLogger("understudy").warning("%s: %s", event.what, event.text)
    elif isinstance(event, Decided):
        logging.getLogger("understudy").info("%s: %s %s: %s", event.what, event.subject, event.outcome, event.reason)


def ignore(event: Event) -> None:
    """Drop an event: the sink of those who do not listen."""

"""Whether to ask a drafter that costs time, for whom and how far ahead: a pure function of measured numbers.

A draft model reads the text it has not read yet (`catch_up`), then makes one pass per drafted token, or one for all of
them. Both are paid before anything is known of the draft, so they are weighed beforehand with the acceptance measured
so far:

    tokens per second = (words said anyway + words that the drafts add) / (the target's pass + the drafter's passes)

The plan is the choice of sequences and depth that makes this largest; where no choice beats asking nobody, nobody is
asked. All wait for the passes of those that are asked, and for whoever gains less than that there will soon be no room
left (policy.py), so no plan makes anybody wait for longer than he can (`Prospect.patience_s`). While it drafts, the
drafter asks before each further pass whether one more token is worth it (`Plan.is_worth`). A plan that says no would
never learn that things have changed, so a small share of plain time is saved up and spent on asking all the same
(`Allowance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from understudy.control.classes import ClassNames
from understudy.control.cost import CostModel, Load
from understudy.control.policy import LEAST_GAIN

MOST_DEPTH = 8
"""Passes of a draft model in one cycle, at most: the deeper tokens hardly ever pay for one more."""
MOST_READ_ROWS = 256
"""Rows of unread text that a draft model reads in one cycle: while it reads on, nothing is drafted."""
_PROBING_SHARE = 0.005
"""Share of plain time that may be spent on drafters whose plan says no."""
_LENGTH_WEIGHT = 0.2
_LEAST_LOSS = 0.003
"""Share of a step that asking may take in vain: less than that is not worth resting for."""
_VAIN_ASKS = 8
"""In a row: after so many a half of that share is enough, then a third, at last a quarter."""
_LEAST_PART = 4
_FIRST_CREDIT = 0.25
"""Steps that the first asks of a kind may cost: a drafter is trusted little before it is known, so they buy little."""
_MOST_SAVED = 0.5
"""Steps that good times may pay for bad ones: of a draft that pays, some are not worth a row, several in a row."""
_MOST_SKIPPED = 127
"""Steps for which nobody is asked at a time."""
_MOST_KINDS = 256


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a drafter could do for one sequence."""

    context: int
    """Tokens of its text so far."""
    num_unread: int
    """Tokens of it that the drafter must read first; one where it is up to date."""
    acceptance: Sequence[float]
    """By position, given that those before it were right; as long as the deepest draft allowed."""
    free_tokens: float
    """Words that drafts which cost nothing are expected to add already."""
    num_left: float
    """Words that the sequence is still expected to say: what reading its text is spread over."""
    patience_s: float = math.inf
    """How much longer each step may take than its words would plainly, if others gain by that."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to ask and how far, and at what speed."""

    asked: tuple[int, ...] = ()
    """Indexes of the prospects that are asked."""
    depth: int = 0
    tokens_per_s: float = 0.0
    """The speed that is expected, which every further token has to keep up with."""
    token_s: float = 0.0
    """What one more drafted token costs one sequence: its share of a pass, and its row in the target's."""
    drafting_s: float = 0.0
    """What the drafter's own passes take in this cycle, what comes with them, and its reading, spread over the cycles
    that it serves."""
    load: Load | None = None
    """The target's pass with all that would be drafted."""

    def is_worth(self, survival: float) -> bool:
        """Whether a further token that will stand with this probability is worth its time."""
        return survival >= self.tokens_per_s * self.token_s


def plan(
    prospects: Sequence[Prospect],
    base: Load,
    *,
    target: CostModel,
    drafter: CostModel,
    num_emitting: int,
    is_one_pass: bool = False,
    rows_per_guess: int = 1,
    overhead_s: float = 0.0,
    others_patience_s: float = math.inf,
) -> Plan:
    """Choose whom to ask and how far. `base` is the target's pass without drafts, in which `num_emitting` speak.

    `is_one_pass`: the drafter makes one pass, however deep the draft. `rows_per_guess`: rows of the target's pass for
    each depth. `overhead_s`: what asking takes beside the drafter's passes. `others_patience_s`: as in Prospect, of the
    least patient text of the pass that is no prospect.
    """
    free = sum(prospect.free_tokens for prospect in prospects)
    free_load = _with_rows(base, round(free), prospects)
    plain = (num_emitting + free) / target.step_s(free_load)
    most = max((len(prospect.acceptance) for prospect in prospects), default=0)
    if not most:
        return Plan()
    outlooks = [_by_depth(prospect, most, drafter) for prospect in prospects]
    # those who gain most first; a text that is dear to read must not stand before those that are read already
    losses = [plain * deepest.reading_s - deepest.added for *_, deepest in outlooks]
    order = sorted(range(len(prospects)), key=lambda index: losses[index])
    plain_s = target.step_s(base)
    # how much longer than a plain step a text may take: what it gains by what is free, and its patience
    waits_s = [prospect.patience_s + plain_s * prospect.free_tokens for prospect in prospects]
    left_s = [others_patience_s]  # the least of it, of all who stand behind each place in that order
    for index in reversed(order):
        left_s.insert(0, min(left_s[0], waits_s[index]))
    best, best_speed = Plan(), plain * LEAST_GAIN
    added, reading_s = [0.0] * most, [0.0] * most  # by depth, of all that are chosen so far
    asked_s = [math.inf] * most  # likewise the least that they may take, with what they gain
    keys = 0
    for count, index in enumerate(order, 1):
        keys += prospects[index].context
        pass_s = drafter.step_s(Load(count, keys, keys))
        for depth, outlook in enumerate(outlooks[index]):
            added[depth] += outlook.added
            reading_s[depth] += outlook.reading_s
            asked_s[depth] = min(asked_s[depth], waits_s[index] + plain_s * outlook.added)
        if math.isinf(reading_s[0]):
            break  # so it is for all who come after: they stand in order of what they lose
        for depth in range(1, most + 1):
            each = depth * rows_per_guess
            rows = Load(base.rows + count * each, base.keys, base.reads + each * keys)
            verify_s = target.drafted_s(rows, plain_s)
            drafting_s = overhead_s + (1 if is_one_pass else depth) * pass_s + reading_s[depth - 1]
            speed = (num_emitting + free + added[depth - 1]) / (verify_s + drafting_s)
            longest_s = plain_s + min(asked_s[depth - 1], left_s[count])
            if speed > best_speed and verify_s + drafting_s <= longest_s:
                row_s = (verify_s - plain_s) / (count * depth)
                token_s = row_s if is_one_pass else pass_s / count + row_s
                best = Plan(tuple(sorted(order[:count])), depth, speed, token_s, drafting_s, rows)
                best_speed = speed
    return best


def asking_s(context: int, num_unread: int, drafter: CostModel) -> float:
    """What asking for one token of a text costs at most, with all the reading that comes first."""
    return drafter.step_s(Load(num_unread, context, context * num_unread))


class _Outlook(NamedTuple):
    """What a draft of one depth comes to for one sequence."""

    added: float
    """Words, beyond those that come free."""
    reading_s: float
    """What reading the unread part costs beyond a single row, spread over the cycles that it will serve."""


def _by_depth(prospect: Prospect, most: int, drafter: CostModel) -> list[_Outlook]:
    """The outlook for each depth from one up to `most`.

    Words are said while it is read, in pieces, without a draft: a text that will be over by then is never worth it.
    """
    context, free = prospect.context, prospect.free_tokens
    num_pieces = (prospect.num_unread - 1) // MOST_READ_ROWS
    num_left = prospect.num_left - num_pieces * (1.0 + free)
    whole_s = drafter.step_s(Load(prospect.num_unread, context, context * prospect.num_unread))
    beyond_s = max(0.0, whole_s - drafter.step_s(Load(1, context, context))) if num_left > 0.0 else math.inf
    outlooks: list[_Outlook] = []
    total, reached = 0.0, 1.0
    for depth in range(most):
        reached *= prospect.acceptance[depth] if depth < len(prospect.acceptance) else 0.0
        total += reached
        added = max(0.0, total - free)
        cycles = max(1.0, num_left / (1.0 + free + added))
        outlooks.append(_Outlook(added, beyond_s / cycles))
    return outlooks


def _with_rows(base: Load, num_rows: int, prospects: Sequence[Prospect]) -> Load:
    mean_context = sum(prospect.context for prospect in prospects) / max(1, len(prospects))
    return Load(base.rows + num_rows, base.keys, base.reads + round(num_rows * mean_context))


class Allowance:
    """Time saved up for probing, by whatever is probed: a small share of the time that went by without it."""

    def __init__(self) -> None:
        self._saved_s: dict[str, float] = {}

    def save(self, name: str, seconds: float) -> None:
        """Note time spent without the drafter."""
        self._saved_s[name] = self._saved_s.get(name, 0.0) + _PROBING_SHARE * seconds

    def spend(self, name: str, seconds: float) -> bool:
        """Take `seconds` if that much was saved.

        What was saved for something dearer is not spent on many of these in a row: one more, and it is forgotten.
        """
        saved_s = self._saved_s.get(name, 0.0)
        if saved_s < seconds:
            return False
        self._saved_s[name] = min(saved_s - seconds, seconds)
        return True


class Worth:
    """Whether asking drafters at all pays for the time that asking takes.

    A drafter that costs microseconds is not free where a step takes milliseconds and holds many sequences of which few
    gain. So there is a balance for each kind of step: what asking took is taken from it, what it was expected to save
    and a small share of every step are paid in, smaller where nothing was worth buying for long. While it is below zero
    nobody is asked.
    """

    def __init__(self) -> None:
        self._balances: dict[str, float] = {}  # in plain steps
        self._before: tuple[str, float, int] | None = None  # a kind's balance and vain asks before the last ask
        self._num_vain: dict[str, int] = {}  # asks in a row that took their time and saved nothing

    def asks(self, kind: str) -> bool:
        """Whether to ask in a step of this kind. To be asked once for each step."""
        return not self.num_resting(kind)

    def num_resting(self, kind: str, num_slept: int = 0) -> int:
        """For how many steps of this kind, this one included, nobody is to be asked. To be asked once for each step.

        `num_slept`: steps before it of which nobody asked here.
        """
        balance = self._balances.get(kind)
        if balance is None:  # kinds come from outside: only those that are known are kept
            return 0
        share = self._share(kind)
        self._balances[kind] = balance = min(_MOST_SAVED, balance + share * (1 + num_slept))
        return 0 if balance >= 0.0 else math.ceil(-balance / share)

    def num_to_rest(self, kind: str) -> int:
        """For how many of the next steps of this kind nobody will be asked, as things stand."""
        return max(0, math.ceil(-self._balances.get(kind, _FIRST_CREDIT) / self._share(kind)) - 1)

    def _share(self, kind: str) -> float:
        return _LEAST_LOSS / min(_LEAST_PART, 1 + self._num_vain.get(kind, 0) // _VAIN_ASKS)

    def observe(self, kind: str, *, saved: float, spent: float) -> None:
        """Count a step that asked: the shares of a plain step that it was expected to save, and that asking took."""
        self._before = None
        if kind in self._balances or len(self._balances) < _MOST_KINDS:
            balance = self._balances.get(kind, _FIRST_CREDIT)
            self._before = kind, balance, self._num_vain.get(kind, 0)
            balance += saved - spent
            is_vain = saved <= 0.0 and spent > _LEAST_LOSS
            self._num_vain[kind] = self._num_vain.get(kind, 0) + 1 if is_vain else 0
            self._balances[kind] = max(-self._share(kind) * _MOST_SKIPPED, min(_MOST_SAVED, balance))

    def take_back(self) -> None:
        """Forget the ask that was counted last: what it took says nothing of those to come."""
        if self._before is not None:
            kind, self._balances[kind], self._num_vain[kind] = self._before
            self._before = None


class AnswerLengths:
    """How long answers of a class tend to be."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}
        self._classes = ClassNames()

    def observe(self, workload_class: str, num_tokens: int) -> None:
        """Count a finished answer."""
        known = self._classes.known(workload_class)
        mean = self._mean.get(known, float(num_tokens))
        self._mean[known] = mean + _LENGTH_WEIGHT * (num_tokens - mean)

    def means(self) -> dict[str, float]:
        """All that is known, to be kept."""
        return dict(self._mean)

    def recall(self, means: Mapping[str, float]) -> None:
        """Begin with what was known."""
        for name, mean in means.items():
            self._mean[self._classes.known(name)] = mean

    def num_left(self, workload_class: str, *, num_generated: int, num_allowed: int) -> float:
        """Words that an answer is still expected to say. One that is long already is expected to go on for a while."""
        mean = self._mean.get(self._classes.known(workload_class))
        if mean is None:
            return float(num_allowed)
        return min(float(num_allowed), max(mean - num_generated, mean / 4.0))

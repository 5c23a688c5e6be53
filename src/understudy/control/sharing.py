"""Whether drafts bring enough to be noticed, where texts share their steps.

A draft for one of several texts makes the others wait for its rows, and a text that ends sooner is followed sooner by
the next prompt. What that takes is written down (ledger.py, following.py), but in the mean: with every word that comes
sooner it changes which answers are read beside which prompts, and of hundreds the longest are those that had bad luck.
Where drafts bring a tenth, that is a fair price. Where they bring a percent nobody would notice the gain, and somebody
the wait.

So a line of texts is drafted for beside others only while that brings LEAST_SHARE of their time. It is looked at after
every TRIAL_STEPS; if it brought less, nothing is drafted for that line among about as many texts for REST_STEPS, and
then it is tried again. A text that is alone makes nobody wait, and is none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from understudy.control.classes import ClassNames, Line
from understudy.core.events import Decided, EventSink

LEAST_SHARE = 0.03
"""Of the time of texts, their prompts' passes included: what drafting must save of it, all its own time paid."""
TRIAL_STEPS = 512
REST_STEPS = 8192


@dataclass(slots=True)
class _Kind:
    """A line among about so many texts, since it was last looked at."""

    is_resting: bool = False
    num_steps: int = 0
    passed_s: float = 0.0
    gained_s: float = 0.0

    @property
    def is_looked_at(self) -> bool:
        """Whether it is time to."""
        return self.num_steps >= (REST_STEPS if self.is_resting else TRIAL_STEPS)

    @property
    def brings_little(self) -> bool:
        """Whether nobody would notice what was gained."""
        return self.passed_s > 0.0 and self.gained_s < LEAST_SHARE * self.passed_s


class Sharing:
    """Keeps what drafts bring to each line, by how many texts share a step, and lets those rest that gain little."""

    def __init__(self, emit: EventSink) -> None:
        self._emit = emit
        self._names = ClassNames()
        self._kinds: dict[tuple[Line, int], _Kind] = {}

    def is_resting(self, line: Line, num_texts: int) -> bool:
        """Whether nothing is drafted for a line among so many texts."""
        return num_texts > 1 and self._kind(line, num_texts).is_resting

    def resting(self, lines: Sequence[Line], *, num_slept: int = 0, slept_s: float = 0.0) -> frozenset[Line]:
        """The lines for which nothing is drafted in a step of these texts. To be asked once for each step.

        `num_slept`: steps like this one that went before it, and of which nothing was written down; `slept_s` in all.
        """
        num_texts = len(lines)
        if num_texts < 2:
            return frozenset()
        counts = Counter(lines)
        for line, count in counts.items():
            kind = self._kind(line, num_texts)
            kind.num_steps += 1 + num_slept
            kind.passed_s += slept_s * count / num_texts
            if kind.is_looked_at:
                self._look(line, num_texts, kind)
        return frozenset(line for line in counts if self._kind(line, num_texts).is_resting)

    def observe(self, line: Line, num_texts: int, *, passed_s: float, gained_s: float) -> None:
        """Count a step of so many texts: what the words of this line would have taken plainly, and what was saved."""
        if num_texts > 1:
            kind = self._kind(line, num_texts)
            kind.passed_s += passed_s
            kind.gained_s += gained_s

    def _look(self, line: Line, num_texts: int, kind: _Kind) -> None:
        was_resting = kind.is_resting
        rests = not was_resting and kind.brings_little
        if rests:
            share = f"{kind.gained_s / kind.passed_s:.1%} of the time of texts that share their steps"
            reason = f"drafts saved {share}, less than {LEAST_SHARE:.0%}: none for {REST_STEPS} steps"
            self._tell(line, num_texts, "off", reason)
        elif was_resting:
            self._tell(line, num_texts, "probing", "it has rested")
        self._kinds[self._key(line, num_texts)] = _Kind(is_resting=rests)

    def _tell(self, line: Line, num_texts: int, outcome: str, reason: str) -> None:
        most = 1 << _size(num_texts)
        self._emit(Decided("sharing", f"{self._names.known_line(line)}, up to {most} texts", outcome, reason))

    def _kind(self, line: Line, num_texts: int) -> _Kind:
        return self._kinds.setdefault(self._key(line, num_texts), _Kind())

    def _key(self, line: Line, num_texts: int) -> tuple[Line, int]:
        return self._names.known_line(line), _size(num_texts)


def _size(num_texts: int) -> int:
    """A number of texts up to a power of two."""
    return (num_texts - 1).bit_length()

"""The control group: a small share of the time in which everybody is served plainly, so that the gain can be told.

A plain request beside others that draft would look slow, because it waits for their rows. So the whole engine is
plain in some windows: short ones at random places where several texts share its steps, and one text from its first
word to its last where it is alone. What is compared is the time of each such episode per plain time of its words,

    gain of an episode = log(plain time of its words / time that they took)

in which batch and context are the same on both sides. Each plain episode is held against the mean of those with drafts
that went before it: what the machine's drift does to that difference has no sign.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from understudy.control.sequential import ConfidenceSequence
from understudy.core.control import Speedup

WINDOW_STEPS = 32
_LEAST_STEPS = 8
"""An episode that was shorter says too little."""
_MOST_EPISODES = 16
"""With drafts, that a plain one is held against."""
_MOST_GAIN = 3.0
"""Beyond a factor of twenty a clock was wrong."""


@dataclass(slots=True)
class _Episode:
    is_plain: bool
    text: int | None
    """The text that was alone in it, or None for a window of several."""
    plain_s: float = 0.0
    spent_s: float = 0.0
    num_steps: int = 0


@dataclass(slots=True)
class Switchback:
    """Chooses plain episodes, and compares them with the others."""

    share: float
    pairs: ConfidenceSequence = field(default_factory=ConfidenceSequence)
    """Of gains with drafts less gains of plain episodes."""
    rng: random.Random = field(default_factory=random.Random)
    _episode: _Episode | None = None
    _gains: dict[bool, deque[float]] = field(default_factory=lambda: {True: deque(), False: deque()})
    """Of the last episodes with drafts, those of texts that were alone and those of several."""

    def is_plain(self, texts: list[int]) -> bool:
        """Whether the next step is a plain one; `texts` are the ids of those that share it."""
        if self.share <= 0.0 or not texts:
            return False
        alone = texts[0] if len(texts) == 1 else None
        episode = self._episode
        is_over = episode is None or episode.text != alone or (alone is None and episode.num_steps >= WINDOW_STEPS)
        if is_over:
            self._end()
            episode = self._episode = _Episode(self.rng.random() < self.share, alone)
        assert episode is not None
        return episode.is_plain

    def observe(self, *, plain_s: float, spent_s: float) -> None:
        """Count a step of the present episode: what its words would have taken plainly, and what they took."""
        if self._episode is not None:
            self._episode.plain_s += plain_s
            self._episode.spent_s += spent_s
            self._episode.num_steps += 1

    def speedup(self) -> Speedup | None:
        """The gain of speculation so far; None while nothing can be said."""
        return self.pairs.speedup()

    def _end(self) -> None:
        episode, self._episode = self._episode, None
        if episode is None or episode.num_steps < _LEAST_STEPS or min(episode.plain_s, episode.spent_s) <= 0.0:
            return
        gain = max(-_MOST_GAIN, min(_MOST_GAIN, math.log(episode.plain_s / episode.spent_s)))
        gains = self._gains[episode.text is not None]
        if not episode.is_plain:
            gains.append(gain)
            if len(gains) > _MOST_EPISODES:
                gains.popleft()
        elif gains:
            self.pairs.add(sum(gains) / len(gains) - gain)

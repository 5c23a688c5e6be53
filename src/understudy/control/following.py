"""What it costs those who ride along that a text ends sooner: the next prompt is read sooner, and all wait for it.

Where somebody asks as soon as a place is free (a full queue, a closed loop), words that a text gained bring the next
prompt forward. Over an answer that comes to as much as a prompt takes, so a word brings forward its share of one. A
prompt that comes by itself would have come anyway, whoever ended sooner.
"""

from __future__ import annotations

_SOON_STEPS = 4
"""Steps after a text ended within which a prompt takes its place: whoever asks again needs a moment to do so."""
_MOST_WORDS = 4096.0
"""Words after which what came before counts half."""


class Following:
    """Learns from every pass."""

    def __init__(self) -> None:
        self._prompts_s = 0.0
        self._num_words = 0.0
        self._num_since = _SOON_STEPS + 1  # steps since a text ended, or since a prompt that followed one was read

    @property
    def word_s(self) -> float:
        """What a word that is said sooner makes all others wait."""
        return self._prompts_s / self._num_words if self._num_words else 0.0

    def observe(self, *, prompts_s: float, num_words: int, has_ended: bool) -> None:
        """Count a pass: what its prompts took, if it had any, what was said, and whether a text ended with it."""
        follows = prompts_s > 0.0 and self._num_since <= _SOON_STEPS
        self._num_since = 0 if follows or has_ended else self._num_since + 1
        self._num_words += num_words
        if follows:
            self._prompts_s += prompts_s
        if self._num_words > _MOST_WORDS:
            self._num_words /= 2.0
            self._prompts_s /= 2.0

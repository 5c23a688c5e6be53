"""Text that arrives token by token, released as soon as it is certain and cut where a stop string begins.

What is promised, whatever the grouping in which tokens arrive:

- The first token whose arrival completes any stop string ends the text.
- The text is cut before the earliest start among the stop strings completed by then; of several that start there,
  `stopped` names the one listed first.
- Nothing is released that a later token could turn into something else: half a character, or the start of a stop
  string.

The released pieces, joined, equal the whole output decoded at once and cut by these rules. The cost of a token does
not grow with the text: bytes go through an incremental UTF-8 decoder, and each stop string remembers how much of
itself the text ends with (Knuth, Morris and Pratt), which is also how much must be held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from understudy.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice. Feed it every token once, in order; look at `stopped` after each."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, at_start: bool = False) -> None:
        """Begin a text; `at_start` when no prompt is before it.

        SentencePiece-style vocabularies write a space before the first word of a text, which decoding drops. Behind a
        prompt that space is part of the text; `at_start` drops it, as `Tokenizer.decode` does.
        """
        self.stopped: str | None = None
        """The stop string that ended the text, once one did."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = at_start and tokenizer.drops_leading_space
        self._stops = [_StopString(text) for text in stop]
        self._held = ""  # decoded, but a stop string may start in it

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take one more token and return the text that is now certain.

        Without `may_stop` a stop string that this token completes is passed over: a minimum length is not reached.
        """
        if self.stopped is not None:
            return ""
        return self._release(self._decoded(self._tokenizer.token_bytes(token_id)), may_stop=may_stop)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings: if not, nobody need look at the text before it is told."""
        return bool(self._stops)

    def add_all(self, token_ids: Sequence[int]) -> str:
        """Take tokens that no stop string can end the text at: there are none."""
        assert not self._stops
        if len(token_ids) == 1:
            return self._decoded(self._tokenizer.token_bytes(token_ids[0]))
        return self._decoded(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def _decoded(self, added: bytes) -> str:
        if added and self._drop_space:
            added, self._drop_space = added.removeprefix(b" "), False
        if not self._decoder.buffer:
            try:
                return added.decode()
            except UnicodeDecodeError:  # a character is not whole yet, or will never be one
                pass
        return self._decoder.decode(added)

    def finish(self) -> str:
        """Release what was held back; the bytes of an unfinished character become U+FFFD."""
        if self.stopped is not None:
            return ""
        certain = self._release(self._decoder.decode(b"", final=True), may_stop=True)
        rest, self._held = self._held, ""
        return certain + rest

    def _release(self, text: str, *, may_stop: bool) -> str:
        """Move new characters through the stop strings and let go of what can no longer belong to one."""
        if not self._stops:
            return text
        before = len(self._held)
        self._held += text
        found: tuple[int, int] | None = None  # (start within held, place in the list): the least one wins
        for place, stop in enumerate(self._stops):
            end = stop.advance(text, may_stop=may_stop)
            if end is not None:
                start = before + end - len(stop.text)
                found = min(found or (start, place), (start, place))
        if found is not None:
            certain, self._held = self._held[: found[0]], ""
            self.stopped = self._stops[found[1]].text
            return certain
        keep = max(stop.matched for stop in self._stops)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


class _StopString:
    """One stop string, and how many of its characters the text ends with."""

    def __init__(self, text: str) -> None:
        assert text, "an empty stop string would stop every text"
        self.text = text
        self.matched = 0
        self._fallback = [0]  # [n]: after n + 1 characters matched, the next shorter prefix that also ends the text
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._fallback[length - 1]
            length += text[length] == character
            self._fallback.append(length)

    def advance(self, added: str, *, may_stop: bool) -> int | None:
        """Read more text; return where in `added` the string first ended, if it did."""
        for index, character in enumerate(added):
            while self.matched and self.text[self.matched] != character:
                self.matched = self._fallback[self.matched - 1]
            self.matched += self.text[self.matched] == character
            if self.matched == len(self.text):
                if may_stop:
                    return index + 1
                self.matched = self._fallback[self.matched - 1]
        return None

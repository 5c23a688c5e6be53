"""Log probabilities in the two shapes that clients read. Bytes are exact; text has U+FFFD where they are not UTF-8."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from understudy.core.request import TokenLogprob
from understudy.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, object]:
    """The shape of /v1/chat/completions."""
    content = [
        {
            **_entry(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in entry.top[:num_top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The shape of /v1/completions, piece by piece: `text_offset` counts characters from the text's beginning."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._drops_space = False

    def of_prompt(self, first: int, rest: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """A prompt's tokens. Nothing stands before the first, so it has no probability."""
        self._drops_space = self._tokenizer.drops_leading_space
        head: dict[str, list[object]] = {
            "text_offset": [self._advance(first)],
            "token_logprobs": [None],
            "tokens": [token_text(self._tokenizer, first)],
            "top_logprobs": [None],
        }
        return joined(head, self.of_answer(rest))

    def of_answer(self, entries: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """Tokens that the model said."""
        return {
            "text_offset": [self._advance(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": [token_text(self._tokenizer, entry.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and the one that was said; of two with the same text, the better one."""
        best: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            best.setdefault(token_text(self._tokenizer, token), _finite(logprob))
        return best

    def _advance(self, token: int) -> int:
        """Where a token's text begins; a character that several tokens spell counts once it is whole."""
        offset = self._offset
        added = self._tokenizer.token_bytes(token)
        if added and self._drops_space:
            added, self._drops_space = added.removeprefix(b" "), False
        self._offset += len(self._decoder.decode(added))
        return offset


def joined(first: dict[str, list[object]], second: dict[str, list[object]]) -> dict[str, list[object]]:
    """One piece after another."""
    return {name: [*values, *second[name]] for name, values in first.items()}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself; special ones as they are written."""
    return tokenizer.token_bytes(token, skip_special=False).decode("utf-8", errors="replace")


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    spelled = tokenizer.token_bytes(token, skip_special=False)
    text = spelled.decode("utf-8", errors="replace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(spelled)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST

"""A vocabulary read by what its tokens spell, and any bytes written in its tokens.

Ids of two models can only be compared through the bytes they stand for. `Vocabulary` holds these for every id, finds
the token for given bytes, and spells bytes that are no token of its own.
"""

from __future__ import annotations

from functools import cached_property

from understudy.text.tokenizer import Tokenizer

LONGEST_SHOWN = 40
"""Characters of a token that a message shows; some tokens are a hundred spaces."""


class Vocabulary:
    """The tokens of one tokenizer, by their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.spellings = tokenizer.spellings()
        """The bytes of each id; None for an id without a token."""
        self.num_tokens = len(self.spellings) - self.spellings.count(None)

    @cached_property
    def text_ids(self) -> dict[bytes, int]:
        """Bytes to the token of text that spells them.

        Of several, the last one: SentencePiece lists its 256 byte tokens before the pieces, and uses them only for
        what no piece spells.
        """
        special = self.tokenizer.special_ids
        return {spelling: token for token, spelling in enumerate(self.spellings) if spelling and token not in special}

    @cached_property
    def special_ids(self) -> dict[bytes, int]:
        """The written form of each special token to its id."""
        written = ((self.spellings[token], token) for token in sorted(self.tokenizer.special_ids))
        return {spelling: token for spelling, token in written if spelling}

    def spelling(self, token: int) -> bytes | None:
        """Give the bytes of any id; None for one without a token."""
        return self.spellings[token] if token < len(self.spellings) else None

    def text_bytes(self, token: int) -> bytes:
        """Give the bytes of a token of text; none for a special token or an id without a token."""
        return b"" if token in self.tokenizer.special_ids else self.spelling(token) or b""

    def quote(self, token: int) -> str:
        """Write a token for a message: quoted, on one line, without characters that a terminal would obey."""
        spelling = self.spelling(token)
        if spelling is None:
            return "no token"
        try:
            text: str | bytes = spelling.decode()
        except UnicodeDecodeError:
            text = spelling  # a part of a character: shown as bytes
        return repr(text[:LONGEST_SHOWN]) + ("..." if len(text) > LONGEST_SHOWN else "")

    def spell(self, wanted: bytes) -> tuple[int, ...]:
        """Write bytes in tokens of text: as the tokenizer encodes them, else by the longest token at each place.

        The second way is for bytes that are not whole characters, and for tokenizers that change a text before they
        split it. Bytes for which there is no token at all are left out; a vocabulary with all 256 has none such.
        """
        encoded = self._encode(wanted)
        return self._spell_by_longest(wanted) if encoded is None else encoded

    def _encode(self, wanted: bytes) -> tuple[int, ...] | None:
        """Encode bytes as text and take the tokens at the end that spell just them, if there are such.

        What comes before them is the space that SentencePiece puts before a text. Where that runs into the text, a
        line break keeps the two apart.
        """
        try:
            text = wanted.decode()
        except UnicodeDecodeError:
            return None
        for before in ("", "\n"):
            ids = self.tokenizer.encode(before + text, add_special=False)
            first, num_bytes = len(ids), 0
            while first and num_bytes < len(wanted):
                first -= 1
                num_bytes += len(self.spellings[ids[first]] or b"")
            tail = ids[first:]
            is_text = self.tokenizer.special_ids.isdisjoint(tail)
            if is_text and b"".join(self.spellings[token] or b"" for token in tail) == wanted:
                return tuple(tail)
        return None

    def _spell_by_longest(self, wanted: bytes) -> tuple[int, ...]:
        ids: list[int] = []
        start = 0
        while start < len(wanted):
            end = next((end for end in range(len(wanted), start, -1) if wanted[start:end] in self.text_ids), None)
            if end is not None:
                ids.append(self.text_ids[wanted[start:end]])
            start = start + 1 if end is None else end
        return tuple(ids)

"""Text to token ids and back, for the byte-level and SentencePiece-style vocabularies of supported models.

Encoding is the `tokenizers` library's. Decoding is ours and works on bytes: every token stands for a fixed string of
bytes (`token_bytes`), and text is those bytes joined and read as UTF-8. So decoding a list at once and decoding it
token by token cannot differ, which the library's own decoders do not promise for unfinished characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from understudy.errors import InvalidRequest, ModelError

MAX_PROMPT_BYTES = 2 * 2**20
"""Encoding takes 1 to 2 microseconds and some 300 bytes of memory per byte of text."""
SPACE_MARK = "▁"  # SentencePiece writes a space as this character
AGAIN = "Download the model's folder again."


class Tokenizer:
    """One model's vocabulary."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        force_bos: bool = False,
        unused_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Every id that ends a text, the model's own declaration included."""
        self.chat_template = chat_template
        backend.no_truncation()  # some files carry the settings of a training run: a prompt must not be cut
        backend.no_padding()
        added: Mapping[int, Any] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids that are not text: markers of turns and ends. `decode` skips them."""
        self.marked_ids = frozenset(added)
        """Ids of tokens that are found whole in a text before it is split: all special ones, and some that are text."""
        self.unused_ids = unused_ids
        """Ids whose tokens are placeholders: they fill rows of the model and stand for nothing."""
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id. A model may have more rows than this (padding), never fewer."""
        self._backend = backend
        self._added_bytes: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        self._force_bos = force_bos  # a declaration asks for it, beside what the library adds by itself
        self._byte_level, self.drops_leading_space = _decoding_kind(_declared(backend.decoder))
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path, *, eos_ids: tuple[int, ...] = ()) -> Tokenizer:
        """Read tokenizer.json, with tokenizer_config.json and chat_template.jinja where they exist.

        `eos_ids` are those that the model's configuration declares; the tokenizer's own is added to them.
        """
        backend = _read_backend(folder / "tokenizer.json")
        settings = _read_settings(folder / "tokenizer_config.json")
        bos_id = _declared_id(backend, settings, "bos_token")
        own_eos = _declared_id(backend, settings, "eos_token")
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=tuple(dict.fromkeys((*eos_ids, *(() if own_eos is None else (own_eos,))))),
            chat_template=_read_template(folder / "chat_template.jinja", settings),
            force_bos=settings.get("add_bos_token") is True,
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, eos_ids: tuple[int, ...] = ()) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata declares; `ModelConfig.from_gguf` finds the end ids."""
        from understudy.text.gguf_vocabulary import build_backend, find_unused_ids

        template = fields.get("tokenizer.chat_template")
        bos_id = fields.get("tokenizer.ggml.bos_token_id")
        return cls(
            build_backend(fields),
            bos_id=bos_id if isinstance(bos_id, int) else None,
            eos_ids=eos_ids,
            chat_template=template if isinstance(template, str) else None,
            unused_ids=find_unused_ids(fields),
        )

    def save(self, folder: Path) -> None:
        """Write what `from_folder` reads back."""
        self._backend.save(str(folder / "tokenizer.json"), pretty=False)
        settings = {
            "bos_token": self.bos_token or None,
            "eos_token": self.eos_token or None,
            "chat_template": self.chat_template,
            "add_bos_token": self._force_bos,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")

    @property
    def bos_token(self) -> str:
        """The token before a text, as chat templates write it; empty where there is none."""
        return "" if self.bos_id is None else self._backend.id_to_token(self.bos_id) or ""

    @property
    def eos_token(self) -> str:
        """The first end token, as chat templates write it; empty where there is none."""
        return self._backend.id_to_token(self.eos_ids[0]) or "" if self.eos_ids else ""

    def token_to_id(self, token: str) -> int | None:
        """Find a token by its written form, such as `<|im_end|>`."""
        return self._backend.token_to_id(token)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        max_bytes: int = MAX_PROMPT_BYTES,
    ) -> list[int]:
        """Turn text into ids.

        `add_special` puts the begin token before it where the model wants one; a rendered chat already has it.
        `parse_special` reads `<|im_end|>` in the text as that token; without it, such text is only text.
        """
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The prompt has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}.",
                "Send text that can be written as UTF-8.",
                parameter="prompt",
            ) from None
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"The prompt has {num_bytes} bytes, more than the {max_bytes} that are read.",
                "Shorten the prompt.",
                parameter="prompt",
            )
        backend = self._backend if parse_special else self._literal_backend
        # the batch form gives the same ids without offsets, twice as fast, and other threads may run meanwhile
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoded.ids
        if add_special and self._force_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn the ids of a whole text into that text; bytes that are not UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in ids)
        if self.drops_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Give the exact bytes that a token adds to a text: none for a skipped special or an unused id."""
        if skip_special and token_id in self.special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._spell(token_id)
            if known is None:
                return b""  # and not remembered: there is no end of ids that do not exist
            self._bytes[token_id] = known
        return known

    def spellings(self) -> list[bytes | None]:
        """Give the bytes of every id, specials included; None where an id has no token, or only a placeholder."""
        return [None if token_id in self.unused_ids else self._spell(token_id) for token_id in range(self.vocab_size)]

    def _spell(self, token_id: int) -> bytes | None:
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return None
        if self._byte_level:
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE_MARK, " ").encode()

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A twin that reads special tokens in text as text: the switch is state of the library's object."""
        twin = tokenizers.Tokenizer.from_str(self._backend.to_str())
        twin.encode_special_tokens = True
        return twin


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next unused character from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = {character: byte for byte, character in _byte_alphabet().items()}


def _declared(decoder: Any) -> Mapping[str, Any] | None:
    """Give the JSON by which the library declares a decoder; its state for copying is just that."""
    declared: Mapping[str, Any] | None = None if decoder is None else json.loads(decoder.__getstate__())
    return declared


def _decoding_kind(decoder: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """Tell (byte level?, drops a leading space?) from a tokenizer.json's decoder; refuse other kinds."""
    parts = [decoder or {}]
    if parts[0].get("type") == "Sequence":
        parts = parts[0]["decoders"]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return True, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(part.get("type") == "Strip" and part.get("start") for part in parts)
        prepends = any(part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
        return False, strips or prepends
    raise ModelError(
        f"A tokenizer with the decoder {sorted(map(str, kinds))} is not supported.",
        "Supported are byte-level BPE and SentencePiece-style BPE with byte fallback.",
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist.",
            "Download tokenizer.json too; a model that has only tokenizer.model must be converted first "
            "(transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)).",
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise ModelError(f"{path} cannot be read: {error}.", AGAIN) from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", AGAIN) from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds no JSON object.", AGAIN)
    return settings


def _declared_id(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], key: str) -> int | None:
    """Find the id of a token that is written as a string, or as a table with its content."""
    token = settings.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _read_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Find the chat template: its own file first, else the settings; of several named ones, the default."""
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}.", AGAIN) from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None

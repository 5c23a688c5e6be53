"""Constrained decoding: at each position the tokens that can still become a text of the grammar, and no others.

The state advances on committed tokens only. What it allows after a text is a function of that text, so a
drafted path and a plain one are drawn under the same masks, and a draft never changes a word.

Where a grammar leaves no choice, the library also says how the tokenizer would write what must follow: only the first
token of that is allowed then, and all of it can be drafted (drafters/forced.py).

Ends are kept apart from text: the library knows a single end, an id of its own behind the model's vocabulary, and
every end id of the model is allowed where that one is, and nowhere else. Ids without a token (padding, placeholders)
spell nothing and are never allowed; markers of turns only where a grammar names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from understudy.core.request import Grammar
from understudy.text.grammar_check import library_form, parser_limits, refusal
from understudy.text.spelling import Vocabulary
from understudy.text.tokenizer import Tokenizer

Bools = NDArray[np.bool_]

_END = b"<end of text>"
_NUM_TRIED = 8
"""Tokens forced at the beginning of a text that are tried out: many a grammar that is too large fails there."""


class GrammarError(Exception):
    """A grammar that turned out too complex while a text was written, or that allows nothing more."""


class _Tokens:
    """A vocabulary as the library wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = [*(vocabulary.spelling(token) or b"" for token in range(vocab_size)), _END]
        self.eos_token_id = vocab_size
        marked = (token for token in sorted(vocabulary.tokenizer.special_ids) if token < vocab_size)
        self.special_token_ids = [*marked, vocab_size]
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        """Write text in tokens of just these bytes: what the model itself would most likely say."""
        return list(self._vocabulary.spell(text.encode()))


class GrammarCompiler:
    """Makes grammars ready for one model. It costs a tenth of a second or more to make: see `grammar_compiler`."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`vocab_size` counts the model's rows, padding included."""
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted(set(eos_ids)), np.int64)
        tokens = _Tokens(Vocabulary(tokenizer), vocab_size)
        self._tokenizer = LLTokenizer(tokens)  # type: ignore[arg-type]  # it only looks at the attributes

    def compile(self, grammar: Grammar, count: int = 1) -> list[GrammarState]:
        """The beginnings of `count` texts of a grammar; one that cannot be used is refused."""
        form = library_form(grammar)
        matchers = [self._matcher(form)]
        _try_out(matchers[0].deep_copy())
        # one anew for each: the library's copies share a lexer, and what one text meets there would end the others
        matchers += [self._matcher(form) for _ in range(count - 1)]
        states = [GrammarState(matcher, self._vocab_size, self._eos_ids) for matcher in matchers]
        try:
            states[0].allowed()
        except GrammarError as error:
            raise refusal(str(error)) from None
        return states

    def _matcher(self, form: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, form, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher


@lru_cache(maxsize=2)
def grammar_compiler(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: tuple[int, ...]) -> GrammarCompiler:
    """The compiler for a model, the same one for all of its engines."""
    return GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)


def _try_out(matcher: LLMatcher) -> None:
    """Refuse a grammar that is too complex for the first words that it leaves no choice about."""
    if matcher.consume_tokens(matcher.compute_ff_tokens()[:_NUM_TRIED]):
        matcher.compute_bitmask()
    if matcher.is_error():
        raise refusal(_reason(matcher))


class GrammarState:
    """How far one text has come in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._allowed: Bools | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow it."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Bools:
        """Which tokens may come next, ends of text included [vocabulary]. Not to be changed."""
        if self._allowed is None:
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():  # the mask would say that the text may end here
                raise GrammarError(_reason(self._matcher))
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size + 1, bitorder="little")
            allowed: Bools = bits[: self._vocab_size].view(np.bool_)
            allowed[self._eos_ids] = bits[self._vocab_size]  # an end is no text, whatever it spells
            if not allowed.any():
                raise GrammarError("no token of the model can follow")
            self._allowed = allowed
        return self._allowed

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next; none where there is a choice."""
        return [] if self.is_complete else self._matcher.compute_ff_tokens()

    def advance(self, token: int) -> None:
        """Take a committed token of text; an end of text needs no telling."""
        self._allowed = None
        if not self._matcher.consume_token(token):
            raise GrammarError(_reason(self._matcher))


def _reason(matcher: LLMatcher) -> str:
    reason = str(matcher.get_error()).partition("<non-verbose/>")[0].strip()
    return "no text can follow" if reason == "NoExtensionBias" else reason

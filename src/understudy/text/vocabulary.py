"""A draft model's vocabulary against its target's: which ids mean the same, and how the others are carried across.

Models of one family share a tokenizer, and their ids pass as they are. Their output layers may still differ in rows:
a model is often given more rows than it has tokens, and the rest is padding. Models of different families meet through
bytes: a token has a twin where the other vocabulary spells the same bytes, text as text and special as special.

A target token without a twin is spelled in several draft tokens, each token by itself. That is not how the draft would
split the whole text, and a draft model predicts best after the splits that it was trained on: it costs acceptance,
never correctness, since every word is the target's own whatever a draft proposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from understudy.errors import ModelError
from understudy.text.spelling import Vocabulary
from understudy.text.tokenizer import Tokenizer

Ids: TypeAlias = npt.NDArray[np.int32]

MIN_SHARE = 0.01
"""Of the smaller vocabulary: with fewer twins than this, a draft is all but empty."""
PROBE = "The  quick-brown foxes' (12,345.67) DON'T\n\n\tif x != 0: return naïve_日本語 + 'é😀' #end\r\n"
"""Words, numbers, spaces, code and other alphabets: vocabularies that split it alike split nearly everything alike."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VocabularyMap:
    """How ids of a target's text become ids of a draft model and back."""

    is_same: bool
    """Every id that both tokenizers define means the same in both, so that ids pass as they are."""
    num_shared: int
    """Tokens of the target that are one token of the draft."""
    target_share: float
    """The part of the target's tokens that the draft can propose."""
    draft_share: float
    """The part of the draft's tokens that mean something to the target."""
    target_ids: Ids
    """[draft rows] The target's id for each of the draft's, or -1 where the target has no such token."""
    draft_ids: Ids
    """[target rows] The draft's id for each of the target's, or -1 where it takes several: see `to_draft`.

    With `is_same` it is the id itself wherever the draft has a row for it.
    """
    target: Vocabulary
    draft: Vocabulary
    _spelled: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def to_draft(self, token: int) -> tuple[int, ...]:
        """Spell a token of the target in ids of the draft, whatever stands beside it.

        One id where it has a twin, else several. Empty where there is nothing to spell: a special token without a
        twin, an id without a token, or bytes that are in no token of the draft.
        """
        assert 0 <= token < len(self.draft_ids), "ids of a target are below its rows"
        twin = int(self.draft_ids[token])
        if twin >= 0:
            return (twin,)
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = self.draft.spell(self.target.text_bytes(token))
        return known

    def describe(self) -> str:
        """Say what the two share and what the difference costs."""
        return " ".join(_words_of_same(self) if self.is_same else _words_of_cross(self))


def compare_vocabularies(
    target: Tokenizer, draft: Tokenizer, *, target_rows: int, draft_rows: int, cross_tokenizer: bool
) -> VocabularyMap:
    """Compare two vocabularies; a draft with another one is refused unless `cross_tokenizer` allows it.

    The rows are those of the models' output layers, which may have more than the tokenizers have ids.
    """
    assert target.vocab_size <= target_rows, "loading refuses a model with fewer rows than tokens"
    assert draft.vocab_size <= draft_rows, "loading refuses a model with fewer rows than tokens"
    ours, theirs = Vocabulary(target), Vocabulary(draft)
    differing = _differing_ids(ours, theirs)
    if not differing:
        return _same(ours, theirs, target_rows=target_rows, draft_rows=draft_rows)
    if not cross_tokenizer:
        first = differing[0]
        place = "the only id that differs" if len(differing) == 1 else f"the first of {len(differing):,} that differ"
        raise ModelError(
            f"The draft's tokenizer is not the target's: id {first} is {_named(theirs, first)} in the draft and "
            f"{_named(ours, first)} in the target ({place}).",
            "Give a draft of the target's own family, or allow another vocabulary with --cross-tokenizer "
            "(fewer drafts are accepted then; the words stay the target's).",
        )
    return _cross(ours, theirs, target_rows=target_rows, draft_rows=draft_rows)


def _named(vocabulary: Vocabulary, token: int) -> str:
    is_special = token in vocabulary.tokenizer.special_ids and vocabulary.spelling(token) is not None
    return f"the special token {vocabulary.quote(token)}" if is_special else vocabulary.quote(token)


def _differing_ids(target: Vocabulary, draft: Vocabulary) -> list[int]:
    """Find the ids that both define, but not alike; all of the draft's where they have none in common.

    A token that is special in one and a marked token of text in the other is the same: converters do not agree on it.
    Special in one and plain text in the other is not.
    """
    pairs = list(zip(target.spellings, draft.spellings, strict=False))
    differing = {token for token, (ours, theirs) in enumerate(pairs) if ours != theirs and None not in (ours, theirs)}
    one, other = target.tokenizer, draft.tokenizer
    special_in_one = (one.special_ids - other.marked_ids) | (other.special_ids - one.marked_ids)
    differing |= {token for token in special_in_one if token < len(pairs) and None not in pairs[token]}
    if not differing and all(None in pair for pair in pairs):
        return list(range(max(1, len(draft.spellings))))
    return sorted(differing)


def _same(target: Vocabulary, draft: Vocabulary, *, target_rows: int, draft_rows: int) -> VocabularyMap:
    num_rows = min(target_rows, draft_rows)
    in_target, in_draft = _is_defined(target, num_rows), _is_defined(draft, num_rows)
    ids = np.arange(num_rows, dtype=np.int32)
    target_ids, draft_ids = np.full(draft_rows, -1, np.int32), np.full(target_rows, -1, np.int32)
    # Padding that both have passes as it is; an id that only one defines is not proposed.
    target_ids[:num_rows] = np.where(in_target == in_draft, ids, -1)
    draft_ids[:num_rows] = ids
    num_shared = int(np.count_nonzero(in_target & in_draft))
    return VocabularyMap(
        is_same=True,
        num_shared=num_shared,
        target_share=num_shared / target.num_tokens,
        draft_share=num_shared / draft.num_tokens,
        target_ids=target_ids,
        draft_ids=draft_ids,
        target=target,
        draft=draft,
    )


def _is_defined(vocabulary: Vocabulary, num_rows: int) -> npt.NDArray[np.bool_]:
    """[num_rows] Whether each id has a token."""
    defined = np.zeros(num_rows, np.bool_)
    known = [spelling is not None for spelling in vocabulary.spellings[:num_rows]]
    defined[: len(known)] = known
    return defined


def _cross(target: Vocabulary, draft: Vocabulary, *, target_rows: int, draft_rows: int) -> VocabularyMap:
    target_ids, draft_ids = _twins(draft, target, draft_rows), _twins(target, draft, target_rows)
    special = list(target.special_ids.values())
    num_text = int(np.count_nonzero(draft_ids >= 0)) - int(np.count_nonzero(draft_ids[special] >= 0))
    if num_text < max(1.0, MIN_SHARE * min(target.num_tokens, draft.num_tokens)):
        raise ModelError(
            f"The draft's vocabulary shares only {num_text:,} tokens of text with the target's: "
            f"{draft.num_tokens:,} tokens against {target.num_tokens:,}.",
            "Give a draft of the target's own family.",
        )
    for ours, theirs in _roles(target.tokenizer, draft.tokenizer):
        if 0 <= ours < target_rows and 0 <= theirs < draft_rows:
            target_ids[theirs] = ours if target_ids[theirs] < 0 else target_ids[theirs]
            draft_ids[ours] = theirs if draft_ids[ours] < 0 else draft_ids[ours]
    num_shared = int(np.count_nonzero(draft_ids >= 0))
    return VocabularyMap(
        is_same=False,
        num_shared=num_shared,
        target_share=num_shared / target.num_tokens,
        draft_share=int(np.count_nonzero(target_ids >= 0)) / draft.num_tokens,
        target_ids=target_ids,
        draft_ids=draft_ids,
        target=target,
        draft=draft,
    )


def _twins(vocabulary: Vocabulary, other: Vocabulary, num_rows: int) -> Ids:
    """[num_rows] The other's token for each of a vocabulary's: the same bytes, text for text, special for special."""
    special = vocabulary.tokenizer.special_ids
    twins = [
        (other.special_ids if token in special else other.text_ids).get(spelling, -1) if spelling else -1
        for token, spelling in enumerate(vocabulary.spellings)
    ]
    ids = np.full(num_rows, -1, np.int32)
    ids[: len(twins)] = twins
    return ids


def _roles(target: Tokenizer, draft: Tokenizer) -> list[tuple[int, int]]:
    """Pair the tokens that end and begin a text, whatever they are called."""
    pairs = list(zip(target.eos_ids[:1], draft.eos_ids[:1], strict=False))
    begins = (target.bos_id, draft.bos_id)
    # some models begin with the token that ends a text in others: as a begin it would be read as an end
    if begins[0] is not None and begins[1] is not None and begins[0] not in target.eos_ids:
        pairs.append((begins[0], begins[1]))
    return pairs


def _words_of_same(both: VocabularyMap) -> Iterator[str]:
    yield f"The draft's tokenizer is the target's: {both.num_shared:,} tokens are the same in both."
    target, draft = both.target, both.draft
    for whose, one, other, cost in (
        ("target", target, draft, "the draft never proposes these"),
        ("draft", draft, target, "a draft ends where it proposes one"),
    ):
        if one.num_tokens > both.num_shared:
            known = (token for token, spelling in enumerate(one.spellings) if spelling is not None)
            first = next(token for token in known if other.spelling(token) is None)
            num_more = one.num_tokens - both.num_shared
            yield f"Tokens of the {whose} alone: {num_more:,} ({one.quote(first)} first); {cost}."
    target_rows, draft_rows = len(both.draft_ids), len(both.target_ids)
    if target_rows != draft_rows:
        yield f"The target has {target_rows:,} rows and the draft {draft_rows:,}: those without a token are padding."
    if not _split_alike(target.tokenizer, draft.tokenizer):
        yield "They split text differently: the draft reads splits that it was not trained on and is less often right."


def _words_of_cross(both: VocabularyMap) -> Iterator[str]:
    target, draft = both.target, both.draft
    num_missing = target.num_tokens - both.num_shared
    special = [token for token in target.special_ids.values() if both.draft_ids[token] < 0]
    yield (
        f"The draft has another vocabulary: it can propose {both.num_shared:,} of the target's {target.num_tokens:,} "
        f"tokens ({both.target_share:.0%})."
    )
    yield (
        f"{both.draft_share:.0%} of its own {draft.num_tokens:,} tokens are tokens of the target too; "
        "a draft ends at the first that is not."
    )
    yield (
        f"{num_missing - len(special):,} tokens of the target take several draft tokens each, and not as the draft "
        "would split the whole text: it computes more for the same text and is less often right."
    )
    if special:
        yield f"The draft does not see {len(special):,} special tokens of the target, {target.quote(special[0])} first."


def _split_alike(target: Tokenizer, draft: Tokenizer) -> bool:
    return target.encode(PROBE, add_special=False) == draft.encode(PROBE, add_special=False)

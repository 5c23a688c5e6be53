"""Ids of one vocabulary reach another with the same meaning, and a draft that speaks another language is named."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests.tiny_models import SPECIAL_TOKENS, tiny_tokenizer
from understudy.errors import ModelError
from understudy.text.spelling import Vocabulary
from understudy.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from understudy.text.vocabulary import VocabularyMap, compare_vocabularies

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of a token in a GGUF file


def byte_level(
    *,
    changed: Mapping[int, str] | None = None,
    kinds: Mapping[int, int] | None = None,
    more: Sequence[tuple[str, int]] = (),
    **fields: Any,
) -> Tokenizer:
    """The tiny vocabulary of 300 tokens, with some changed and others (a token and its kind) after it."""
    declared = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(declared["vocab"], key=declared["vocab"].__getitem__)
    all_kinds = [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens] + [kind for _, kind in more]
    for token_id, kind in (kinds or {}).items():
        all_kinds[token_id] = kind
    tokens += [token for token, _ in more]
    for token_id, token in (changed or {}).items():
        tokens[token_id] = token
    merges = [(left, right) for left, right in declared["merges"] if {left, right, left + right} <= set(tokens)]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": all_kinds,
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
        },
        eos_ids=(2,),
    )


def trained(text: str, *, special: Sequence[str] = ("<end>", "<begin>"), num_tokens: int = 330) -> Tokenizer:
    """Another byte-level vocabulary, of all bytes and the merges of a text; the first special token ends a text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator([text], trainer)
    return Tokenizer(backend, eos_ids=(0,), bos_id=1)


def sentencepiece(*, byte_tokens: bool = True) -> Tokenizer:
    """A SentencePiece vocabulary: 3 markers, 256 byte tokens, then pieces by falling score."""
    pieces = ["▁the", "▁t", "he", "▁", "t", "h", "e", "c", "a", "▁c", "at", "▁cat", "s", "▁▁", "é", "hea"]
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)] if byte_tokens else []
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_names, *pieces],
            "tokenizer.ggml.token_type": [
                UNKNOWN,
                CONTROL,
                CONTROL,
                *[BYTE] * len(byte_names),
                *[NORMAL] * len(pieces),
            ],
            "tokenizer.ggml.scores": [0.0] * (3 + len(byte_names)) + [-float(place) for place in range(len(pieces))],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
        eos_ids=(2,),
    )


def compare(target: Tokenizer, draft: Tokenizer, *, cross: bool = False, more_rows: int = 0) -> VocabularyMap:
    rows = {"target_rows": target.vocab_size + more_rows, "draft_rows": draft.vocab_size}
    return compare_vocabularies(target, draft, **rows, cross_tokenizer=cross)


def spelled(both: VocabularyMap, token: int) -> bytes:
    return b"".join(both.draft.tokenizer.token_bytes(draft_id) for draft_id in both.to_draft(token))


def test_one_tokenizer() -> None:
    for cross in (False, True):
        both = compare(byte_level(), byte_level(), cross=cross)
        assert both.is_same
        assert (both.num_shared, both.target_share, both.draft_share) == (300, 1.0, 1.0)
        assert both.target_ids.tolist() == both.draft_ids.tolist() == list(range(300))
        assert all(both.to_draft(token) == (token,) for token in range(300))
        assert both.describe() == "The draft's tokenizer is the target's: 300 tokens are the same in both."


def test_rows_of_padding_are_no_difference() -> None:
    both = compare_vocabularies(byte_level(), byte_level(), target_rows=320, draft_rows=304, cross_tokenizer=False)
    assert both.is_same
    assert both.target_ids.tolist() == list(range(304))  # padding of both passes: a model may say anything
    assert both.draft_ids.tolist() == [*range(304), *[-1] * 16]
    assert both.to_draft(303) == (303,)
    assert both.to_draft(304) == ()
    assert (both.target_share, both.draft_share) == (1.0, 1.0)
    assert both.describe().endswith("The target has 320 rows and the draft 304: those without a token are padding.")


@pytest.mark.parametrize(
    "placeholders",
    [[("[PAD300]", UNUSED), ("[PAD301]", UNUSED)], [("[PAD300]", USER_DEFINED), ("[PAD301]", USER_DEFINED)]],
)
def test_placeholders_are_padding(placeholders: list[tuple[str, int]]) -> None:
    padded = byte_level(more=placeholders)
    assert padded.unused_ids == {300, 301}
    assert compare(byte_level(), padded).num_shared == 300
    real = byte_level(more=[("<tool_call>", USER_DEFINED)])
    both = compare(real, padded)
    assert both.is_same
    assert both.target_ids[300] == -1
    assert "Tokens of the target alone: 1 ('<tool_call>' first); the draft never proposes these." in both.describe()


def test_tokens_that_only_one_has_are_harmless() -> None:
    longer = byte_level(more=[("<tool_call>", USER_DEFINED), ("<|extra|>", CONTROL)])
    both = compare(byte_level(), longer)
    assert both.is_same
    assert both.target_ids[299:].tolist() == [299, -1, -1]
    assert both.draft_share == 300 / 302
    assert "Tokens of the draft alone: 2 ('<tool_call>' first); a draft ends where it proposes one." in both.describe()
    back = compare(longer, byte_level())
    assert back.is_same
    assert spelled(back, 300) == b"<tool_call>"  # the draft has no row for it
    assert back.to_draft(301) == ()
    assert len(back.draft_ids) == 302


def test_a_changed_token_is_named() -> None:
    draft = byte_level(changed={270: "Ġnew"})
    with pytest.raises(ModelError) as caught:
        compare(byte_level(), draft)
    old = byte_level().token_bytes(270).decode()
    assert caught.value.message == (
        f"The draft's tokenizer is not the target's: id 270 is ' new' in the draft and {old!r} in the target "
        "(the only id that differs)."
    )
    assert "own family" in caught.value.remedy
    assert "--cross-tokenizer" in caught.value.remedy
    both = compare(byte_level(), draft, cross=True)
    assert not both.is_same
    assert both.num_shared == 299
    assert both.target_ids[270] == -1
    assert spelled(both, 270) == old.encode()
    assert len(both.to_draft(270)) > 1


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ("Ċ" + "č" + "ěď", r"'\n\r\x1b\x0f'"),  # byte-level characters of \n, \r, ESC and \x0f
        ("\u202e", r"'\u202e'"),
        ("âĤ", r"b'\xe2\x82'"),
        ("Ġ" * 100, "'" + " " * 40 + "'..."),
    ],
)
def test_spellings_in_a_message_are_escaped(changed: str, shown: str) -> None:
    with pytest.raises(ModelError) as caught:
        compare(byte_level(changed={270: changed}), byte_level())
    assert f" and {shown} in the target" in caught.value.message
    assert caught.value.message.isprintable()


def test_swapped_special_tokens_are_named() -> None:
    swapped = byte_level(changed={1: "<|im_end|>", 2: "<|im_start|>"})
    named = (
        r"id 1 is the special token '<\|im_end\|>' in the draft and the special token '<\|im_start\|>' in the target "
        r"\(the first of 2 that differ\)"
    )
    with pytest.raises(ModelError, match=named):
        compare(byte_level(), swapped)
    both = compare(byte_level(), swapped, cross=True)
    assert [both.to_draft(token) for token in (0, 1, 2)] == [(0,), (2,), (1,)]


def test_a_special_token_is_not_the_text_that_looks_like_it() -> None:
    plain = byte_level(kinds={1: NORMAL})
    with pytest.raises(ModelError, match=r"id 1 is '<\|im_start\|>' in the draft and the special token"):
        compare(byte_level(), plain)
    both = compare(byte_level(), plain, cross=True)
    assert both.to_draft(1) == ()
    assert both.target_ids[1] == -1
    assert spelled(compare(plain, byte_level(), cross=True), 1) == b"<|im_start|>"


def test_converters_need_not_agree_on_special_among_marked_tokens() -> None:
    assert compare(byte_level(), byte_level(kinds={1: USER_DEFINED})).is_same


def test_the_unknown_token_is_special_as_in_a_published_tokenizer() -> None:
    assert sentencepiece().special_ids == {0, 1, 2}


def test_vocabularies_without_a_common_id_are_refused() -> None:
    empty = Tokenizer(tiny_tokenizer(), unused_ids=frozenset(range(300)))
    with pytest.raises(ModelError, match="id 0 is no token in the draft and the special token"):
        compare(byte_level(), empty)
    with pytest.raises(ModelError, match="shares only 0 tokens of text"):
        compare(byte_level(), empty, cross=True)


def test_another_splitting_is_told_and_not_refused() -> None:
    digits_apart = byte_level(changed={299: "12"}, pre="llama-bpe")
    together = byte_level(changed={299: "12"}, pre="gpt-2")
    both = compare(together, digits_apart)
    assert both.is_same
    assert "They split text differently" in both.describe()
    assert "differently" not in compare(together, byte_level(changed={299: "12"}, add_bos_token=True)).describe()


OTHER = trained("pack my box with five dozen liquor jugs, the cat and the dog; für schöne Übungen 日本語 日本")


@pytest.mark.parametrize(("target", "draft"), [(byte_level(), OTHER), (OTHER, byte_level())])
def test_cross_pairs_spell_the_same(target: Tokenizer, draft: Tokenizer) -> None:
    both = compare(target, draft, cross=True, more_rows=10)
    assert both.target_ids.shape == (draft.vocab_size,)
    assert both.draft_ids.shape == (target.vocab_size + 10,)
    for draft_id, target_id in enumerate(both.target_ids.tolist()):
        if target_id >= 0:
            assert draft.token_bytes(draft_id) == target.token_bytes(target_id)
    for token in range(target.vocab_size):
        assert spelled(both, token) == target.token_bytes(token)
    assert all(both.to_draft(token) == () for token in range(target.vocab_size, target.vocab_size + 10))
    num_text = len(Vocabulary(target).text_ids.keys() & Vocabulary(draft).text_ids.keys())
    assert num_text > 256
    assert both.num_shared == num_text + 1  # and the end
    assert both.target_share == both.num_shared / target.vocab_size
    assert both.draft_share == both.num_shared / draft.vocab_size


def test_ends_and_begins_are_paired_by_role() -> None:
    target = byte_level(bos_token_id=1)
    both = compare(target, OTHER, cross=True)
    assert [both.to_draft(token) for token in (0, 1, 2)] == [(), (1,), (0,)]
    assert both.target_ids[:2].tolist() == [2, 1]
    # a twin by its name goes before the role
    named = trained("a text", special=("<end>", "<|im_end|>"))
    by_name = compare(target, named, cross=True)
    assert by_name.to_draft(2) == (1,)
    assert by_name.target_ids[:2].tolist() == [2, 2]


def test_a_begin_that_is_also_an_end_is_not_paired_as_a_begin() -> None:
    target = Tokenizer(tiny_tokenizer(), eos_ids=(2, 0), bos_id=0)
    assert [compare(target, OTHER, cross=True).to_draft(token) for token in (0, 2)] == [(), (0,)]


def test_ends_beyond_the_rows_are_not_paired() -> None:
    strange = Tokenizer(tiny_tokenizer(), eos_ids=(9999,), bos_id=9999)
    both = compare(strange, OTHER, cross=True)
    assert both.target_ids[:2].tolist() == [-1, -1]
    assert compare(OTHER, strange, cross=True).to_draft(0) == ()


def test_sentencepiece_draft_of_a_byte_level_target() -> None:
    target, draft = byte_level(), sentencepiece()
    both = compare(target, draft, cross=True)
    for token in range(target.vocab_size):
        if token not in target.special_ids:
            assert spelled(both, token) == target.token_bytes(token)
    piece = {name: draft.token_to_id(name) for name in ("▁the", "t", "▁", "<0x74>", "<0x09>")}
    by_bytes = Vocabulary(target).text_ids
    assert both.to_draft(by_bytes[b" the"]) == (piece["▁the"],)
    assert both.to_draft(by_bytes[b" "]) == (piece["▁"],)
    assert both.to_draft(by_bytes[b"t"]) == (piece["t"],)  # the piece, not its byte token
    assert both.to_draft(by_bytes[b"\t"]) == (piece["<0x09>"],)
    assert both.target_ids[piece["t"]] == both.target_ids[piece["<0x74>"]] == by_bytes[b"t"]
    # "nd" is no piece: it is spelled without the space that SentencePiece puts before a text
    assert len(both.to_draft(by_bytes[b"nd"])) == 2


def test_spelling_follows_the_drafts_own_merges() -> None:
    vocabulary = Vocabulary(sentencepiece())
    name = vocabulary.tokenizer.token_to_id
    assert vocabulary.spell(b" the cats") == (name("▁the"), name("▁cat"), name("s"))
    assert vocabulary.spell(b"thecat") == (name("t"), name("he"), name("c"), name("at"))
    # here the longest token at each place would be "hea"
    assert vocabulary.spell(b"heat") == (name("he"), name("at"))
    assert vocabulary.spell(b"theat") == (name("t"), name("he"), name("at"))  # though a text would begin with "▁the"
    assert vocabulary.spell("é".encode()) == (name("é"),)
    assert vocabulary.spell("é".encode()[:1]) == (name("<0xC3>"),)
    assert vocabulary.spell(b"</s>") == (name("<0x3C>"), name("<0x2F>"), name("s"), name("<0x3E>"))
    assert vocabulary.spell(b"") == ()


def test_bytes_that_a_draft_has_no_token_for_are_left_out() -> None:
    both = compare(byte_level(), sentencepiece(byte_tokens=False), cross=True)
    by_bytes = Vocabulary(byte_level()).text_ids
    assert both.to_draft(by_bytes[b"\t"]) == ()
    assert spelled(both, by_bytes[b"the"]) == b"the"
    assert spelled(both, by_bytes[b"nd"]) == b""


def test_what_a_cross_vocabulary_costs_is_said() -> None:
    target = byte_level()
    both = compare(target, OTHER, cross=True)
    words = both.describe()
    num_spelled = sum(len(both.to_draft(token)) > 1 for token in range(300))
    assert f"it can propose {both.num_shared} of the target's 300 tokens ({both.target_share:.0%})" in words
    assert f"{both.draft_share:.0%} of its own {OTHER.vocab_size} tokens are tokens of the target too" in words
    assert "a draft ends at the first that is not" in words
    assert f"{num_spelled} tokens of the target take several draft tokens each" in words
    assert "The draft does not see 2 special tokens of the target, '<|endoftext|>' first." in words


TARGETS = {"byte level": byte_level(), "other": OTHER, "sentencepiece": sentencepiece()}
MAPS = [
    compare(target, draft, cross=True)
    for name, target in TARGETS.items()
    for other, draft in TARGETS.items()
    if name != other
]


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text("the cat s<>|/é\n\t日本"), st.sampled_from(MAPS))
@settings(max_examples=200, deadline=None)
def test_any_text_reaches_the_draft_whole(text: str, both: VocabularyMap) -> None:
    target = both.target.tokenizer
    ids = target.encode(text, add_special=False, parse_special=False)
    reached = b"".join(spelled(both, token) for token in ids)
    assert reached == b"".join(map(target.token_bytes, ids))
    read = reached.removeprefix(b" ") if target.drops_leading_space else reached
    assert read == text.encode()


def test_a_large_vocabulary_is_compared_at_once() -> None:
    """150,000 tokens; the bound is several times what it takes, for machines that do other things too."""
    characters = sorted(BYTE_OF_CHARACTER)
    tokens = [*characters, *(a + b + c for a in characters[:60] for b in characters[:50] for c in characters[:50])]

    def in_order(order: Sequence[str]) -> Tokenizer:
        backend = Backend(models.BPE(vocab={token: place for place, token in enumerate(order)}, merges=[]))
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(backend)

    target, twin, reverse = in_order(tokens), in_order(tokens), in_order(tokens[::-1])
    start_s = time.process_time()
    assert compare(target, twin).is_same
    middle_s = time.process_time()
    both = compare(target, reverse, cross=True)
    end_s = time.process_time()
    assert max(middle_s - start_s, end_s - middle_s) < 2.0
    assert np.array_equal(both.target_ids, np.arange(len(tokens))[::-1])


@pytest.mark.embedded
def test_embedded_vocabulary_with_a_tiny_draft() -> None:
    from understudy.models.embedded import load_embedded

    embedded = load_embedded().tokenizer
    with pytest.raises(ModelError, match="--cross-tokenizer"):
        compare(embedded, byte_level())
    both = compare(embedded, byte_level(), cross=True)
    assert both.to_draft(0) == (0,)  # the three special tokens have the same names in both
    assert both.draft_share > 0.9
    text = "def naïve(日本語):\n    return 'the cat and the dog' + \"😀\"\n"
    assert b"".join(spelled(both, token) for token in embedded.encode(text)) == text.encode()

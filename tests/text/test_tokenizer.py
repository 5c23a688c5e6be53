"""Text survives the way to ids and back, and every vocabulary splits as its publisher's does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.tiny_models import SPECIAL_TOKENS, tiny_tokenizer, write_tiny_model
from understudy.errors import InvalidRequest, ModelError
from understudy.text.gguf_vocabulary import LLAMA3_PATTERN, QWEN2_PATTERN, build_backend
from understudy.text.tokenizer import BYTE_OF_CHARACTER, Tokenizer

VARIED = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nlines\r\n\n\n  end",
    "def add(a: int, b: int) -> int:\n    return a + b  # 1234567890\n",
    "3.14159 and 2024-12-31, 1,000,000",
    "Don't you'll they've I'M",
    "naïve café déjà-vu Ærøskøbing straße",
    "e\u0301 combining, \u00a0 no-break, \u200b zero width",
    "日本語のテキスト、中文文本，한국어",
    "العربية עברית हिन्दी ไทย",
    "😀👩‍👩‍👧‍👦🇨🇭🏳️‍🌈",
    "x" * 300,
    "\u0000\u0001\x7f",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ 𝔘𝔫𝔦",
]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), bos_id=1, eos_ids=(2,))


def spm_fields(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: 3 markers, 256 bytes, then pieces by falling score."""
    pieces = ["▁the", "▁t", "he", "▁", "t", "h", "e", "c", "a", "▁c", "at", "▁cat", "s"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(place) for place in range(len(pieces))] + [0.0]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**fields, **changes}


@pytest.mark.parametrize("text", VARIED)
def test_text_survives(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert b"".join(map(tiny.token_bytes, ids)) == text.encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_survives(text: str) -> None:
    tokenizer = Tokenizer(TINY)
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


TINY = tiny_tokenizer()


@given(st.lists(st.integers(0, 299)))
@settings(max_examples=100, deadline=None)
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    tokenizer = Tokenizer(TINY)
    assert tokenizer.decode(ids) == TINY.decode(ids)


def test_special_tokens_are_markers_or_text_as_asked(tiny: Tokenizer) -> None:
    assert tiny.special_ids == {0, 1, 2}
    text = "<|im_start|>the<|im_end|>"
    parsed = tiny.encode(text)
    assert (parsed[0], parsed[-1]) == (1, 2)
    assert tiny.decode(parsed) == "the"
    assert tiny.decode(parsed, skip_special=False) == text
    literal = tiny.encode(text, parse_special=False)
    assert not tiny.special_ids & set(literal)
    assert tiny.decode(literal) == text
    assert tiny.encode(text) == parsed  # the one switch does not stay on
    assert tiny.token_bytes(2) == b""
    assert tiny.token_bytes(2, skip_special=False) == b"<|im_end|>"
    assert (tiny.bos_token, tiny.eos_token, tiny.token_to_id("<|im_end|>")) == ("<|im_start|>", "<|im_end|>", 2)


@pytest.mark.parametrize("token_id", [-1, 300, 303, 2**31, 2**40])
def test_ids_beyond_the_vocabulary_add_nothing(tiny: Tokenizer, token_id: int) -> None:
    assert tiny.token_bytes(token_id) == b""


def test_ids_that_do_not_exist_are_not_remembered(tiny: Tokenizer) -> None:
    """They come from outside, and there is no end of them."""
    tiny.decode(range(tiny.vocab_size))
    num_known = len(tiny._bytes)
    assert tiny.decode(range(10**6, 10**6 + 500)) == ""
    assert len(tiny._bytes) == num_known


def test_every_byte_has_its_character() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert BYTE_OF_CHARACTER["Ġ"] == 0x20
    assert BYTE_OF_CHARACTER["Ċ"] == 0x0A


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(tiny: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        tiny.encode(text)
    assert caught.value.parameter == "prompt"


def test_a_huge_prompt_is_refused_at_once(tiny: Tokenizer) -> None:
    start_s = time.perf_counter()
    with pytest.raises(InvalidRequest, match=r"10000000 bytes, more than the 2097152") as caught:
        tiny.encode("a" * 10_000_000)
    assert time.perf_counter() - start_s < 1.0
    assert caught.value.parameter == "prompt"
    with pytest.raises(InvalidRequest, match="6 bytes, more than the 5"):
        tiny.encode("ééé", max_bytes=5)
    assert tiny.encode("ab", max_bytes=2)


def settings_of(folder: Path, **changes: Any) -> Tokenizer:
    declared = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**declared, **changes}))
    return Tokenizer.from_folder(folder, eos_ids=(0,))


def test_folder_settings(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    plain = settings_of(folder)
    assert (plain.bos_id, plain.eos_ids, plain.vocab_size) == (1, (0, 2), 300)
    assert plain.chat_template is not None
    assert plain.encode("the")[0] != 1
    forced = settings_of(folder, add_bos_token=True, bos_token={"content": "<|im_start|>"})
    assert forced.encode("the") == [1, *plain.encode("the")]
    assert forced.encode("<|im_start|>the") == [1, *plain.encode("the")]
    assert forced.encode("the", add_special=False) == plain.encode("the")
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert settings_of(folder, chat_template=several).chat_template == "plain"
    (folder / "chat_template.jinja").write_text("own file")
    assert settings_of(folder).chat_template == "own file"
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(folder).eos_ids == ()


def test_settings_of_a_training_run_do_not_cut_prompts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    trained = tiny_tokenizer()
    trained.enable_truncation(4)
    trained.enable_padding(length=8)
    trained.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).decode(Tokenizer.from_folder(folder).encode("x" * 50)) == "x" * 50


def test_other_kinds_of_decoder_are_refused() -> None:
    other = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="None"):
        Tokenizer(other)
    other.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(other)


def test_saved_and_read_back(tmp_path: Path) -> None:
    for number, fields in enumerate((spm_fields(), spm_fields(**{"tokenizer.chat_template": "{{ messages }}"}))):
        tokenizer = Tokenizer.from_gguf(fields, eos_ids=(2,))
        (tmp_path / str(number)).mkdir()
        tokenizer.save(tmp_path / str(number))
        again = Tokenizer.from_folder(tmp_path / str(number))
        assert (again.bos_id, again.eos_ids, again.chat_template) == (1, (2,), tokenizer.chat_template)
        assert again.encode("the cat é") == tokenizer.encode("the cat é")
        assert again.drops_leading_space


@pytest.mark.parametrize("text", [text for text in VARIED if text])
def test_sentencepiece_text_survives(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(spm_fields())
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text


def test_sentencepiece_merges_follow_the_scores() -> None:
    fields = spm_fields()
    tokenizer = Tokenizer.from_gguf(fields, eos_ids=(2,))
    tokens = [fields["tokenizer.ggml.tokens"][token_id] for token_id in tokenizer.encode("the cats é")]
    assert tokens == ["<s>", "▁the", "▁cat", "s", "▁", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("the é")[1:]] == [
        b" the",
        b" ",
        b"\xc3",
        b"\xa9",
    ]
    bare = Tokenizer.from_gguf(spm_fields(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.decode(bare.encode(" the")) == " the"
    assert not bare.drops_leading_space


def test_user_defined_tokens_are_matched_whole_but_are_text() -> None:
    tokenizer = Tokenizer.from_gguf(spm_fields())
    turn = tokenizer.token_to_id("<turn>")
    assert turn not in tokenizer.special_ids
    for parse_special in (True, False):
        assert turn in tokenizer.encode("the<turn>", parse_special=parse_special)
    assert tokenizer.decode(tokenizer.encode("the<turn>")) == "the<turn>"


def byte_level_fields(rule: str, **changes: Any) -> dict[str, Any]:
    declared = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(declared["vocab"], key=declared["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in declared["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


@pytest.mark.parametrize("rule", ["smollm", "qwen2", "llama-bpe", "llama3", "gpt-2", "default"])
def test_byte_level_rules(rule: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(rule))
    begins = rule in ("llama-bpe", "llama3")
    for text in VARIED:
        ids = tokenizer.encode(text)
        assert ids[:1] == [1] if begins else ids[:1] != [1]
        if rule != "qwen2":  # which composes characters (NFC)
            assert tokenizer.decode(ids) == text
    without = Tokenizer.from_gguf(byte_level_fields(rule, **{"tokenizer.ggml.add_bos_token": False}))
    assert without.encode("the")[0] != 1
    with_end = Tokenizer.from_gguf(byte_level_fields(rule, **{"tokenizer.ggml.add_eos_token": True}))
    assert with_end.encode("the")[-1] == 2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "ĠDon", "'t", "ĠĠ", "Ġx", "!!"]),
        ("gpt-2", ["ab", "Ġ1234", "ĠDon", "'t", "ĠĠ", "Ġx", "!!"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "ĠDon", "'t", "ĠĠ", "Ġx", "!!"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "ĠDon", "'t", "ĠĠ", "Ġx", "!!"]),
    ],
)
def test_how_each_rule_splits(rule: str, expected: list[str]) -> None:
    backend = build_backend(byte_level_fields(rule))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab 1234 Don't   x!!")] == expected


def test_patterns_are_those_that_were_published() -> None:
    # the words of Qwen2's and Llama 3's own tokenizer.json
    qwen2 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    assert qwen2 == QWEN2_PATTERN
    assert qwen2.replace(r"|\p{N}|", r"|\p{N}{1,3}|") == LLAMA3_PATTERN


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    from understudy.models.embedded import load_embedded

    return load_embedded().tokenizer


@pytest.mark.embedded
def test_embedded_text_survives(embedded: Tokenizer) -> None:
    for text in VARIED:
        assert embedded.decode(embedded.encode(text)) == text
    assert (embedded.vocab_size, embedded.bos_id, embedded.eos_ids) == (49152, 1, (2,))
    assert embedded.special_ids == frozenset(range(17))
    assert embedded.eos_token == "<|im_end|>"


@pytest.mark.embedded
def test_embedded_ids_are_those_of_transformers(embedded: Tokenizer) -> None:
    from transformers import AutoTokenizer

    from understudy.models.embedded import find_embedded_gguf

    path = find_embedded_gguf()
    theirs: Callable[[str], list[int]] = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).encode
    for text in [*VARIED, "<|im_start|>user\nHi<|im_end|>\n", "year 2024: 12 % of 3,000"]:
        assert embedded.encode(text) == theirs(text)

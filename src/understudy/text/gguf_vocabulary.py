"""The tokenizer inside a GGUF file, rebuilt as the one that the model was published with.

GGUF stores tokens, merges or scores, and the *name* of the splitting rule (`tokenizer.ggml.pre`), not the rule. A
wrong rule gives other ids for the same text and a model that is quietly worse, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from understudy.errors import ModelError

# token_type of a token, as GGUF numbers them
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER_NUMBERS
LLAMA3_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER_NUMBERS


def _byte_level(*, own_rule: bool) -> Any:
    """Bytes as printable characters; with `own_rule`, words are split as in GPT-2 first."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_rule)


def _by_pattern(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(own_rule=False)])


def _smollm() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level(own_rule=True)])


SPLITTING_RULES: Mapping[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "qwen2": lambda: _by_pattern(QWEN2_PATTERN),
    "llama-bpe": lambda: _by_pattern(LLAMA3_PATTERN),
    "llama3": lambda: _by_pattern(LLAMA3_PATTERN),
    "gpt-2": lambda: _byte_level(own_rule=True),
    "default": lambda: _byte_level(own_rule=True),
}


def build_backend(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of a GGUF file from its metadata."""
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("The GGUF file holds no tokenizer (tokenizer.ggml.tokens).", "Use a complete GGUF file.")
    builders = {"gpt2": _byte_level_backend, "llama": _sentencepiece_backend}
    kind = fields.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(f"The GGUF tokenizer {kind!r} is not supported.", "Supported are gpt2 (BPE) and llama (SPM).")
    try:
        backend = builders[kind](tokens, fields)
        _add_marked_tokens(backend, tokens, fields)
        _add_ends(backend, tokens, fields, begins_by_default=kind == "llama" or _rule_name(fields).startswith("llama"))
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception where merges and tokens do not fit together
        raise ModelError(f"The GGUF file's tokenizer is damaged: {error}.", "Download the file again.") from None
    return backend


def find_unused_ids(fields: Mapping[str, Any]) -> frozenset[int]:
    """Find the placeholders with which converters fill up the rows of a model.

    They are marked as unused, or, by older converters, as text that is named for its own id: [PAD151665].
    """
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", ())
    unused = {token_id for token_id, kind in enumerate(kinds) if kind == UNUSED}
    return frozenset(unused | {token_id for token_id, token in enumerate(tokens) if token == f"[PAD{token_id}]"})


def _rule_name(fields: Mapping[str, Any]) -> str:
    return str(fields.get("tokenizer.ggml.pre", "default"))


def _byte_level_backend(tokens: Sequence[str], fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    rule = _rule_name(fields)
    if rule not in SPLITTING_RULES:
        raise ModelError(
            f"The GGUF splitting rule {rule!r} (tokenizer.ggml.pre) is not supported.",
            f"Supported are {', '.join(SPLITTING_RULES)}. Give the model's safetensors folder instead.",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, without asking whether merges lead there
    takes_whole_words = rule in ("llama-bpe", "llama3")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=takes_whole_words))
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITTING_RULES[rule]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(tokens: Sequence[str], fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build Llama 2's kind: the scores rank the merges, unknown characters fall back to their bytes."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, Sequence) or len(scores) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has no score for each token.", "Download the file again.")
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    merges = _merges_from_scores(vocabulary, scores)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    to_marks: Any = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks]) if prefixed else to_marks
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best-scored token first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_marked_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Make control tokens special, and the unknown one, as in a published tokenizer.json.

    User-defined tokens are matched whole too, but are text and are not skipped.
    """
    kinds = fields.get("tokenizer.ggml.token_type", ())
    marked_kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    marked = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in marked_kinds]
    backend.add_tokens([AddedToken(token, normalized=False, special=kind != USER_DEFINED) for token, kind in marked])


def _add_ends(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], fields: Mapping[str, Any], *, begins_by_default: bool
) -> None:
    """Put the begin token before a text, and the end token after it, where the file asks for them."""
    template, specials = ["$A"], []
    for name, wanted, place in (("bos", begins_by_default, 0), ("eos", False, 1)):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        if fields.get(f"tokenizer.ggml.add_{name}_token", wanted) and isinstance(token_id, int):
            token = tokens[token_id]
            template.insert(place * len(template), token)
            specials.append((token, token_id))
    if specials:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)

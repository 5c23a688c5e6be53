"""Masks against every text of small languages, written out; and what tiny models say under them."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLParserLimits

from tests.engine.engines import new_engine, run_alone
from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer, write_tiny_model
from understudy.assembly import Target, load_target
from understudy.core.request import Grammar, Request, SamplingParams
from understudy.errors import InvalidRequest
from understudy.sampling.grammar import GrammarCompiler, GrammarError, GrammarState
from understudy.sampling.noise import NoiseKey
from understudy.sampling.processors import Sampler
from understudy.text.tokenizer import Tokenizer

END = 2
TOKENIZER = Tokenizer(tiny_tokenizer(), eos_ids=(END,))
"""300 tokens: 3 markers, 256 bytes, and merges such as `the`. A model of it has 4 rows of padding."""

LETTERS = {"type": "object", "properties": {"the": {"enum": ["cat", "car", "", "é"]}, "b": {"enum": [1, 10, True]}}}
WORDS = [f"{a}{b}" for a in ("cat", "dog", "the other", "then") for b in ("", " 1", " 12", " 2", " the")]
LANGUAGES: dict[str, tuple[Grammar, list[str]]] = {
    "words": (Grammar("regex", "(cat|dog|the other|then)( (1|12|2|the))?"), WORDS),
    "numbers": (
        Grammar("regex", "[0-2]{1,3}"),
        ["".join(d) for n in (1, 2, 3) for d in itertools.product("012", repeat=n)],
    ),
    "values": (Grammar("json_schema", json.dumps({"enum": [*WORDS, None]})), [json.dumps(v) for v in (*WORDS, None)]),
    "objects": (
        Grammar("json_schema", json.dumps({**LETTERS, "required": ["the", "b"], "additionalProperties": False})),
        [
            json.dumps({"the": the, "b": b}, ensure_ascii=False)
            for the in ("cat", "car", "", "é")
            for b in (1, 10, True)
        ],
    ),
    "rules": (
        Grammar("lark", 'start: a ("," a)?\na: "range(" /[01]/ ")" | "print"'),
        [",".join(parts) for n in (1, 2) for parts in itertools.product(("range(0)", "range(1)", "print"), repeat=n)],
    ),
}
"""Grammars, and all texts that they stand for."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_ids=(END,))


def spelled_by(token: int) -> bytes:
    """The bytes of a token of text; none for markers and for padding."""
    return TOKENIZER.token_bytes(token)


def brute_force(texts: list[bytes], said: bytes) -> set[int]:
    """The tokens after which some text of the language can still be reached, by looking at all of them."""
    rest = [text[len(said) :] for text in texts if text.startswith(said)]
    tokens = {t for t in range(VOCAB_SIZE) if spelled_by(t) and any(text.startswith(spelled_by(t)) for text in rest)}
    return tokens | ({END} if b"" in rest else set())


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_token_is_allowed_if_some_text_goes_on_with_it(name: str, compiler: GrammarCompiler) -> None:
    grammar, written = LANGUAGES[name]
    texts = [text.encode() for text in written]
    rng = random.Random(7)
    num_free = num_forced = 0
    for _ in range(60):
        (state,) = compiler.compile(grammar)
        said = b""
        while not state.is_complete:
            forced = state.forced_tokens()
            allowed = set(np.flatnonzero(state.allowed()).tolist())
            wanted = brute_force(texts, said)
            if forced:  # of several ways to write what must come, the tokenizer's own
                assert allowed == {forced[0]}
                assert forced[0] in wanted
                num_forced += 1
            else:
                assert allowed == wanted
                num_free += 1
            token = rng.choice(sorted(allowed))
            if token == END:
                break
            state.advance(token)
            said += spelled_by(token)
        assert said in texts
        assert state.is_complete is (brute_force(texts, said) == {END}) or END in allowed
    assert num_free
    assert num_forced or name == "numbers"


@pytest.mark.parametrize("name", LANGUAGES)
def test_what_is_forced_is_allowed_to_its_end(name: str, compiler: GrammarCompiler) -> None:
    texts = [text.encode() for text in LANGUAGES[name][1]]
    rng = random.Random(8)
    for _ in range(30):
        (state,) = compiler.compile(LANGUAGES[name][0])
        said: list[int] = []
        while not state.is_complete:
            forced = state.forced_tokens()
            for token in forced or [rng.choice(np.flatnonzero(state.allowed()).tolist())]:
                assert state.allowed()[token]
                if token == END:
                    break
                state.advance(token)
                said.append(token)
            else:
                continue
            break
        assert b"".join(map(spelled_by, said)) in texts


def test_asking_what_is_forced_changes_no_mask(compiler: GrammarCompiler) -> None:
    rng = random.Random(9)
    for grammar, _ in LANGUAGES.values():
        asked, quiet = compiler.compile(grammar)[0], compiler.compile(grammar)[0]
        while not quiet.is_complete:
            for _ in range(rng.choice((0, 1, 2))):
                asked.forced_tokens()
            assert np.array_equal(asked.allowed(), quiet.allowed())
            token = rng.choice(np.flatnonzero(quiet.allowed()).tolist())
            if token == END:
                break
            asked.advance(token)
            quiet.advance(token)


def test_choices_go_their_own_ways(compiler: GrammarCompiler) -> None:
    first, second = compiler.compile(Grammar("regex", "(a|b)c?"), 2)
    (a,) = TOKENIZER.encode("a")
    (c,) = TOKENIZER.encode("c")
    first.advance(a)
    assert first.allowed()[c]
    assert first.allowed()[END]
    assert not second.allowed()[c]
    assert not second.allowed()[END]


def say(state: GrammarState, letters: str) -> None:
    for letter in letters:
        (token,) = TOKENIZER.encode(letter)
        assert state.allowed()[token]
        state.advance(token)


def test_a_choice_that_is_too_complex_ends_no_other(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LLParserLimits(step_lexer_fuel=8_000, max_lexer_states=80, verbose_errors=False)
    monkeypatch.setattr("understudy.sampling.grammar.parser_limits", lambda: limits)
    wordy, brief = compiler.compile(Grammar("regex", "[a-z]{3,90}(ing)?x"), 2)
    with pytest.raises(GrammarError, match="too many states"):
        say(wordy, "saying" * 10)
    say(brief, "sayx")
    assert brief.allowed()[END]


def test_a_model_without_an_end_ends_where_nothing_can_follow() -> None:
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_ids=())
    (state,) = compiler.compile(Grammar("regex", "ab?"))
    for text in "ab":
        (token,) = TOKENIZER.encode(text)
        assert np.flatnonzero(state.allowed()).tolist() == [token]
        state.advance(token)
    assert state.is_complete
    with pytest.raises(InvalidRequest, match="no token"):
        compiler.compile(Grammar("regex", "()"))


def test_an_end_that_is_also_text_is_no_text(compiler: GrammarCompiler) -> None:
    (a,) = TOKENIZER.encode("a")
    (state,) = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_ids=(a, END)).compile(Grammar("regex", "b?[ab]"))
    allowed = state.allowed()
    assert not allowed[a]
    assert not allowed[END]
    state.advance(int(np.flatnonzero(allowed)[0]))
    assert state.allowed()[a], "a text may end here"


def test_markers_are_allowed_where_a_grammar_names_them(compiler: GrammarCompiler) -> None:
    (state,) = compiler.compile(Grammar("lark", 'start: <|im_start|> "a"'))
    assert np.flatnonzero(state.allowed()).tolist() == [1]
    (state,) = compiler.compile(Grammar("regex", r"(.|\n)*"))
    assert not state.allowed()[[0, 1]].any()


# The minimum length, and what else the sampler does before it draws.


def drawn(state: GrammarState, **settings: Any) -> int:
    params = SamplingParams(temperature=0.0, **settings)
    sampler = Sampler(params, NoiseKey(1), prompt_ids=(), end_ids=(END,), vocab_size=VOCAB_SIZE)
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[[0, END, VOCAB_SIZE - 1]] = (9.0, 8.0, 7.0)
    return sampler.sample(logits, position=3, num_generated=0, allowed=state.allowed())


def test_a_minimum_length_gives_way_where_only_an_end_is_left(compiler: GrammarCompiler) -> None:
    (state,) = compiler.compile(Grammar("regex", "a*"))
    assert drawn(state) == END
    assert spelled_by(drawn(state, min_tokens=3)) in (b"a", b"aa")
    (empty,) = compiler.compile(Grammar("regex", "()"))
    assert drawn(empty, min_tokens=3) == END


def test_a_bias_chooses_among_what_is_allowed(compiler: GrammarCompiler) -> None:
    (state,) = compiler.compile(Grammar("regex", "[ab]"))
    (b,) = TOKENIZER.encode("b")
    assert drawn(state, logit_bias={b: 1.0, 0: 1e5}) == b


# What tiny models say.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama", seed=3, tie_word_embeddings=False, eos_token_id=END)
    return load_target(folder, num_threads=1)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": -3, "maximum": 150},
        "price": {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "minItems": 1, "maxItems": 3},
        "when": {"type": "string", "format": "date"},
        "inner": {
            "anyOf": [
                {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
                {"const": 7},
            ]
        },
    },
    "required": ["name", "age", "price", "tags", "when"],
    "additionalProperties": False,
}


def answer(target: Target, grammar: Grammar, *, temperature: float, seed: int, **settings: Any) -> Any:
    engine = new_engine(target)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=400, grammar=grammar, **settings)
    return run_alone(engine, Request(request_id="r", prompt_ids=(5, 6, seed), sampling=params))[0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_json_is_valid_whatever_the_model(target: Target, temperature: float) -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    texts = set()
    for seed in range(12):
        said = answer(target, Grammar("json_schema", json.dumps(SCHEMA)), temperature=temperature, seed=seed)
        assert (said.finish_reason, said.stop_reason) == ("stop", None)
        validator.validate(json.loads(said.text))
        texts.add(said.text)
    assert len(texts) > 6


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_regex_matches_the_whole_text(target: Target, temperature: float, ignore_eos: bool) -> None:
    pattern = r"(the|a) [a-z]{2,5}(, [0-9]{1,3})*[.!]"
    for seed in range(8):
        said = answer(
            target, Grammar("regex", pattern), temperature=temperature, seed=seed, ignore_eos=ignore_eos, min_tokens=9
        )
        assert said.finish_reason == "stop" or len(said.token_ids) == 400
        assert said.finish_reason == "length" or re.fullmatch(pattern, said.text)


def test_an_end_ends_the_text_also_where_ends_are_ignored(target: Target) -> None:
    said = answer(target, Grammar("regex", "a*"), temperature=1.0, seed=3, ignore_eos=True, logit_bias={END: 1e6})
    assert (said.token_ids, said.text, said.finish_reason, said.stop_reason) == ([END], "", "stop", None)


def test_a_stop_string_ends_a_text_before_its_grammar_does(target: Target) -> None:
    said = answer(target, Grammar("regex", "one two three"), temperature=0.0, seed=3, stop=("two",))
    assert (said.text, said.finish_reason, said.stop_reason) == ("one ", "stop", "two")

"""Grammars from strangers: what is wrong is refused with a reason, and nothing takes long or ends the process."""

from __future__ import annotations

import json
import time

import pytest

from tests.tiny_models import VOCAB_SIZE, tiny_tokenizer
from understudy.core.request import Grammar, GrammarKind
from understudy.errors import InvalidRequest
from understudy.sampling.grammar import GrammarCompiler, GrammarError
from understudy.text.grammar_check import MOST_BYTES, check_grammar, library_form
from understudy.text.tokenizer import Tokenizer

LONGEST_S = 1.0
"""Ten times what is aimed at: the machine that runs the tests may be busy."""


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def chained_schema(length: int) -> Grammar:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return schema({"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def chained_rules(length: int, name: str) -> Grammar:
    rules = "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(length))
    return Grammar("lark", f'start: {name}0\n{rules}\n{name}{length}: "a"')


GOOD = {
    "object": schema({"type": "object"}),
    "anything": schema({}),
    "recursive": schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
    "multiple of a cent": schema({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000}),
    "nested by 60": Grammar("json_schema", nested(60)),
    "chain of 200 references": chained_schema(200),
    "catastrophic for those that backtrack": Grammar("regex", "(x+x+)+y"),
    "nested repetitions": Grammar("regex", "(a|a)*b"),
    "large machine": Grammar("regex", "(a|b)*a(a|b){300}"),
    "unicode": Grammar("regex", r"\p{L}+\s\p{N}{1,3}"),
    "rules": Grammar("lark", 'start: "a" start | /[b-z]~&/'),
    "schema in rules": Grammar("lark", 'start: "answer: " %json {"type": "boolean"}'),
    "chain of 200 rules": chained_rules(200, "r"),
    "chain of 200 terminals": chained_rules(200, "T"),
}

BAD = {
    "no JSON": (Grammar("json_schema", "{"), "no JSON"),
    "nested by 10,000": (Grammar("json_schema", nested(10_000)[:60_000]), "no JSON"),
    "closed, nested by 2,000": (Grammar("json_schema", nested(2_000)), "recursion"),
    "brackets": (Grammar("json_schema", "[" * 20_000 + "]" * 20_000), "no JSON"),
    "a list": (schema([]), "must be an object"),
    "true": (schema(True), "must be an object"),
    "empty enum": (schema({"enum": []}), "Unsatisfiable"),
    "impossible": (schema({"type": "object", "required": ["a"], "additionalProperties": False}), "Unsatisfiable"),
    "unsupported keyword": (schema({"type": "object", "not": {}}), 'Unimplemented keys: ["not"]'),
    "unknown type": (schema({"type": "banana"}), "banana"),
    "unknown option": (schema({"x-guidance": {"bogus": 1}}), "bogus"),
    "reference elsewhere": (schema({"$ref": "http://example.com/x"}), "example.com"),
    "chain of references": (chained_schema(900), "400 references"),
    "references in disguise": (Grammar("json_schema", chained_schema(900).text.replace("$ref", "\\u0024ref")), "400"),
    "large multiple": (schema({"type": "integer", "multipleOf": 99_999_989}), "multipleOf"),
    "multiple too large for a float": (schema({"type": "integer", "multipleOf": 10**400}), "multipleOf"),
    "large common multiple": (schema({"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}), "multipleOf"),
    "not a number": (Grammar("json_schema", '{"minimum": NaN}'), "line 1"),
    "too large": (schema({"const": "a" * (64 << 10)}), "65536"),
    "NUL": (Grammar("json_schema", '{"const": "\0"}'), "NUL"),
    "surrogate": (Grammar("regex", "\ud800"), "surrogate"),
    "unclosed": (Grammar("regex", "("), "unclosed group"),
    "look-ahead": (Grammar("regex", "(?=a)b"), "look-around"),
    "back reference": (Grammar("regex", r"(a)\1"), "backreferences"),
    "groups in groups": (Grammar("regex", "(" * 2_000 + ")" * 2_000), "invalid regex"),
    "long regex": (Grammar("regex", "a?" * 3_000), "4096"),
    "no rules": (Grammar("lark", "start ::="), "Expected"),
    "unknown rule": (Grammar("lark", "start: foo"), "unknown name"),
    "circular terminal": (Grammar("lark", 'start: T\nT: T "a" | "b"'), "circular"),
    "parentheses": (Grammar("lark", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000), "deeply nested"),
    "chain of rules": (chained_rules(800, "r"), "400 rules"),
    "chain of terminals": (chained_rules(800, "T"), "400 rules"),
    "intersection": (Grammar("lark", "start: T\nT: /a.*/ & /.*b/"), "operators"),
    "complement": (Grammar("lark", 'start: T\nT: ~/.*(a.{20}).*/ // "\n// "'), "operators"),
    "internal grammar": (Grammar("lark", ' {"grammars": [{"json_schema": {}}]}'), "brace"),
    "large multiple in rules": (
        Grammar("lark", 'start: %json {"type": "integer", "multipleOf": 99999989}'),
        "multipleOf",
    ),
}

ONLY_WHERE_COMPILED = {
    "refers to itself": schema({"$ref": "#"}),
    "refers in a circle": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "endless rule": Grammar("lark", "start: start"),
    "no character": Grammar("regex", r"[^\s\S]"),
    "unknown marker": Grammar("lark", "start: <|nobody|>"),
    "repeated a billion times": Grammar("regex", "a{1000000000}"),
    "repeated repetitions": Grammar("regex", "(((a{100}){100}){100}){100}"),
    "doubling terminals": Grammar(
        "lark", "start: T0\n" + "\n".join(f'T{i}: T{i + 1} "a" T{i + 1}' for i in range(60)) + '\nT60: "a"'
    ),
}
"""What is found when the first word is asked for."""

HEAVY = {
    "options": Grammar("regex", "a?" * 2_000),
    "options of rules": Grammar("lark", "start: T\nT: " + '"a"? ' * 3_000),
    "many properties": schema(
        {"type": "object", "properties": {f"property {i}": {"type": "string"} for i in range(1_000)}}
    ),
    "many patterns": schema(
        {"type": "object", "properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i + 1}}}.*{i}x+$"} for i in range(700)}}
    ),
    "many values": schema({"enum": [f"value {i} {i * i}" for i in range(3_000)]}),
    "patterns that must all hold": schema(
        {"allOf": [{"type": "string", "pattern": f"a.*{c}.*b"} for c in "abcdefghijk"]}
    ),
    "exponential choice": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in (0, 1)]} for i in range(40)]}
    ),
    "names by pattern": schema(
        {"type": "object", "patternProperties": {"^.*a.{20}.*$": {}}, "additionalProperties": {}}
    ),
    "doubling rules": Grammar(
        "lark", "start: t0\n" + "\n".join(f't{i}: t{i + 1} "a" t{i + 1}' for i in range(60)) + '\nt60: "a"'
    ),
    "ambiguous": Grammar("lark", 'start: x\nx: x x x | x x | "a" | /a+/ | ""'),
    "wide characters": Grammar("regex", "[" + "".join(chr(0x100 + 2 * i) for i in range(1_300)) + "]{1,1000}"),
    "long text": Grammar("regex", "a" * 4_000),
    "multiples in a range": schema({"type": "integer", "multipleOf": 9_973, "minimum": 1, "maximum": 10**8}),
}
"""What is compiled, or refused, and must not take long either way."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer(tiny_tokenizer()), vocab_size=VOCAB_SIZE, eos_ids=(2,))


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_served_passes(name: str, compiler: GrammarCompiler) -> None:
    check_grammar(GOOD[name])
    compiler.compile(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused_with_the_reason(name: str, compiler: GrammarCompiler) -> None:
    grammar, reason = BAD[name]
    for check in (check_grammar, compiler.compile):
        with pytest.raises(InvalidRequest) as caught:
            check(grammar)
        assert caught.value.parameter == "response_format"
        assert reason in caught.value.message
        assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", ONLY_WHERE_COMPILED)
def test_what_no_text_satisfies_is_refused_by_the_compiler(name: str, compiler: GrammarCompiler) -> None:
    started = time.perf_counter()
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(ONLY_WHERE_COMPILED[name])
    assert caught.value.parameter == "response_format"
    assert time.perf_counter() - started < LONGEST_S


@pytest.mark.parametrize("name", [*HEAVY, *GOOD])
def test_nothing_takes_long(name: str, compiler: GrammarCompiler) -> None:
    grammar = {**HEAVY, **GOOD}[name]
    started = time.perf_counter()
    try:
        (state,) = compiler.compile(grammar)
    except InvalidRequest:
        assert time.perf_counter() - started < LONGEST_S
        return
    assert time.perf_counter() - started < LONGEST_S
    for _ in range(60):
        started = time.perf_counter()
        try:
            state.advance(int(state.allowed().nonzero()[0][0]))
        except GrammarError:
            return
        finally:
            assert time.perf_counter() - started < LONGEST_S
        if state.is_complete:
            return


@pytest.mark.parametrize("kind", MOST_BYTES)
def test_limits_count_bytes(kind: GrammarKind) -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        library_form(Grammar(kind, "é" * (MOST_BYTES[kind] // 2 + 1)))

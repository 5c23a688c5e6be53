"""Whether a grammar can be served, as far as can be told without a vocabulary: in any process, in milliseconds.

A grammar comes from a stranger and is compiled where everybody's words are drawn. The library (llguidance) refuses
what is wrong or nested too deeply, and stops where its own limits are reached. What it would not survive is
refused here first: chains of references that overflow its stack, and intersections of expressions whose cost nothing
bounds (`&` and `~`, and `multipleOf` a large number). The limits are measured: the usual schema is compiled
in a millisecond, the worst found that passes in 0.1 to 0.2 s, and a step of a text takes tens of milliseconds at worst.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from understudy.core.request import Grammar, GrammarKind
from understudy.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_BYTES: dict[GrammarKind, int] = {"json_schema": 64 << 10, "regex": 4 << 10, "lark": 16 << 10}
"""The time that an expression takes can grow with the square of its length; a schema's grows with its length."""
_MOST_REFERENCES = 400
"""Of `$ref` in a schema, and of rules: a chain of 1,200 and 3,000 of them overflows a stack of 8 MiB."""
_MOST_MULTIPLE = 10_000
"""Numbers that are multiples of this one are recognised by a machine of about as many states."""
_MOST_REASON_CHARACTERS = 300
_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written, on one line as Python writes it, unless the schema's `x-guidance` says otherwise.

A small model that may write any whitespace may write nothing else; and what leaves no choice can be drafted.
"""
_LARK_LITERAL = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')


def parser_limits() -> LLParserLimits:
    """Where the library stops: with these a step of the text takes tens of milliseconds at worst."""
    return LLParserLimits(
        initial_lexer_fuel=100_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
    )


def check_grammar(grammar: Grammar) -> None:
    """Refuse a grammar that no engine could serve; an engine may find more that is wrong with it."""
    problem = LLMatcher.validate_grammar(library_form(grammar), limits=parser_limits())
    if problem:
        raise refusal(problem)


def refusal(reason: str) -> InvalidRequest:
    """What is said of a grammar that cannot be compiled."""
    shown = reason.partition("<non-verbose/>")[0].strip()
    if len(shown) > _MOST_REASON_CHARACTERS:
        shown = shown[: _MOST_REASON_CHARACTERS - 3] + "..."
    return InvalidRequest(
        f"The grammar cannot be used: {shown}", "Correct or simplify it.", parameter="response_format"
    )


def library_form(grammar: Grammar) -> str:
    """The grammar as the library reads it; what must not reach the library is refused."""
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise refusal("it has a character that is none (a lone surrogate)") from None
    if num_bytes > MOST_BYTES[grammar.kind]:
        raise refusal(f"it has {num_bytes} bytes, and at most {MOST_BYTES[grammar.kind]} of this kind are read")
    if "\0" in grammar.text:
        raise refusal("it has a NUL character")
    return _FORMS[grammar.kind](grammar.text)


def _schema_form(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"it is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refusal("a JSON schema must be an object")
    _check_schema(schema)
    try:
        # written anew, so that the library reads just what was checked
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_STYLE)
    except (ValueError, RecursionError) as error:
        raise refusal(str(error)) from None


def _regex_form(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


def _lark_form(text: str) -> str:
    if text.lstrip().startswith("{"):  # the library would read it as one of its own internal grammars
        raise refusal("a Lark grammar does not begin with a brace")
    bare = _LARK_LITERAL.sub('""', text)
    if "&" in bare or "~" in bare:
        raise refusal("the operators & and ~ are not supported; for repetition write {1,3}")
    if bare.count(":") > _MOST_REFERENCES:
        raise refusal(f"it has more than {_MOST_REFERENCES} rules")
    for place in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, place.end())
        except (ValueError, RecursionError) as error:
            raise refusal(f"a schema in it is no JSON: {error}") from None
        _check_schema(schema)
    return LLMatcher.grammar_from_lark(text)


_FORMS: dict[GrammarKind, Callable[[str], str]] = {
    "json_schema": _schema_form,
    "regex": _regex_form,
    "lark": _lark_form,
}


def _check_schema(schema: Any) -> None:
    """Refuse what the library could not bound: long chains of references, and multiples of large numbers."""
    num_references, multiple = 0, 1
    unseen = [schema]
    while unseen:
        value = unseen.pop()
        if isinstance(value, list):
            unseen.extend(value)
        elif isinstance(value, dict):
            unseen.extend(value.values())
            num_references += "$ref" in value
            multiple = math.lcm(multiple, _digits(value.get("multipleOf")))
        if num_references > _MOST_REFERENCES:
            raise refusal(f"it has more than {_MOST_REFERENCES} references")
        if multiple > _MOST_MULTIPLE:
            raise refusal(f"its values of multipleOf have a common multiple of more than {_MOST_MULTIPLE} steps")


def _digits(value: object) -> int:
    """The digits of a number, without its point and its last zeros: how many steps a machine for it has."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 1
    if isinstance(value, float) and not math.isfinite(value):  # a whole number may be too large to ask this of
        return 1
    return abs(int("".join(map(str, Decimal(repr(value)).as_tuple().digits))))

"""What an answer must look like, from the several fields that can say so."""

from __future__ import annotations

import json
from collections.abc import Iterator

from understudy.core.request import Grammar
from understudy.errors import InvalidRequest
from understudy.server.openai.fields import (
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
)
from understudy.text.grammar_check import check_grammar

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def grammar_of(body: GenerationFields, *, bound_by_tools: Grammar | None = None) -> Grammar | None:
    """The one grammar that a request asks for, or None; two are refused, and so is one that cannot be read."""
    wanted = list(_wanted(body))
    if bound_by_tools is not None:
        wanted.append(("tool_choice", bound_by_tools))
    if len(wanted) > 1:
        names = " and ".join(name for name, _ in wanted[:2])
        raise InvalidRequest(f"{names} contradict each other.", "Give one of them.", parameter=wanted[1][0])
    for name, grammar in wanted:
        try:
            check_grammar(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, error.remedy, parameter=name) from None
        return grammar
    return None


def has_grammar(body: GenerationFields) -> bool:
    """Whether a request may bind its answer: reading a grammar can take a while."""
    names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return any(getattr(body, name) is not None for name in (*names, "tool_choice") if hasattr(body, name))


def _wanted(body: GenerationFields) -> Iterator[tuple[str, Grammar]]:
    if body.response_format is not None:
        yield from _named("response_format", _of_format(body.response_format))
    if body.structured_outputs is not None:
        for grammar in _of_structured(body.structured_outputs):
            yield "structured_outputs", grammar
    if body.guided_json is not None:
        yield "guided_json", _of_schema(body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", Grammar("regex", body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _of_choices(body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", Grammar("lark", body.guided_grammar)


def _named(name: str, grammar: Grammar | None) -> Iterator[tuple[str, Grammar]]:
    if grammar is not None:
        yield name, grammar


def _of_format(response_format: ResponseFormat) -> Grammar | None:
    match response_format:
        case JsonObjectFormat():
            return _ANY_OBJECT
        case JsonSchemaFormat():
            schema = response_format.json_schema.schema_
            return _ANY_OBJECT if schema is None else _of_schema(schema)
        case RegexFormat():
            return Grammar("regex", response_format.pattern)
        case _:
            return None


def _of_structured(wanted: StructuredOutputs) -> Iterator[Grammar]:
    if wanted.json_ is not None:
        yield _of_schema(wanted.json_)
    if wanted.regex is not None:
        yield Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        yield _of_choices(wanted.choice)
    if wanted.grammar is not None:
        yield Grammar("lark", wanted.grammar)
    if wanted.json_object:
        yield _ANY_OBJECT


def _of_schema(schema: dict[str, object] | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _of_choices(choices: list[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices) + "\n")

"""Messages to one prompt, by the model's own chat template.

A template is a program that came with a model file, so it runs in jinja2's sandbox: no private attributes of Python
objects, no changes to what it is given, nothing but plain JSON values in its hands. The sandbox bounds neither time
nor memory, so every loop step, every call and every string that is made is charged to a budget. That stops a template
that is broken or crude; one that is made to exhaust memory is still the operator's choice, like the model itself, so
never take a template from a request.

The environment is otherwise the one that Hugging Face gives to templates: they render to the same characters.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from understudy.errors import InvalidRequest

MAX_CHARACTERS = 32 * 2**20
"""The largest string that a template may make; its output is one."""
MAX_STEPS = 2_000_000
MAX_SECONDS = 10.0
MAX_SETTINGS_CHARACTERS = 16 * 2**10
WIDTH_FILTERS = frozenset(("center", "indent", "batch", "slice", "wordwrap", "tojson"))
_GIVEN = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))
REMEDY = "Send messages that the model's chat template accepts, or send a plain prompt."


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation into the prompt that asks for its next message.

    `settings` are further values that the template may look at, such as `enable_thinking`. The result holds the begin
    token wherever the template writes it: encode it with `add_special=False`.
    """
    values = {
        **check_settings(settings or {}),
        "messages": check_messages(messages),
        "tools": None if tools is None else _plain("tools", tools),
    }
    reset = _budget.set(_Budget())
    try:
        pieces = _compile(template).generate(
            values, add_generation_prompt=add_generation_prompt, bos_token=bos_token, eos_token=eos_token
        )
        return "".join(_measured(pieces))
    except InvalidRequest:
        raise
    except RecursionError:
        _refuse("The chat template calls itself without end.")
    except Exception as error:  # a template can raise whatever an expression of Python can
        _refuse(f"The chat template failed: {error}")
    finally:
        _budget.reset(reset)


def uses_tools(template: str) -> bool:
    """Whether a template looks at the tools that it is given."""
    try:
        return "tools" in _variables(template)
    except jinja2.TemplateError:
        return False  # rendering will say what is wrong with it


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse values for a template that are large, or that take the place of what it is given anyway."""
    taken = sorted(_GIVEN.intersection(settings))
    if taken:
        raise InvalidRequest(
            f"{taken[0]} is given to the template already.", "Leave it out.", parameter="chat_template_kwargs"
        )
    checked: dict[str, Any] = _plain("chat_template_kwargs", settings)
    if len(json.dumps(checked)) > MAX_SETTINGS_CHARACTERS:
        raise InvalidRequest(
            f"chat_template_kwargs has more than {MAX_SETTINGS_CHARACTERS} characters.",
            "Give small values.",
            parameter="chat_template_kwargs",
        )
    return checked


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Refuse what is not a conversation; the text parts of a content are joined by line ends."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list with at least one message.", parameter="messages")
    checked: list[dict[str, Any]] = _plain("messages", [_check_message(*entry) for entry in enumerate(messages)])
    return checked


def _check_message(place: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{place}] is not an object with role and content.", parameter="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"messages[{place}] has no role.", "Give system, user or assistant.", parameter="messages")
    if isinstance(content, list | tuple):
        content = "\n".join(_part_text(place, part) for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""  # an assistant that only called tools said nothing
    if not isinstance(content, str):
        raise InvalidRequest(
            f"messages[{place}] has no text content.",
            "Give content as a string, or as a list of parts such as {'type': 'text', 'text': 'Hello'}.",
            parameter="messages",
        )
    return {**message, "content": content}


def _part_text(place: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(
        f"messages[{place}] has a content part of type {kind!r}.",
        "Only parts of type text, with their text, are supported.",
        parameter="messages",
    )


def _plain(parameter: str, value: object) -> Any:
    """Rebuild a value from plain JSON types, so that a template meets no object with methods worth reaching for."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{parameter} cannot be written as JSON: {error}.", parameter=parameter) from None


class _Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = 16 * MAX_CHARACTERS  # a text passes through many hands on its way to the output
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def charge(self, num_characters: int = 0) -> None:
        """Count one step, and the characters that it made."""
        self.steps -= 1
        self.characters -= num_characters
        if num_characters > MAX_CHARACTERS or self.characters < 0:
            _refuse(f"The chat template makes more than {MAX_CHARACTERS} characters.")
        if self.steps < 0 or (self.steps % 64 == 0 and time.monotonic() > self.deadline_s):
            _refuse("The chat template runs too long.")


_budget: ContextVar[_Budget] = ContextVar("budget")


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, REMEDY, parameter="messages") from None


def _charged(value: Any) -> Any:
    """Charge for a value that was just made."""
    _budget.get().charge(len(value) if isinstance(value, str | list | tuple) else 0)
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """Charge for each turn of a loop."""
    for value in values:
        _budget.get().charge()
        yield value


def _measured(pieces: Iterable[str]) -> Iterator[str]:
    """Pass the output on while its length stays within bounds."""
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            _refuse(f"The chat template makes more than {MAX_CHARACTERS} characters.")
        yield piece


def _refuse_large_numbers(values: Iterable[Any]) -> None:
    """Refuse a width or count that would make a huge string before it could be measured."""
    if any(isinstance(value, int) and abs(value) > MAX_CHARACTERS for value in values):
        _refuse(f"The chat template asks for more than {MAX_CHARACTERS} characters.")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it is charged for."""
    takes_width = name in WIDTH_FILTERS

    @functools.wraps(function)  # also copies the marks by which jinja2 knows that it wants the context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if takes_width:
            _refuse_large_numbers((*args[1:], *kwargs.values()))
        return _charged(function(*args, **kwargs))

    return guarded


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with calls and arithmetic charged to the budget."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call."""
        _budget.get().charge()  # before the call: a macro may never come back
        if isinstance(getattr(obj, "__self__", None), str):  # ljust, zfill, ...
            _refuse_large_numbers((*args, *kwargs.values()))
        return _charged(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute what could make something huge of something small."""
        if operator == "**":
            _refuse_large_numbers((left, right if abs(right) <= 64 else MAX_CHARACTERS + 1))
        if operator == "*":
            _refuse_large_numbers([_size(left) * _size(right)])
        return _charged(super().call_binop(context, operator, left, right))


def _size(value: Any) -> int:
    """How long a product with this factor may become."""
    return len(value) if hasattr(value, "__len__") else int(abs(value))


class _Namespace(Namespace):
    """jinja2's namespace without private names, which would reach Python's own protocols."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may use the name self
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the name and type that jinja2 asks for)

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to the end of the block."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Metering(NodeTransformer):
    """Puts a meter around what each loop runs over and around each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 finds it by this name)
        """Count the turns of a loop."""
        self.generic_visit(node)
        node.iter = _through(COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (jinja2 finds it by this name)
        """Measure what is joined."""
        self.generic_visit(node)
        return _through(CHARGED, node)


# names with a space, which no template can write
COUNTED, CHARGED = "counted loop", "charged text"


def _through(name: str, node: nodes.Node) -> nodes.Expr:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: jinja2's own escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    extensions: list[Any] = [_GenerationBlock, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _guarded(name, function) for name, function in environment.filters.items()}
    environment.filters |= {COUNTED: _counted, CHARGED: _charged}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment


@functools.lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """The names that a template reads and does not set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(template)))


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compile a template once; called within a budget, since jinja2 computes constants while it compiles."""
    environment = _environment()
    try:
        tree = _Metering().visit(environment.parse(template))
        return environment.from_string(tree.set_environment(environment))
    except jinja2.TemplateSyntaxError as error:
        _refuse(f"The chat template cannot be read: line {error.lineno}: {error.message}")

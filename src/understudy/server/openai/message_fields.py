"""The fields of a conversation: messages, their parts, and the tools that may be called in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _only(wanted: bool) -> Any:
    """true or false, of which only one can be honoured. A Literal would take 0 for false."""

    def check(value: bool) -> bool:
        if value is not wanted:
            raise PydanticCustomError("only", "only {wanted} is supported", {"wanted": str(wanted).lower()})
        return value

    return Annotated[bool, AfterValidator(check), WithJsonSchema({"type": "boolean", "const": wanted})]


if TYPE_CHECKING:
    OnlyTrue: TypeAlias = bool
    OnlyFalse: TypeAlias = bool
else:
    OnlyTrue, OnlyFalse = _only(True), _only(False)


class Fields(BaseModel):
    """A JSON object. A text is no number, and 1 is not true; NaN and Infinity are no numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


def _refuse_other_parts(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("part", "parts of type {kind} are not supported, only text is", {"kind": kind[:32]})
    return part


class TextPart(Fields):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content: TypeAlias = (
    str | Annotated[list[Annotated[TextPart, BeforeValidator(_refuse_other_parts)]], Field(fail_fast=True)]
)


class CalledFunction(Fields):
    """A function with its arguments, a text of JSON."""

    name: str
    arguments: str


class ToolCallField(Fields):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class PlainMessage(Fields):
    """What somebody other than the assistant said."""

    role: Literal["developer", "system", "user", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None


class AssistantMessage(Fields):
    """What the assistant said earlier."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallField], Field(max_length=128)] | None = None


Message: TypeAlias = Annotated[PlainMessage | AssistantMessage, Field(discriminator="role")]
Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class FunctionField(Fields):
    """A function that the model may call; its parameters are a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionField


class ChosenFunction(Fields):
    """The name of a function."""

    name: ToolName


class ChosenTool(Fields):
    """The tool that must be used."""

    type: Literal["function"]
    function: ChosenFunction


class ConversationFields(Fields):
    """Messages, and how they become a prompt."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: OnlyFalse | None = None

"""The fields of a request, with the bounds that hold for each by itself.

What is written here is what /openapi.json says. Fields that nobody knows are let through: see `reading.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from understudy.server.openai.message_fields import (
    ChosenTool,
    Content,
    ConversationFields,
    Fields,
    OnlyTrue,
)

TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
WrittenId: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Fields):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Pad every event to one of few sizes; null does so unless the peer is this machine."""
    continuous_usage_stats: bool | None = None
    """With include_usage: every event tells what was used so far. vLLM's field."""


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Fields):
    """A schema and its name."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchemaFormat(Fields):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Fields):
    """Text that a regular expression describes."""

    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1)]


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat, Field(discriminator="type")
]


class StructuredOutputs(Fields):
    """vLLM's form of the same: exactly one of these."""

    model_config = ConfigDict(extra="forbid")
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Stop], Field(min_length=1, max_length=256)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: bool | None = None


class Prediction(Fields):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: Content


class SpeculationFields(Fields):
    """What speculation may do for this request. It changes the speed, never the words."""

    model_config = ConfigDict(extra="forbid")
    enabled: bool | None = None
    max_depth: Annotated[int, Field(ge=0, le=64)] | None = None
    max_rows: Annotated[int, Field(ge=0, le=256)] | None = None
    drafter: str | None = None


class GenerationFields(Fields):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[WrittenId, Bias], Field(max_length=1024)] | None = None
    """Token ids, as texts, with what is added to their logits."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    """`workload_class` names the class of traffic; the rest has no effect."""
    store: bool | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    speculation: SpeculationFields | None = None
    include_metrics: bool | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: OnlyTrue | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: Annotated[list[Stop], Field(min_length=1, max_length=256)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    truncate_prompt_tokens: Literal[-1] | Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None


class ChatBody(ConversationFields, GenerationFields):
    """POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None


class CompletionBody(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=128, fail_fast=True)],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """0 only with echo: the prompt alone is answered then."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None


class TokenizePromptBody(Fields):
    """POST /tokenize, for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeMessagesBody(ConversationFields):
    """POST /tokenize, for a conversation."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

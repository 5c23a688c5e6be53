"""The shape of every answer, as /openapi.json tells it. The answers themselves are written elsewhere, faster."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

Count: TypeAlias = Annotated[int, Field(ge=0)]


class ErrorFields(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error."""

    error: ErrorFields


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: Count


class CompletionDetails(BaseModel):
    """Of the answer's tokens."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count
    reasoning_tokens: Count


class RunningUsage(BaseModel):
    """What an answer has cost so far."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count


class Usage(RunningUsage):
    """What an answer cost."""

    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Head(BaseModel):
    """What every answer and every chunk carries. Seed and fingerprint together name the words."""

    id: str
    created: Count
    model: str
    system_fingerprint: str
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)]
    metrics: dict[str, Any] | None = None


class Answer(Head):
    """A whole answer."""

    usage: Usage


class Chunk(Head):
    """A piece of an answer. Usage is null, but for the last chunk, which has no choices; absent if not asked for."""

    usage: Usage | RunningUsage | None = None
    obfuscation: str | None = None


class TopLogprob(BaseModel):
    """A token that could have been said."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that was said."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a message."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunctionAnswer(BaseModel):
    """A function with its arguments, a text of JSON."""

    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: Annotated[list[ToolCallAnswer], Field(min_length=1)] | None = None


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    prompt_token_ids: list[int] | None = None


class ToolCallDelta(ToolCallAnswer):
    """A call, whole, and its place among the calls."""

    index: Count


class Delta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Chunk):
    """A piece of the answers to a conversation."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    """Log probabilities of a text; null for a prompt's first token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    """One text."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletion(Answer):
    """Texts that continue the prompts, in their order."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=1)]


class TextChunkChoice(BaseModel):
    """What a chunk adds to one text."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletionChunk(Chunk):
    """A piece of the texts that continue the prompts."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChunkChoice], Field(max_length=1)]


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Annotated[int, Field(ge=1)]


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    """A text as token ids."""

    count: Count
    max_model_len: Annotated[int, Field(ge=1)]
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Token ids as a text."""

    prompt: str

"""A request that was read: what the engine is asked, and how its words are to be shown."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request as HttpRequest

from understudy.core.backend import ModelInfo
from understudy.core.request import Grammar, Request, SamplingParams, Speculation
from understudy.errors import InvalidRequest
from understudy.server.errors import ContextExceeded
from understudy.server.exchange import Caller
from understudy.server.identity import caller_of, request_id_of
from understudy.server.openai.fields import ChatBody, CompletionBody, GenerationFields
from understudy.server.openai.message_fields import Content
from understudy.server.openai.reading import header_names
from understudy.server.openai.tools import ToolUse
from understudy.server.service import Service

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine reads it, and as a person does."""

    token_ids: tuple[int, ...]
    text: str = ""
    """What `echo` repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that the answer depends on besides the engine's words."""

    answer_id: str
    request_id: str
    created: int
    endpoint: Endpoint
    model: str
    fingerprint: str
    seed: int
    caller: Caller
    requests: tuple[Request, ...]
    """One for each prompt."""
    texts: tuple[str, ...] = ()
    """The prompts, if they are to be repeated before the answers."""
    is_stream: bool = False
    has_usage: bool = False
    """In a stream: usage is sent at its end."""
    has_running_usage: bool = False
    """In a stream with usage: every event tells what was used so far."""
    is_padded: bool = False
    """In a stream: the sizes of events are few."""
    has_metrics: bool = False
    has_token_ids: bool = False
    num_logprobs: int | None = None
    """Alternatives to show beside each token."""
    keeps_stop: bool = False
    """A stop string that ended the text is shown."""
    is_echo_only: bool = False
    """The engine was asked for one token, which nobody wants."""
    tools: ToolUse | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.requests[0].sampling.n


def context_of(info: ModelInfo) -> int:
    """How many tokens of prompt and answer fit."""
    return min(info.max_context, info.max_tokens or info.max_context)


def text_of(content: Content | None) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def make_order(
    service: Service,
    http: HttpRequest,
    body: ChatBody | CompletionBody,
    *,
    prompts: list[Prompt],
    workload_class: str,
    ignored: tuple[str, ...],
    grammar: Grammar | None,
    tools: ToolUse | None = None,
) -> Order:
    """Make the engine's requests of a body's fields, one for each prompt."""
    endpoint: Endpoint = "chat" if isinstance(body, ChatBody) else "completions"
    answer_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
    caller, info = caller_of(http), service.backend.info
    seed = secrets.randbits(63) if body.seed is None else body.seed & (2**64 - 1)
    is_echo = isinstance(body, CompletionBody) and body.echo is True
    _check_ids(body, info)
    requests = _requests(service, body, prompts, answer_id, seed=seed, caller=caller, workload_class=workload_class,
                         grammar=grammar)  # fmt: skip
    options = body.stream_options
    wants_padding = None if options is None else options.include_obfuscation
    has_usage = options is not None and options.include_usage is True
    return Order(
        answer_id=answer_id,
        request_id=request_id_of(http),
        created=int(time.time()),
        endpoint=endpoint,
        model=service.model_name,
        fingerprint=info.system_fingerprint,
        seed=seed,
        caller=caller,
        requests=requests,
        texts=tuple(prompt.text for prompt in prompts) if is_echo else (),
        is_stream=body.stream is True,
        has_usage=has_usage,
        has_running_usage=has_usage and options is not None and options.continuous_usage_stats is True,
        is_padded=not caller.is_local if wants_padding is None else wants_padding,
        has_metrics=body.include_metrics is True or http.headers.get("x-include-metrics") == "1",
        has_token_ids=body.return_token_ids is True,
        num_logprobs=_num_logprobs(body),
        keeps_stop=body.include_stop_str_in_output is True,
        is_echo_only=_wanted_tokens(body) == 0,
        tools=tools,
        headers={"x-seed": str(seed), **({"x-ignored-fields": header_names(ignored)} if ignored else {})},
    )


def _requests(
    service: Service,
    body: ChatBody | CompletionBody,
    prompts: list[Prompt],
    answer_id: str,
    *,
    seed: int,
    caller: Caller,
    workload_class: str,
    grammar: Grammar | None,
) -> tuple[Request, ...]:
    """What the engine is asked, one request for each prompt."""
    info, wanted_tokens = service.backend.info, _wanted_tokens(body)
    prediction_ids, wanted = _prediction_ids(service, body), _speculation(body, info)
    requests = []
    for number, prompt in enumerate(prompts):
        request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{number}"
        token_ids = _fitting(body, prompt.token_ids, info, wanted_tokens)
        requests.append(
            Request(
                request_id=request_id,
                prompt_ids=token_ids,
                sampling=_sampling(body, seed, _max_tokens(info, len(token_ids), wanted_tokens, body), grammar),
                speculation=service.experiments.overlay(
                    wanted, request_id=request_id, caller=caller, workload_class=workload_class
                ),
                tenant=_tenant(caller, body.cache_salt),
                workload_class=workload_class,
                prediction_ids=prediction_ids,
                priority=body.priority or 0,
            )
        )
    return tuple(requests)


def _wanted_tokens(body: ChatBody | CompletionBody) -> int | None:
    """How many tokens were asked for; None leaves it to us."""
    if isinstance(body, CompletionBody):
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("max_tokens is 0.", "Give at least 1, or echo.", parameter="max_tokens")
        return body.max_tokens
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ.", "Give one of them.", parameter="max_completion_tokens"
        )
    return both.pop() if both else None


def _check_ids(body: GenerationFields, info: ModelInfo) -> None:
    named = {"logit_bias": map(int, body.logit_bias or ()), "stop_token_ids": body.stop_token_ids or ()}
    for name, token_ids in named.items():
        for token in token_ids:
            if token >= info.vocab_size:
                raise InvalidRequest(
                    f"{name} names token {token}.", f"Ids go from 0 to {info.vocab_size - 1}.", parameter=name
                )


def _fitting(
    body: GenerationFields, token_ids: tuple[int, ...], info: ModelInfo, wanted_tokens: int | None
) -> tuple[int, ...]:
    """Cut a prompt from the left if its sender says so, and refuse one that leaves no room."""
    limit, parameter = context_of(info), "messages" if isinstance(body, ChatBody) else "prompt"
    if not token_ids:
        raise InvalidRequest("The prompt is empty.", "Give at least one token.", parameter=parameter)
    if max(token_ids) >= info.vocab_size:
        raise InvalidRequest(f"There is no token {max(token_ids)}.", parameter=parameter)
    if body.truncate_prompt_tokens is not None:
        keep = body.truncate_prompt_tokens
        token_ids = token_ids[-(max(1, limit - (wanted_tokens or 1)) if keep == -1 else keep) :]
    room = limit - len(token_ids)
    if room < 1 or room < (wanted_tokens or 1):
        asked = f" and {wanted_tokens} of the answer" if wanted_tokens else ""
        raise ContextExceeded(
            f"The model's context has {limit} tokens, but {len(token_ids)} of the prompt{asked} were asked for.",
            "Shorten the prompt or ask for a shorter answer.",
            parameter=parameter,
        )
    return token_ids


def _max_tokens(info: ModelInfo, num_prompt: int, wanted: int | None, body: GenerationFields) -> int:
    room = context_of(info) - num_prompt
    if wanted is None:
        return room if isinstance(body, ChatBody) else min(16, room)
    return max(1, wanted)


def _num_logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs.", "Set logprobs to true.", parameter="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(body: ChatBody | CompletionBody, seed: int, max_tokens: int, grammar: Grammar | None) -> SamplingParams:
    num_logprobs = _num_logprobs(body)
    is_echo = isinstance(body, CompletionBody) and body.echo is True
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        seed=seed,
        n=body.n or 1,
        logprobs=num_logprobs,
        prompt_logprobs=num_logprobs if is_echo else None,
        grammar=grammar,
    )


def _speculation(body: GenerationFields, info: ModelInfo) -> Speculation:
    given = body.speculation.model_dump(exclude_none=True) if body.speculation is not None else {}
    drafter = given.get("drafter")
    if drafter is not None and drafter not in info.drafters:
        known = ", ".join(info.drafters) or "none"
        raise InvalidRequest(
            f"There is no drafter {drafter[:64]!r} here.", f"Those that run: {known}.", parameter="speculation"
        )
    return Speculation(**given)


def _prediction_ids(service: Service, body: GenerationFields) -> tuple[int, ...]:
    """What is expected, no further than any answer can reach: the engine reads it once for every choice."""
    if body.prediction is None:
        return ()
    token_ids = service.tokenizer.encode(text_of(body.prediction.content), add_special=False)
    return tuple(token_ids[: context_of(service.backend.info)])


def _tenant(caller: Caller, salt: str | None) -> str:
    """Who shares caches with this request: the same caller with the same salt."""
    if salt is None:
        return caller.tenant
    return hashlib.sha256(f"{len(caller.tenant)}:{caller.tenant}{salt}".encode()).hexdigest()

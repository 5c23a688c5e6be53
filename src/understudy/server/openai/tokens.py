"""POST /tokenize and /detokenize: the model's vocabulary, for those who count or cut before they ask."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from understudy.errors import InvalidRequest
from understudy.server.openai.conversation import conversation_ids
from understudy.server.openai.fields import DetokenizeBody, TokenizeMessagesBody, TokenizePromptBody
from understudy.server.openai.logprobs import token_text
from understudy.server.openai.order import context_of
from understudy.server.openai.reading import by_size, check_model, read
from understudy.server.openai.schemas import Detokenized, Tokenized
from understudy.server.openai.tools import shown_tools
from understudy.server.openapi import answers_of, request_body
from understudy.server.service import Service
from understudy.text.tokenizer import Tokenizer

TokenizeBody: TypeAlias = TokenizePromptBody | TokenizeMessagesBody
_tokenize_body: TypeAdapter[TokenizeBody] = TypeAdapter(TokenizeBody)


def routes(service: Service) -> APIRouter:
    """The routes, for a service."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/tokenize",
        summary="Turn a text or a conversation into token ids",
        operation_id="tokenize",
        responses=answers_of(Tokenized),
        openapi_extra=request_body(TokenizePromptBody, TokenizeMessagesBody),
        response_class=Response,
    )
    async def tokenize(request: Request) -> Response:
        body = await read(request, _tokenize_body.validate_python)
        check_model(service, body.model)
        return await by_size(len(await request.body()), lambda: _tokenized(service, body))

    @router.post(
        "/detokenize",
        summary="Turn token ids into text",
        operation_id="detokenize",
        responses=answers_of(Detokenized),
        openapi_extra=request_body(DetokenizeBody),
        response_class=Response,
    )
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeBody.model_validate)
        check_model(service, body.model)
        num_known = service.backend.info.vocab_size
        if any(token >= num_known for token in body.tokens):
            raise InvalidRequest("There is no such token.", f"Ids go from 0 to {num_known - 1}.", parameter="tokens")
        text = await by_size(len(await request.body()), lambda: service.tokenizer.decode(body.tokens))
        return _json({"prompt": text})

    return router


def _tokenized(service: Service, body: TokenizeBody) -> Response:
    token_ids = _token_ids(service.tokenizer, body)
    fields: dict[str, object] = {
        "count": len(token_ids),
        "max_model_len": context_of(service.backend.info),
        "tokens": token_ids,
        "token_strs": [token_text(service.tokenizer, token) for token in token_ids] if body.return_token_strs else None,
    }
    return _json(fields)


def _token_ids(tokenizer: Tokenizer, body: TokenizeBody) -> tuple[int, ...]:
    if isinstance(body, TokenizePromptBody):
        return tuple(tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False))
    tools = shown_tools(tokenizer, body.tools) if body.tools else None
    return conversation_ids(tokenizer, body, tools=tools, add_special=body.add_special_tokens is True)


def _json(fields: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(fields), media_type="application/json")

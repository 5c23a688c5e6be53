"""POST /v1/completions."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from understudy.control.classes import class_of
from understudy.errors import InvalidRequest
from understudy.server.openai.answers import respond
from understudy.server.openai.completion_answer import CompletionAnswer
from understudy.server.openai.fields import CompletionBody
from understudy.server.openai.grammars import grammar_of, has_grammar
from understudy.server.openai.order import Order, Prompt, make_order
from understudy.server.openai.reading import by_size, check_fields, check_model, read
from understudy.server.openai.schemas import TextCompletion, TextCompletionChunk
from understudy.server.openapi import answers_of, request_body
from understudy.server.service import Service
from understudy.text.tokenizer import Tokenizer

_SAMPLE_CHARACTERS = 8192


def routes(service: Service) -> APIRouter:
    """The route, for a service."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/completions",
        summary="Continue texts",
        operation_id="create_completion",
        responses=answers_of(TextCompletion, chunk=TextCompletionChunk),
        openapi_extra=request_body(CompletionBody),
        response_class=Response,
    )
    async def create(request: Request) -> Response:
        body = await read(request, CompletionBody.model_validate)
        check_model(service, body.model)
        num_bytes = len(await request.body())
        order = await by_size(num_bytes, lambda: read_order(service, request, body), is_slow=has_grammar(body))
        return await respond(service, order, CompletionAnswer(order, service.tokenizer), request)

    return router


def read_order(service: Service, request: Request, body: CompletionBody) -> Order:
    """Make an order of a body, or refuse it."""
    ignored = check_fields(service, body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of differs from n.", "Every choice is returned: leave it out.", parameter="best_of")
    prompts = _prompts(service.tokenizer, body)
    metadata = body.metadata or {}
    return make_order(
        service,
        request,
        body,
        prompts=prompts,
        workload_class=class_of(
            request.headers.get("x-workload-class"),
            metadata.get("workload_class"),
            text=prompts[0].text[:_SAMPLE_CHARACTERS],
        ),
        ignored=ignored,
        grammar=grammar_of(body),
    )


def _prompts(tokenizer: Tokenizer, body: CompletionBody) -> list[Prompt]:
    """The prompts, whichever of four ways they were written in."""
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    written = cast(list[str | list[int]], [given] if is_one else given)
    add_special = body.add_special_tokens is not False
    return [
        Prompt(tuple(tokenizer.encode(prompt, add_special=add_special)), prompt)
        if isinstance(prompt, str)
        else Prompt(tuple(prompt), tokenizer.decode(prompt))
        for prompt in written
    ]

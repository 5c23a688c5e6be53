"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from understudy.control.classes import class_of
from understudy.errors import InvalidRequest
from understudy.server.openai.answers import respond
from understudy.server.openai.chat_answer import ChatAnswer
from understudy.server.openai.conversation import conversation_ids, last_question
from understudy.server.openai.fields import ChatBody
from understudy.server.openai.grammars import grammar_of, has_grammar
from understudy.server.openai.order import Order, Prompt, make_order
from understudy.server.openai.reading import by_size, check_fields, check_model, read
from understudy.server.openai.schemas import ChatCompletion, ChatCompletionChunk
from understudy.server.openai.tools import tool_use
from understudy.server.openapi import answers_of, request_body
from understudy.server.service import Service


def routes(service: Service) -> APIRouter:
    """The route, for a service."""
    router = APIRouter(tags=["openai"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        operation_id="create_chat_completion",
        responses=answers_of(ChatCompletion, chunk=ChatCompletionChunk),
        openapi_extra=request_body(ChatBody),
        response_class=Response,
    )
    async def create(request: Request) -> Response:
        body = await read(request, ChatBody.model_validate)
        check_model(service, body.model)
        num_bytes = len(await request.body())
        order = await by_size(num_bytes, lambda: read_order(service, request, body), is_slow=has_grammar(body))
        return await respond(service, order, ChatAnswer(order, service.tokenizer), request)

    return router


def read_order(service: Service, request: Request, body: ChatBody) -> Order:
    """Make an order of a body, or refuse it."""
    ignored = check_fields(service, body)
    if body.add_special_tokens:
        remedy = "The template writes the begin token. Leave it out."
        raise InvalidRequest("add_special_tokens cannot be true.", remedy, parameter="add_special_tokens")
    tools = tool_use(body, service.tokenizer)
    metadata = body.metadata or {}
    return make_order(
        service,
        request,
        body,
        prompts=[Prompt(conversation_ids(service.tokenizer, body, tools=tools.shown if tools else None))],
        workload_class=class_of(
            request.headers.get("x-workload-class"), metadata.get("workload_class"), text=last_question(body)
        ),
        ignored=ignored,
        grammar=grammar_of(body, bound_by_tools=tools.grammar if tools else None),
        tools=tools,
    )

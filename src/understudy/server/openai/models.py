"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from understudy.server.openai.order import context_of
from understudy.server.openai.reading import check_model
from understudy.server.openai.schemas import Model, ModelList
from understudy.server.openapi import answers_of
from understudy.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes, for a service."""
    router = APIRouter(tags=["openai"])
    created = int(time.time())

    def model() -> dict[str, object]:
        name = service.model_name
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "understudy",
            "root": service.backend.info.name,
            "parent": None,
            "max_model_len": context_of(service.backend.info),
        }

    @router.get("/v1/models", operation_id="list_models", responses=answers_of(ModelList), response_class=Response)
    async def list_models() -> Response:
        """What is served here."""
        return _json({"object": "list", "data": [model()]})

    @router.get(
        "/v1/models/{model_id:path}",
        operation_id="get_model",
        responses=answers_of(Model),
        response_class=Response,
    )
    async def get_model(model_id: str) -> Response:
        """One model."""
        check_model(service, model_id)
        return _json(model())

    return router


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

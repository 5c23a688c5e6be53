"""A server without a model: the application around a FakeBackend, in memory or behind a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from tests.server.fake_backend import FakeBackend
from tests.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, tiny_tokenizer
from understudy.core.backend import ModelInfo
from understudy.core.request import Facts, Output, Request, SpeculationCounts
from understudy.server.app import make_routes
from understudy.server.config import ServerConfig
from understudy.server.service import Service

MODEL = "tiny"
USER = [{"role": "user", "content": "Hi"}]
TOOLS_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if loud %}LOUD{% endif %}"
)
"""In the manner of Qwen2.5's."""


def tokenizer_folder(folder: Path, template: str | None = CHAT_TEMPLATE) -> str:
    """Write what a tokenizer is read from."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def model_info(folder: str, **values: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "name": MODEL,
        "system_fingerprint": "fp-test",
        "max_context": 512,
        "vocab_size": VOCAB_SIZE,
        "eos_ids": (2,),
        "tokenizer_folder": folder,
        "drafters": ("suffix", "ngram"),
    }
    return ModelInfo(**fields | values)


@dataclass
class SayingBackend(FakeBackend):
    """Says given texts, a piece at a time, whatever is asked."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "stop"
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        for number, piece in enumerate(self.pieces):
            is_last = number == len(self.pieces) - 1
            reason: Any = self.finish_reason if is_last else None
            seed = request.sampling.seed
            assert seed is not None
            for choice in range(request.sampling.n):
                facts = Facts("other", len(self.pieces), seed, 3, 0, self.counts) if is_last else None
                error = "it broke" if reason == "error" else None
                yield Output(request.request_id, choice, (5,), piece, (), reason, None, error, facts=facts)
            await asyncio.sleep(self.step_s)


@dataclass
class Served:
    """An application with what is behind it."""

    backend: Any
    service: Service

    def __post_init__(self) -> None:
        self.app = make_routes(self.service)
        self.client = TestClient(self.app)

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def chat(self, **body: Any) -> Any:
        return self.post("/v1/chat/completions", **({"messages": USER, "max_tokens": 8} | body))

    def complete(self, **body: Any) -> Any:
        return self.post("/v1/completions", **({"prompt": "Hello"} | body))

    @property
    def asked(self) -> Request:
        """What the backend was asked last."""
        request: Request = self.backend.requests[-1]
        return request


def serve_fake(
    folder: Path,
    *,
    template: str | None = CHAT_TEMPLATE,
    backend: Callable[..., FakeBackend] = FakeBackend,
    config: ServerConfig | None = None,
    info: dict[str, Any] | None = None,
    **values: Any,
) -> Served:
    """An application around a fake; `values` are the fake's."""
    fake = backend(model_info(tokenizer_folder(folder, template), **(info or {})), **values)
    return Served(fake, Service(fake, config or ServerConfig()))


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an application over HTTP from a thread; yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]

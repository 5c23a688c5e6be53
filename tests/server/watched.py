"""A service without a model, and the metrics that watch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_backend import FakeBackend
from understudy.core.backend import EngineLoad, ModelInfo
from understudy.core.request import Output, Request, SamplingParams
from understudy.server.config import ServerConfig
from understudy.server.exchange import Caller, Exchange
from understudy.server.metrics import Metrics
from understudy.server.service import Service

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Watched:
    backend: FakeBackend
    service: Service
    metrics: Metrics

    async def ask(self, request_id: str, *, endpoint: str = "chat", **fields: Any) -> list[Output]:
        """Answer a request to its end."""
        sampling = SamplingParams(**{"max_tokens": 12, "seed": 1, **fields.pop("sampling", {})})
        request = Request(request_id=request_id, prompt_ids=(1, 2, 3), sampling=sampling, **fields)
        return await self.answer(Exchange(request, Caller(), endpoint))

    async def answer(self, exchange: Exchange) -> list[Output]:
        return [output async for output in self.service.answer(exchange)]

    def value(self, name: str, /, **labels: str) -> float:
        return value(self.metrics, name, **labels)


def watched(folder: Path, **settings: Any) -> Watched:
    info = ModelInfo(
        name="tiny",
        system_fingerprint="fp",
        max_context=64,
        vocab_size=64,
        eos_ids=(2,),
        tokenizer_folder=str(folder),
        drafters=("suffix",),
        target_bytes=1000,
        draft_bytes=200,
        kv_bytes=30,
    )
    backend = FakeBackend(info, load=EngineLoad(num_running=3, num_waiting=1, num_free_blocks=25, num_blocks=100))
    service = Service(backend, ServerConfig(**settings))
    metrics = Metrics()
    metrics.watch(service)
    return Watched(backend, service, metrics)


def samples(metrics: Metrics) -> Samples:
    """Everything that a scrape reads, through Prometheus' own parser."""
    content, _ = metrics.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, /, **labels: str) -> float:
    """The sum over all samples of a name that carry these labels; a KeyError if there is none."""
    return total(samples(metrics), name, **labels)


def total(found: Samples, name: str, /, **labels: str) -> float:
    wanted = frozenset(labels.items())
    numbers = [number for (sample, carried), number in found.items() if sample == name and wanted <= carried]
    if not numbers:
        raise KeyError((name, labels))
    return sum(numbers)

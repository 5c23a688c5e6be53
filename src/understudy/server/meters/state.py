"""How full a server is and what it holds, read at the moment when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from understudy.core.backend import ModelInfo
from understudy.server.service import Service


class StateCollector(Collector):
    """The gauges of a service."""

    def __init__(
        self, service: Service, *, audit_failures: Callable[[], int], records_dropped: Callable[[], int]
    ) -> None:
        self._service = service
        self._audit_failures = audit_failures
        self._records_dropped = records_dropped

    def collect(self) -> Iterator[Metric]:
        """Yield what holds now."""
        service = self._service
        backend, load = service.backend, service.backend.load
        yield _gauge("running_choices", "Choices that hold a place", service.admission.num_running)
        yield _gauge("waiting_requests", "Requests in the queue", service.admission.num_waiting)
        yield _gauge("engine_running_sequences", "Choices that the engine computes", load.num_running)
        yield _gauge("engine_waiting_sequences", "Choices that the engine cannot compute yet", load.num_waiting)
        yield _gauge("kv_usage_ratio", "Share of the cache's blocks that are in use", kv_usage(service))
        yield _gauge("kv_blocks", "Blocks of the cache", load.num_blocks)
        yield _gauge("kv_free_blocks", "Blocks of the cache that could be handed out now", load.num_free_blocks)
        yield _gauge("engine_ready", "1 while the engine can answer", backend.state.phase == "ready")
        yield _gauge("draining", "1 while nobody new is taken on", service.admission.is_draining)
        yield _counter("engine_restarts", "How often the engine was started again", backend.num_restarts)
        yield _counter("audit_write_failures", "Lines of the audit log that were lost", self._audit_failures())
        yield _counter("state_failures", "Failed reads and writes of the state file", service.keeper.num_failures)
        yield _counter("records_dropped", "Requests that could not be recorded", self._records_dropped())
        info = info_of(service)
        memory = GaugeMetricFamily("understudy_memory_bytes", "Memory of the models and the cache", labels=("part",))
        if info is not None:
            for part, num_bytes in (
                ("target", info.target_bytes),
                ("draft", info.draft_bytes),
                ("kv", info.kv_bytes),
            ):
                memory.add_metric((part,), num_bytes)
        yield memory


def info_of(service: Service) -> ModelInfo | None:
    """What is served, once that is known."""
    return None if service.backend.state.phase == "starting" else service.backend.info


def model_name(service: Service) -> str:
    """What the model is called, once that is known."""
    info = info_of(service)
    return service.config.served_name or (info.name if info is not None else "")


def kv_usage(service: Service) -> float:
    """The share of the cache's blocks that are in use."""
    load = service.backend.load
    return 1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"understudy_{name}", meaning, value=float(value))


def _counter(name: str, meaning: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(f"understudy_{name}", meaning, value=value)

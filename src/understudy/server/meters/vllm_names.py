"""The same numbers under the names that vLLM gives them, so that its benchmark and its dashboards can read a server.

Nothing is counted twice: each is summed up from our own, over all classes, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from understudy.server.meters.requests import RequestMeter
from understudy.server.meters.speculation import MOST_POSITIONS, SpeculationMeter
from understudy.server.meters.state import kv_usage, model_name
from understudy.server.service import Service

_LABELS: Final = ("model_name", "engine")
_REASONS: Final = ("stop", "length", "abort", "error")


class VllmNames(Collector):
    """vLLM's names for what a server counts."""

    def __init__(self, service: Service, speculation: SpeculationMeter, requests: RequestMeter) -> None:
        self._service = service
        self._speculation = speculation
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Yield the sums."""
        labels = (model_name(self._service), "0")  # vLLM numbers its engines
        yield from self._counters(labels)
        yield from self._gauges(labels)
        for name, meaning, ours in (
            ("time_to_first_token_seconds", "From arrival to the first words", self._requests.ttft),
            ("e2e_request_latency_seconds", "From arrival to the end of finished requests", self._requests.e2e),
            (
                "request_time_per_output_token_seconds",
                "Mean time between two words of a request",
                self._requests.tpot,
            ),
        ):
            yield _histogram(name, meaning, ours, labels)

    def _counters(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        speculation, requests = self._speculation, self._requests
        for name, meaning, ours in (
            ("spec_decode_num_drafts", "Drafts that were verified", speculation.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens", speculation.drafted),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that the target said", speculation.accepted),
            ("prompt_tokens", "Tokens of prompts", requests.prompt_tokens),
            ("generation_tokens", "Words said, of choices that ended", requests.generation_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
            family.add_metric(labels, sum(sample.value for sample in _samples(ours, "_total")))
            yield family
        positions = _sums(speculation.matched, "position")
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position of the draft, from 0",
            labels=(*_LABELS, "position"),
        )
        for place in range(MOST_POSITIONS):  # vLLM's first is 0, ours 1; our last holds the deeper ones too
            name = str(place + 1) if place + 1 < MOST_POSITIONS else f"{MOST_POSITIONS}+"
            family.add_metric((*labels, str(place)), positions.get(name, 0.0))
        yield family
        reasons = _sums(requests.choices, "finish_reason")
        family = CounterMetricFamily(
            "vllm:request_success", "Choices by what ended them", labels=(*_LABELS, "finished_reason")
        )
        for reason in _REASONS:
            family.add_metric((*labels, reason), reasons.get(reason, 0.0))
        yield family

    def _gauges(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        admission, load = self._service.admission, self._service.backend.load
        for name, meaning, value in (
            ("num_requests_running", "Choices that are computed", load.num_running),
            (
                "num_requests_waiting",
                "Requests and choices that wait",
                admission.num_waiting + load.num_waiting,
            ),
            ("kv_cache_usage_perc", "Share of the cache that is in use, 1 for all of it", kv_usage(self._service)),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
            family.add_metric(labels, float(value))
            yield family


def _samples(metric: Counter | Histogram, suffix: str) -> list[Sample]:
    return [sample for family in metric.collect() for sample in family.samples if sample.name.endswith(suffix)]


def _sums(counter: Counter, label: str) -> dict[str, float]:
    """A counter's totals by the values of one label, over all values of the others."""

    def value_of(sample: Sample) -> str:
        return sample.labels[label]

    grouped = groupby(sorted(_samples(counter, "_total"), key=value_of), key=value_of)
    return {value: sum(sample.value for sample in samples) for value, samples in grouped}


def _histogram(name: str, meaning: str, ours: Histogram, labels: tuple[str, ...]) -> Metric:
    buckets: dict[str, float] = {}  # in order of their bounds, as each of ours has them
    for sample in _samples(ours, "_bucket"):
        bound = sample.labels["le"]
        buckets[bound] = buckets.get(bound, 0.0) + sample.value
    family = HistogramMetricFamily(f"vllm:{name}", meaning, labels=_LABELS)
    if not buckets:
        buckets = {"+Inf": 0.0}
    family.add_metric(labels, list(buckets.items()), sum(sample.value for sample in _samples(ours, "_sum")))
    return family

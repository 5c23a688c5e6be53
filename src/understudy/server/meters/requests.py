"""What requests came to and how long they took, by workload class; and which settings those had that failed.

ttft     from the request's arrival to its first words
e2e      from the request's arrival to its last words, of those that were finished
tpot     (last words - first words) / (tokens of a choice - 1), of those that were finished
queue    from the request's arrival until the engine was given it
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from understudy.core.events import Ended
from understudy.core.request import Request, SamplingParams
from understudy.server.exchange import Exchange

SECONDS_BUCKETS: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)
"""A small model with drafts says a word in half a millisecond; a long answer takes minutes."""


class RequestMeter:
    """Counters and histograms of requests and of their choices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_class = ("workload_class",)

        def counter(name: str, meaning: str, labels: tuple[str, ...] = by_class) -> Counter:
            return Counter(f"understudy_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(f"understudy_{name}", meaning, by_class, buckets=SECONDS_BUCKETS, registry=registry)

        self.requests = counter("requests", "Requests by what they came to", (*by_class, "endpoint", "outcome"))
        self.choices = counter("choices", "Choices by what ended them", (*by_class, "finish_reason"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts that the engine was given")
        self.cached_tokens = counter("cached_tokens", "Of those, the ones found in the prefix cache")
        self.generation_tokens = counter("generation_tokens", "Words said, of choices that ended")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first words")
        self.e2e = histogram("request_seconds", "From arrival to the end of finished requests")
        self.tpot = histogram("time_per_output_token_seconds", "Mean time between two words of a finished request")
        self.queue = histogram("queue_seconds", "From arrival until the engine was given the request")
        self.failures = counter(
            "request_failures",
            "Requests that failed, by their settings",
            ("model", "cause", "temperature_band", "filters", "grammar", "speculation"),
        )

    def ended(self, workload_class: str, exchange: Exchange) -> None:
        """Count a request, whatever it came to."""
        self.requests.labels(workload_class, exchange.endpoint, exchange.outcome).inc()
        if exchange.admitted_s is not None:
            self.prompt_tokens.labels(workload_class).inc(len(exchange.request.prompt_ids))
            self.queue.labels(workload_class).observe(exchange.admitted_s - exchange.arrived_s)
        if exchange.first_s is not None:
            self.ttft.labels(workload_class).observe(exchange.first_s - exchange.arrived_s)
        if exchange.outcome == "finished" and exchange.ended_s is not None:
            self.e2e.labels(workload_class).observe(exchange.ended_s - exchange.arrived_s)
            num_gaps = exchange.num_tokens / exchange.request.sampling.n - 1
            if num_gaps > 0 and exchange.first_s is not None and exchange.last_s is not None:
                self.tpot.labels(workload_class).observe((exchange.last_s - exchange.first_s) / num_gaps)

    def failed(self, request: Request, *, model: str, cause: str) -> None:
        """Count a request that failed, under the settings that it had."""
        self.failures.labels(model, cause, *settings_of(request)).inc()

    def choice_ended(self, workload_class: str, event: Ended) -> None:
        """Count a choice, whether anybody was still reading it or not."""
        self.choices.labels(workload_class, event.finish_reason).inc()
        self.generation_tokens.labels(workload_class).inc(event.facts.num_tokens)
        if event.choice == 0:  # the others of a request share its prompt
            self.cached_tokens.labels(workload_class).inc(event.facts.cached_tokens)


def settings_of(request: Request) -> tuple[str, str, str, str]:
    """The settings that failures are told apart by: temperature, filters, grammar, speculation. Few values each."""
    sampling, speculation = request.sampling, request.speculation
    return (
        _temperature_band(sampling.temperature),
        _filters(sampling),
        "no" if sampling.grammar is None else "yes",
        "on" if speculation.enabled and speculation.max_depth else "off",
    )


def _temperature_band(temperature: float) -> str:
    if temperature == 0.0:
        return "zero"
    return "low" if temperature <= 0.5 else "mid" if temperature <= 1.0 else "high"


def _filters(sampling: SamplingParams) -> str:
    used = [
        name
        for name, is_used in (
            ("top_k", sampling.top_k > 0),
            ("top_p", sampling.top_p < 1.0),
            ("min_p", sampling.min_p > 0.0),
            ("penalties", sampling.repetition_penalty != 1.0),
            ("penalties", sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0),
            ("logit_bias", bool(sampling.logit_bias)),
        )
        if is_used
    ]
    return "none" if not used else used[0] if len(set(used)) == 1 else "several"

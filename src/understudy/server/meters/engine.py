"""What every step of the engine computed and how long its parts took. Steps are told when somebody asks for numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

from understudy.core.events import Cycle

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKEN_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_PARTS = ("draft", "forward", "sample")
_KINDS = ("prompt", "draft", "scout", "word")


class EngineMeter(Collector):
    """Counters of steps. They run ahead of the counters of ended choices, and count what is lost with an engine too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tell_cycles: Callable[[], None] = lambda: None
        """Tells what is kept until somebody asks."""
        registry.register(self)  # before its counters, so that they are read up to date
        seconds = Counter(
            "understudy_step_seconds",
            "Seconds that steps spent on drafting, on the target's pass, and on drawing and committing words",
            ("part",),
            registry=registry,
        )
        rows = Counter(
            "understudy_rows",
            "Rows of the target's passes: a prompt's, drafted ones, those only learned from, and the last words'",
            ("kind",),
            registry=registry,
        )
        self._steps = Counter("understudy_steps", "Passes of the target", registry=registry)
        self._sequences = Counter("understudy_step_sequences", "Choices in all passes", registry=registry)
        self._emitted = Counter("understudy_emitted_tokens", "Words said, counted as they come", registry=registry)
        self._draft_s, self._forward_s, self._sample_s = (seconds.labels(part) for part in _PARTS)
        self._rows = [rows.labels(kind) for kind in _KINDS]
        self._rows_per_step = Histogram(
            "understudy_step_rows", "Rows of one pass", buckets=_ROW_BUCKETS, registry=registry
        )
        self._drafted_per_step = Histogram(
            "understudy_step_draft_rows", "Drafted rows of one pass", buckets=_TOKEN_BUCKETS, registry=registry
        )
        self._accepted_per_step = Histogram(
            "understudy_step_accepted_tokens", "Accepted tokens of one pass", buckets=_TOKEN_BUCKETS, registry=registry
        )

    def add(self, cycle: Cycle) -> None:
        """Count a step."""
        self._steps.inc()
        self._sequences.inc(cycle.num_sequences)
        self._emitted.inc(cycle.num_emitted)
        self._draft_s.inc(cycle.draft_s)
        self._forward_s.inc(cycle.forward_s)
        self._sample_s.inc(cycle.sample_s)
        named = (cycle.num_prompt_rows, cycle.num_draft_rows, cycle.num_scout_rows)
        for counter, count in zip(self._rows, (*named, cycle.num_rows - sum(named)), strict=True):
            if count:
                counter.inc(count)
        self._rows_per_step.observe(cycle.num_rows)
        self._drafted_per_step.observe(cycle.num_draft_rows)
        self._accepted_per_step.observe(cycle.num_accepted)

    def collect(self) -> Iterable[Metric]:
        """Nothing of its own: somebody asks, so what is kept is told and counted."""
        self.tell_cycles()
        return ()

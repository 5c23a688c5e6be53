"""What every step of the engine computed and how long its parts took. Steps are told when somebody asks for numbers."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from understudy.core.events import Cycle

_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKEN_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_PARTS = ("draft", "forward", "sample")
_KINDS = ("prompt", "draft", "scout", "word")


@dataclass(slots=True)
class _Spread:
    """How often a number was up to each bound, and the sum of all."""

    bounds: Sequence[int]
    counts: list[int] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, number: int) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number

    def family(self, name: str, meaning: str) -> Metric:
        """All of it, as Prometheus reads it: each bucket holds those below it, too."""
        buckets, so_far = [], 0
        for bound, count in zip((*(f"{bound}.0" for bound in self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=self.total)


class EngineMeter(Collector):
    """Counters of steps. They run ahead of the counters of ended choices, and count what is lost with an engine too.

    They are plain numbers until somebody asks: a step has a dozen of them, and a server a step every few milliseconds.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tell_cycles: Callable[[], None] = lambda: None
        """Tells what is kept until somebody asks."""
        self._lock = threading.Lock()  # whoever asks for numbers may do so in a thread of its own
        self._num_steps = self._num_sequences = self._num_emitted = 0
        self._seconds = [0.0] * len(_PARTS)
        self._rows = [0] * len(_KINDS)
        self._rows_per_step = _Spread(_ROW_BUCKETS)
        self._drafted_per_step = _Spread(_TOKEN_BUCKETS)
        self._accepted_per_step = _Spread(_TOKEN_BUCKETS)
        registry.register(self)

    def add(self, cycle: Cycle) -> None:
        """Count a step."""
        named = (cycle.num_prompt_rows, cycle.num_draft_rows, cycle.num_scout_rows)
        with self._lock:
            self._num_steps += 1
            self._num_sequences += cycle.num_sequences
            self._num_emitted += cycle.num_emitted
            for part, seconds in enumerate((cycle.draft_s, cycle.forward_s, cycle.sample_s)):
                self._seconds[part] += seconds
            for kind, count in enumerate((*named, cycle.num_rows - sum(named))):
                self._rows[kind] += count
            self._rows_per_step.add(cycle.num_rows)
            self._drafted_per_step.add(cycle.num_draft_rows)
            self._accepted_per_step.add(cycle.num_accepted)

    def collect(self) -> Iterable[Metric]:
        """Let what is kept be told, and yield all numbers."""
        self.tell_cycles()
        with self._lock:
            seconds = "Seconds that steps spent on drafting, on the target's pass, and on drawing and committing words"
            rows = "Rows of the target's passes: a prompt's, drafted ones, those only learned from, and the last words'"
            return [
                _labelled("understudy_step_seconds", seconds, "part", dict(zip(_PARTS, self._seconds, strict=True))),
                _labelled("understudy_rows", rows, "kind", dict(zip(_KINDS, self._rows, strict=True))),
                CounterMetricFamily("understudy_steps", "Passes of the target", self._num_steps),
                CounterMetricFamily("understudy_step_sequences", "Choices in all passes", self._num_sequences),
                CounterMetricFamily("understudy_emitted_tokens", "Words said, counted as they come", self._num_emitted),
                self._rows_per_step.family("understudy_step_rows", "Rows of one pass"),
                self._drafted_per_step.family("understudy_step_draft_rows", "Drafted rows of one pass"),
                self._accepted_per_step.family("understudy_step_accepted_tokens", "Accepted tokens of one pass"),
            ]


def _labelled(name: str, meaning: str, label: str, values: dict[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, meaning, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family

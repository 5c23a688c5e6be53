"""What a server's /metrics says of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.live.serving import Server

VLLM = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
OURS = ("understudy_spec_drafts", "understudy_spec_drafted_tokens", "understudy_spec_accepted_tokens")


@dataclass(frozen=True)
class Speculated:
    """Counters since the start of a server, or between two readings."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    def since(self, earlier: Speculated) -> Speculated:
        """What was counted after an earlier reading."""
        return Speculated(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
        )


def read_speculated(server: Server, workload_class: str | None = None) -> Speculated:
    """Read our counters of one class, or the sums over all of them, which have vLLM's names."""
    labels = {} if workload_class is None else {"workload_class": workload_class}
    names = VLLM if workload_class is None else OURS
    values = dict.fromkeys(names, 0)
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name in values and labels.items() <= sample.labels.items():
                values[name] += int(sample.value)
    return Speculated(*(values[name] for name in names))
